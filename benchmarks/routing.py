"""What routing costs beside the experts: `python -m benchmarks.routing [--experts 64] [--tokens 4096] ...`.

A mixture layer's forward and backward pass is timed in turn with its experts alone, on rows that lie in expert order
already and need no weights: the difference is routing, dispatch and combine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from eval.command import run_command, terminal
from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.routing import Routing, RoutingContext
from training.device import keep_freed_memory

SEQUENCES = 4


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    for name, default in {"experts": 64, "width": 512, "expert-width": 256, "tokens": 4096, "k": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--routers", nargs="+", default=["expert_choice", "token_choice"])
    parser.add_argument("--repeats", type=int, default=15, help="counted passes of each contender")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    console = terminal()
    table = Table(
        title=f"{options.experts} experts, D {options.width}, F {options.expert_width}, {options.tokens} tokens, "
        f"{options.k} experts a token; forward and backward, median (range) of {options.repeats}, in turn",
        title_justify="left",
    )
    for column in ("router", "precision", "layer, ms", "experts alone, ms", "routing, dispatch and combine"):
        table.add_column(column)
    results = []
    for router in options.routers:
        for dtype in (torch.float32, torch.bfloat16):
            result = measure(router, dtype, options)
            results.append(result)
            layer, experts = result["layer_ms"], result["experts_ms"]
            table.add_row(router, result["precision"], _spread(layer), _spread(experts), f"{result['share']:.1%}")
    console.print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


def measure(router: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Time a layer and its experts alone, in turn.

    Returns:
        Milliseconds of each pass, and the share of the layer's median that is not the experts'.
    """
    if options.tokens % SEQUENCES:
        raise ValueError(f"--tokens {options.tokens}: must be a multiple of {SEQUENCES}, the sequences of the batch")
    moe = MoEConfig(
        router=router,
        num_experts=options.experts,
        experts_per_token=options.k,
        expert_width=options.expert_width,
        group_sequences=SEQUENCES,
        allow_leak=True,
    )
    torch.manual_seed(0)
    layer = MoELayer(moe, options.width, 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=options.width**-0.5)
    layer.router.reset_parameters()
    layer.router.reset_buffers()
    layer.experts.to(dtype)
    x_BSD = torch.randn(SEQUENCES, options.tokens // SEQUENCES, options.width, dtype=dtype, requires_grad=True)
    grad_BSD = torch.randn_like(x_BSD)
    seen: list[Routing] = []

    def whole() -> Tensor:
        batch, length = x_BSD.shape[:2]
        context = RoutingContext(batch, length, mode="train", token_BS=torch.zeros(batch, length).long())
        if not seen:  # later ones must not be kept: their memory would have to be found anew in every pass
            context.observe = lambda _, routing: seen.append(routing)
        return layer(x_BSD, context)

    whole()
    routing = seen[0]
    assert routing.token_A is not None
    rows = x_BSD.detach().flatten(0, 1)[routing.token_A].requires_grad_()
    ordered = Routing(None, routing.offsets_E, None, len(rows), routing.capacity)
    contenders: list[tuple[Callable[[], Tensor], Tensor]] = [
        (whole, grad_BSD),
        (lambda: layer.experts(rows, ordered), torch.randn_like(rows)),
    ]
    taken: list[list[float]] = [[], []]
    for repeat in range(options.repeats + 3):
        for place, (forward, grad) in enumerate(contenders):
            for tensor in (x_BSD, rows, *layer.parameters()):
                tensor.grad = None
            started = time.perf_counter()
            forward().backward(grad)
            if repeat >= 3:
                taken[place].append(1e3 * (time.perf_counter() - started))
    medians = [statistics.median(times) for times in taken]
    return {
        "router": router,
        "precision": str(dtype).removeprefix("torch."),
        "layer_ms": taken[0],
        "experts_ms": taken[1],
        "share": 1 - medians[1] / medians[0],
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


if __name__ == "__main__":
    run_command(main)
