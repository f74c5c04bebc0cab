"""What needs a GPU to be known, in one run of some minutes: `python -m benchmarks.gpu --out DIR [--corpus CORPUS]`.

Each kernel's results in bf16 against fp32, the same bits over 20 runs, speed and memory beside dense products of equal
arithmetic and other ways to group, compiled blocks against eager ones, and, with `--corpus`, a short training run
against the CPU's, eager and with compiled blocks. Writes `gpu.json` after every part and prints tables. What fails is
recorded and the rest goes on; the exit status is then 1.
`--rehearse` goes through it on the CPU at toy sizes, in Triton's interpreter (compiled blocks, which cannot hold
interpreted kernels, with the torch backend): that proves the script, no number.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters

from data.atomic import write_json
from eval.command import run_command, terminal
from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model
from moe.kernels import grouped_mlp
from moe.routing import Routing, RoutingContext


@dataclasses.dataclass(frozen=True)
class Layer:
    """Shape of one layer's call; `equal` says that expert choice made it, with equal groups."""

    name: str
    tokens: int
    width: int
    expert_width: int
    experts: int
    per_token: int
    equal: bool = False

    @property
    def rows(self) -> int:
        """Assignments A."""
        return self.tokens * self.per_token

    @property
    def flops(self) -> float:
        """Of the forward pass; the backward pass has twice as many."""
        return 6.0 * self.rows * self.width * self.expert_width


# Layers of published models.
QWEN = Layer("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8)
MIXTRAL = Layer("Mixtral 8x7B", 32768, 4096, 14336, 8, 2)
SPEED = (
    dataclasses.replace(QWEN, name=f"{QWEN.name}, token choice"),
    dataclasses.replace(QWEN, name=f"{QWEN.name}, expert choice", equal=True),
    dataclasses.replace(MIXTRAL, name=f"{MIXTRAL.name}, token choice"),
)
CORRECTNESS = (
    Layer("ragged", 1000, 512, 384, 16, 2),
    Layer("equal", 1024, 512, 384, 16, 2, equal=True),
    Layer("few rows", 40, 512, 384, 16, 2),
)
TOY = Layer("toy", 48, 32, 24, 4, 2)
ERROR = 1e-2  # of bf16 results, relative
# Of a bf16 loss after a few steps on another device: some roundings of 2^-9 each, of a loss that hardly averages them.
LOSS_ERROR = 1e-2
GRADIENT_ERROR = (
    5e-2  # of all bf16 gradients of two layers together: 0.008 to 0.011 on a CPU, where compiled code rounds less often
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", required=True, help="folder for gpu.json")
    parser.add_argument("--repeats", type=int, default=10, help="counted rounds of each contender")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU, in the interpreter")
    parser.add_argument("--corpus", help="also train for a few steps on this corpus, on the GPU and on the CPU")
    options = parser.parse_args()
    if options.rehearse:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("--rehearse runs kernels in the interpreter: set TRITON_INTERPRET=1 in the environment")
    elif not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --rehearse goes through the script without one")
    device = torch.device("cpu" if options.rehearse else "cuda")
    dtype = torch.float32 if options.rehearse else torch.bfloat16  # bf16 products are wrong in the interpreter
    toys = (TOY, dataclasses.replace(TOY, name="toy, equal", equal=True))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    result: dict[str, Any] = {"versions": versions(device), "rehearsal": options.rehearse, "failed": failed}
    console = terminal()

    def part(name: str, call: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """One part, whatever becomes of it. Written at once: what a time limit cuts off is the rest only."""
        found = attempt(call, *arguments)
        if not found.get("passed", True) or any("error" in each for each in found.values() if isinstance(each, dict)):
            failed.append(name)
        result[name] = found
        write_json(out / "gpu.json", result)
        if call is not speed or "error" in found:
            console.print(f"{name}: {found}", markup=False)
        return found

    for layer in toys if options.rehearse else CORRECTNESS:
        part(f"correctness, {layer.name}", correctness, layer, device, dtype)
    for router in ("token_choice", "expert_choice"):
        part(f"compiled blocks, {router}", compiled_blocks, router, device, dtype)
    for layer in toys if options.rehearse else SPEED:
        times = part(f"speed, {layer.name}", speed, layer, device, dtype, 1 if options.rehearse else options.repeats)
        if "error" not in times:
            print_speed(console, layer, times)
    if options.corpus:
        expected = part("training, CPU", training, options.corpus, "cpu").get("losses", [])
        part("training, eager", training, options.corpus, device.type, False, expected)
        part("training, compiled", training, options.corpus, device.type, True, expected)
    else:
        part("training", lambda: {"not run": "it needs --corpus"})
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}; {out / 'gpu.json'} has the numbers")


def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or, of one that does not get through, its "error", not "passed"."""
    try:
        return call(*arguments)
    except Exception as error:  # of a compiler or the device, say: the rest is worth having
        return {"error": f"{type(error).__name__}: {error}", "passed": False}


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    import triton

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, interpreted"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": name}


def inputs(layer: Layer, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], Routing, Tensor]:
    """([x, w13, w2, weights], routing, gradient of the output); popular and unpopular experts, one without tokens."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    d, f, e = layer.width, layer.expert_width, layer.experts
    values = [normal(layer.tokens, d), normal(e, 2, f, d) * d**-0.5, normal(e, d, f) * f**-0.5]
    if layer.equal:
        capacity = layer.rows // e
        token_A = normal(e, layer.tokens).topk(capacity).indices.sort(1).values.flatten()
        counts_E = torch.full((e,), capacity, device=device)
    else:
        scores_TE = normal(layer.tokens, e) + normal(e)
        scores_TE[:, 1] = -torch.inf
        expert_A = scores_TE.topk(layer.per_token).indices.flatten()
        order_A = expert_A.argsort(stable=True)
        token_A, counts_E = order_A // layer.per_token, expert_A.bincount(minlength=e)
    weight_A = torch.rand(layer.rows, generator=generator, device=device).requires_grad_()
    leaves = [value.to(dtype).requires_grad_() for value in values]
    offsets_E = counts_E.cumsum(0).to(torch.int32)
    routing = Routing(token_A, offsets_E, weight_A, layer.tokens, layer.rows // e if layer.equal else None)
    return [*leaves, weight_A], routing, normal(layer.tokens, d).to(dtype)


def correctness(layer: Layer, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors of output and gradients against the reference in fp32, and whether 20 runs have the same bits."""
    leaves, routing, grad_TD = inputs(layer, device, dtype)

    def once() -> list[Tensor]:
        for _ in range(3):  # what the allocator hands out next holds NaN
            torch.full((layer.rows, 2 * layer.width), torch.nan, dtype=dtype, device=device)
        out = grouped_mlp(leaves[0], leaves[1], leaves[2], routing, "triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_TD)]

    first = once()
    same = all(all(map(torch.equal, first, once())) for _ in range(1 if device.type == "cpu" else 19))
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    in_fp32 = dataclasses.replace(routing, weight_A=exact[3])
    out = grouped_mlp(exact[0], exact[1], exact[2], in_fp32, "reference")
    wanted = [out.detach(), *torch.autograd.grad(out, exact, grad_TD.float())]
    names = ("out", "dx", "dw13", "dw2", "dweight")
    errors = {n: ((a.float() - b).norm() / b.norm()).item() for n, a, b in zip(names, first, wanted, strict=True)}
    passed = same and all(error < ERROR for error in errors.values())  # a NaN is not below anything
    return {"errors": errors, "same_bits": same, "passed": passed}


def compiled_blocks(router: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A forward and backward pass of a small model, its blocks eager and compiled one by one, around the kernels.

    Returns:
        "loss" and "gradients": relative differences of compiled to eager; how many "graphs" were compiled; the
        "graph_breaks" by reason; "passed".
    """
    on_gpu = device.type == "cuda"
    moe = MoEConfig(router, num_experts=8, expert_width=256, allow_leak=True, backend="triton" if on_gpu else "torch")
    shape = ModelConfig(vocabulary_size=512, width=256, layers=2 if on_gpu else 1, heads=4)
    model = build_model(shape, moe, seed=0, compute_dtype=dtype).to(device)
    batch, length = 4, 128
    token_BS = torch.randint(512, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    label_BS = token_BS.roll(-1, 1)

    def once() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        model.forget_step()
        loss = model(token_BS, RoutingContext(batch, length, mode="train"), label_BS=label_BS).mean()
        loss.backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return loss.detach(), torch.cat(parts)

    loss, gradient = once()
    torch._dynamo.reset()
    counters.clear()
    for block in model.blocks.values():
        block.compile(backend="inductor" if on_gpu else "aot_eager")
    compiled_loss, compiled_gradient = once()
    worst = ((compiled_loss - loss).abs() / loss).item()
    error = ((compiled_gradient - gradient).norm() / gradient.norm()).item()
    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    passed = graphs > 0 and worst < LOSS_ERROR and error < GRADIENT_ERROR
    # The first lines say what and why; the rest is advice.
    reasons = {"; ".join(map(str.strip, reason.splitlines()[:2])): count for reason, count in breaks.items()}
    return {"loss": worst, "gradients": error, "graphs": graphs, "graph_breaks": reasons, "passed": passed}


def contenders(layer: Layer, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Tensor], Any]]:
    """Forward passes by name, with the leaves to differentiate; all have the same arithmetic."""
    leaves, routing, _ = inputs(layer, device, dtype)
    x, w13, w2, weight_A = leaves
    assert routing.token_A is not None
    token_A, rows = routing.token_A, layer.rows
    dense = [t.detach()[0].clone().requires_grad_() for t in (w13, w2)]
    rows_AD = x.detach()[token_A].requires_grad_()

    def swiglu(hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate) * up

    def products() -> Tensor:
        return swiglu(rows_AD @ dense[0].flatten(0, 1).T) @ dense[1].T

    def grouped_mm() -> Tensor:
        up = F.grouped_mm(x[token_A], w13.flatten(1, 2).transpose(1, 2), offs=routing.offsets_E)
        down = F.grouped_mm(swiglu(up), w2.transpose(1, 2), offs=routing.offsets_E)
        return torch.zeros_like(x).index_add(0, token_A, down * weight_A.to(dtype)[:, None])

    def bmm() -> Tensor:
        gathered = x[token_A].view(layer.experts, rows // layer.experts, -1)
        down = swiglu(gathered @ w13.flatten(1, 2).transpose(1, 2)) @ w2.transpose(1, 2)
        return torch.zeros_like(x).index_add(0, token_A, down.flatten(0, 1) * weight_A.to(dtype)[:, None])

    found: dict[str, tuple[Callable[[], Tensor], Any]] = {
        "choir, triton": (lambda: grouped_mlp(x, w13, w2, routing, "triton"), leaves),
        "dense torch.matmul": (products, [rows_AD, *dense]),
    }
    if device.type == "cuda":
        found["gather, F.grouped_mm, index_add"] = (grouped_mm, leaves)
    if layer.equal:
        found["gather, bmm, index_add"] = (bmm, leaves)
    return found


def speed(layer: Layer, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of forward and backward by contender, in turn, the memory kept between them, and its peak.

    A contender that fails has its "error" in place of times.
    """
    table = contenders(layer, device, dtype)
    result: dict[str, dict[str, Any]] = {name: {"forward_ms": [], "backward_ms": []} for name in table}
    for number in range(repeats + 2):
        for name, (forward, leaves) in table.items():
            if "error" in result[name]:
                continue
            found = attempt(_passes, forward, leaves, device)
            if "error" in found:
                result[name] = {"error": found["error"]}
            elif number >= 2:
                for key in ("forward_ms", "backward_ms"):
                    result[name][key].append(found.pop(key))
                result[name] |= found
    return result


def _passes(forward: Callable[[], Tensor], leaves: Any, device: torch.device) -> dict[str, float]:
    before = _allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    out, forward_ms = _timed(forward, device)
    kept = _allocated(device) - before
    grad = torch.ones_like(out)
    _, backward_ms = _timed(lambda: torch.autograd.grad(out, leaves, grad), device)
    peak = _allocated(device, peak=True) - before
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "kept_bytes": kept, "peak_bytes": peak}


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    value = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return value, 1e3 * (time.perf_counter() - started)


def _allocated(device: torch.device, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def print_speed(console: Console, layer: Layer, found: dict[str, dict[str, Any]]) -> None:
    """TFLOP/s, and ratios to the dense products of the same round."""
    table = Table(title=f"{layer.name}: median (range)", title_justify="left")
    for column in ("", "forward TFLOP/s", "of dense", "backward TFLOP/s", "of dense", "kept GiB", "peak GiB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in found.items():
        if "error" in times:
            table.add_row(name, "failed")
            continue
        row = [name]
        for part, factor in (("forward_ms", 1), ("backward_ms", 2)):
            rates = [factor * layer.flops / (1e-3 * ms) / 1e12 for ms in times[part]]
            row.append(f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})")
            dense = found["dense torch.matmul"].get(part)
            ratios = [d / ms for d, ms in zip(dense, times[part], strict=True)] if dense else []
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "-")
        table.add_row(*row, *(f"{times[key] / 2**30:.2f}" for key in ("kept_bytes", "peak_bytes")))
    console.print(table)


def training(
    corpus: str, device: str, compiled: bool = False, expected: Sequence[float] | None = None
) -> dict[str, Any]:
    """Losses of a short run of the quickstart in bf16, its blocks eager or compiled, held against those `expected`.

    Returns:
        "losses", the "largest_relative_difference" where some are expected, and whether it "passed".

    Raises:
        ValueError: none are there to be held against.
    """
    from training.build import build_engine
    from training.load_config import load_config

    flags = ["--training.steps", "4", "--training.warmup-steps", "1", "--training.precision", "bf16"]
    config = load_config(["configs/quickstart.toml", *flags, "--data.corpus", corpus], "benchmarks.gpu")
    engine = build_engine(config, 1, torch.device(device))
    for block in engine.models[0].blocks.values() if compiled else ():
        block.compile()
    return judged(_steps(engine, config), expected)


def judged(losses: Sequence[float], expected: Sequence[float] | None) -> dict[str, Any]:
    """See `training`. Without any expected, losses pass that are numbers."""
    if expected is None:
        return {"losses": losses, "passed": all(map(math.isfinite, losses))}
    if not expected:
        raise ValueError("the CPU's run failed: there are no losses to compare with")
    differences = [abs(a - b) / b for a, b in zip(losses, expected, strict=True)]
    passed = all(each < LOSS_ERROR for each in differences)  # a NaN is not below anything
    return {"losses": losses, "largest_relative_difference": max(differences), "passed": passed}


def _steps(engine: Any, config: Any) -> list[float]:
    from data.corpus import Corpus
    from training.build import build_batches
    from training.optimizer import build_optimizer
    from training.step import train_step

    opened = Corpus.open(config.data.corpus)
    training = config.training
    batches = build_batches(config, opened)
    optimizer = build_optimizer(engine, training)
    end = opened.tokenizer.end_of_text
    steps = range(training.steps)
    return [train_step(engine, optimizer, batches.batch(step), config, step, end).loss for step in steps]


if __name__ == "__main__":
    run_command(main)
