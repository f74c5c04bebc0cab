"""What grouped experts cost beside dense products of the same arithmetic: `python -m benchmarks.kernels`.

Every contender does one forward and backward pass in turn, many rounds; a ratio is the median over rounds of two passes
of the same round. "Products" are the six matrix products of a dense SwiGLU layer and nothing else.

`--model` prints instead the least time of each Triton kernel on an H200, see `moe/kernels/roofline.py`: of published
models' layers, or of `--shapes`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import MIXTRAL, QWEN, Layer
from data.atomic import write_json
from eval.command import run_command, terminal
from moe.kernels import grouped_mlp
from moe.kernels.roofline import Bound, bounds, passes
from moe.kernels.roofline import Shape as LayerShape
from moe.kernels.triton.tiles import find_tiles
from moe.routing import Routing
from training.device import keep_freed_memory

SHAPES = ("8x512x1024x4096", "64x512x256x4096")
WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """Experts E of width F on rows of width D."""

    experts: int
    width: int
    expert_width: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From ExDxFxROWS."""
        parts = text.split("x")
        if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(
                f"--shapes {text}: must be four numbers, experts x width x expert width x rows: {SHAPES[0]}"
            )
        return cls(*map(int, parts))

    @property
    def layer(self) -> tuple[int, int, int, int, int]:
        """(tokens, D, F, E, experts a token): one expert a token, so that rows are tokens."""
        return self.rows, self.width, self.expert_width, self.experts, 1

    def group_sizes(self, groups: str) -> list[int]:
        """Rows of each expert: "equal", or "skewed" as of a router without balance (normal logits)."""
        if groups == "equal":
            if self.rows % self.experts:
                raise ValueError(
                    f"--shapes: {self.rows} rows do not divide among {self.experts} experts in equal groups: change "
                    "one, or take --groups skewed"
                )
            return [self.rows // self.experts] * self.experts
        generator = torch.Generator().manual_seed(0)
        popularity_E = torch.randn(self.experts, generator=generator).softmax(0)
        expert_A = popularity_E.multinomial(self.rows, replacement=True, generator=generator)
        return expert_A.bincount(minlength=self.experts).tolist()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--shapes", nargs="+", help=f"experts x width x expert width x rows ({' '.join(SHAPES)})")
    parser.add_argument("--groups", nargs="+", default=["equal", "skewed"], choices=["equal", "skewed"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=25, help="counted rounds")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--model", action="store_true", help="print the roofline model of the GPU kernels and stop")
    options = parser.parse_args()
    shapes = [Shape.parse(text) for text in options.shapes or SHAPES]
    if options.model:
        if options.json:
            raise ValueError("--json keeps measured times, and --model prints bounds: leave one out")
        layers = [Layer(f"--shapes {text}", *Shape.parse(text).layer) for text in options.shapes or ()]
        print_model(terminal(), layers or [QWEN, MIXTRAL])
        return
    if options.repeats < 1:
        raise ValueError(f"--repeats {options.repeats}: must be at least 1")
    if options.threads < 0:
        raise ValueError(f"--threads {options.threads}: must be at least 1, or 0 for PyTorch's choice")
    if options.json:
        check_writable(options.json, "--json")
    for shape in shapes:
        for groups in options.groups:
            shape.group_sizes(groups)  # refused before anything is measured
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    results = []
    console = terminal(140)
    table = Table(title=f"forward + backward, ms: median (range) of {options.repeats} rounds", title_justify="left")
    columns = ["E", "D", "F", "rows", "", "groups", "products", "experts", "ratio"]
    columns += ["with weights read and written", "dense SwiGLU", "grouped_mm alone", "and gather, combine"]
    for column in columns:
        table.add_column(column)
    for shape in shapes:
        for precision in options.precisions:
            for groups in options.groups:
                result = measure(shape, precision, groups, options.repeats)
                results.append(result)
                times, ratios = result["ms"], result["ratio"]
                table.add_row(
                    *(str(v) for v in vars(shape).values()),
                    *(precision, groups, _spread(times["products"]), _spread(times["experts"])),
                    *(f"{ratios['experts']:.2f}", f"{ratios['experts, weights counted']:.2f}"),
                    *(
                        f"{ratios[name]:.2f}" if name in ratios else "-"
                        for name in ("dense SwiGLU", "grouped_mm alone", "gather and combine")
                    ),
                )
    console.print(table)
    if options.json:
        write_json(Path(options.json), results)


def check_writable(path: str, flag: str) -> None:
    """Find out before anything is measured that a result could not be kept.

    Raises:
        ValueError: the file's folder does not exist or takes no files, or the path is a folder.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {folder}; make it first")
    if Path(path).is_dir():
        raise ValueError(f"{flag} {path}: is a folder, and must be a file")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {path}: nothing can be written to {folder}")


def print_model(console: Console, layers: Sequence[Layer]) -> None:
    """The bounds of each kernel on an H200, with equal groups."""
    for layer in layers:
        shape = LayerShape.balanced(layer.tokens, layer.width, layer.expert_width, layer.experts, layer.per_token)
        tiles = find_tiles("sm_90", torch.bfloat16, layer.width, layer.expert_width, shape.rows_E[0])
        found = bounds(shape, tiles.by_kernel)
        table = Table(
            title=f"{layer.name}: {layer.tokens:,} tokens, D {layer.width}, F {layer.expert_width}, {layer.experts} "
            f"experts, {layer.per_token} a token; bf16, least time on an H200",
            title_justify="left",
        )
        for column in ("kernel", "TFLOP", "GB moved", "ms", "limited by", "TFLOP/s"):
            table.add_column(column, justify="left" if column in ("kernel", "limited by") else "right")
        for bound in (*found, *passes(found)):
            table.add_row(*_bound_row(bound))
        console.print(table)


def _bound_row(bound: Bound) -> tuple[str, ...]:
    rate = f"{bound.flops / bound.seconds / 1e12:.0f}" if bound.flops else ""
    sizes = (f"{bound.flops / 1e12:.2f}", f"{bound.bytes / 1e9:.2f}", f"{1e3 * bound.seconds:.2f}")
    return bound.kernel, *sizes, bound.limit, rate


def measure(shape: Shape, precision: str, groups: str, repeats: int) -> dict[str, Any]:
    """Time the experts and what they are held against, in turn.

    Returns:
        "ms": times of each contender, by round. "ratio": to the dense products of the same round, median over rounds;
        "experts, weights counted" to those and the time to read all experts' weights twice and write their gradients
        at the bandwidth of a copy in the same round.
    """
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    contenders = build(shape, dtype, shape.group_sizes(groups))
    ms: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + WARM_UP):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if number >= WARM_UP:
                ms[name].append(1e3 * (time.perf_counter() - started))
    base = ms["products"]
    ratio = {name: statistics.median(b / a for a, b in zip(base, times, strict=True)) for name, times in ms.items()}
    # A copy reads and writes: three streams of weight-sized tensors are one and a half copies of all weights.
    counted = (e / (p + 1.5 * c) for e, p, c in zip(ms["experts"], base, ms["copy of the weights"], strict=True))
    ratio["experts, weights counted"] = statistics.median(counted)
    return {**vars(shape), "precision": precision, "groups": groups, "ms": ms, "ratio": ratio}


def build(shape: Shape, dtype: torch.dtype, sizes: list[int]) -> dict[str, Callable[[], object]]:
    """Contenders by name; each call is one forward and backward pass."""
    torch.manual_seed(0)
    width, expert_width, experts, rows = shape.width, shape.expert_width, shape.experts, shape.rows
    x_AD = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    grad_AD = torch.randn(rows, width, dtype=dtype)
    w13_E2FD = (torch.randn(experts, 2, expert_width, width, dtype=dtype) * width**-0.5).requires_grad_()
    w2_EDF = (torch.randn(experts, width, expert_width, dtype=dtype) * expert_width**-0.5).requires_grad_()
    offsets_E = torch.tensor(sizes).cumsum(0).to(torch.int32)
    capacity = sizes[0] if len(set(sizes)) == 1 else None
    weight_A = torch.rand(rows, requires_grad=True)
    ordered = Routing(None, offsets_E, None, rows, capacity)
    order_A = torch.randperm(rows)  # one expert a token: as many rows as tokens
    routed = Routing(order_A, offsets_E, weight_A, rows, capacity)
    w13_HD, w2_DF = w13_E2FD.detach()[0].flatten(0, 1).clone(), w2_EDF.detach()[0].clone()
    dense = [w13_HD.clone().requires_grad_(), w2_DF.clone().requires_grad_()]
    hidden_AH, act_AF = torch.randn(rows, 2 * expert_width, dtype=dtype), torch.randn(rows, expert_width, dtype=dtype)
    spare = [torch.empty_like(w13_E2FD), torch.empty_like(w2_EDF)]

    def products() -> object:
        x = x_AD.detach()
        up, down = x @ w13_HD.T, act_AF @ w2_DF.T
        return up, down, grad_AD @ w2_DF, grad_AD.T @ act_AF, hidden_AH @ w13_HD, hidden_AH.T @ x

    def passes(forward: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, grad_AD)

    def swiglu() -> Tensor:
        gate_AF, up_AF = (x_AD @ dense[0].T).chunk(2, 1)
        return (F.silu(gate_AF) * up_AF) @ dense[1].T

    def grouped() -> Tensor:
        hidden = F.grouped_mm(x_AD, w13_E2FD.flatten(1, 2).transpose(1, 2), offs=offsets_E)
        gate_AF, up_AF = hidden.chunk(2, 1)
        return F.grouped_mm(F.silu(gate_AF) * up_AF, w2_EDF.transpose(1, 2), offs=offsets_E)

    def copy() -> None:
        for target, source in zip(spare, (w13_E2FD, w2_EDF), strict=True):
            target.copy_(source.detach())

    weights = (w13_E2FD, w2_EDF)
    contenders = {
        "products": products,
        "experts": passes(lambda: grouped_mlp(x_AD, *weights, ordered), x_AD, *weights),
        "copy of the weights": copy,
        "dense SwiGLU": passes(swiglu, x_AD, *dense),
        "grouped_mm alone": passes(grouped, x_AD, *weights),
        "gather and combine": passes(lambda: grouped_mlp(x_AD, *weights, routed), x_AD, weight_A, *weights),
    }
    if any(side * dtype.itemsize % 16 for side in (width, expert_width)):
        del contenders["grouped_mm alone"]  # its rows are whole 16 bytes
    return contenders


def _spread(times: list[float]) -> str:
    median = statistics.median(times)
    digits = 0 if median >= 10 else 2 if median >= 0.1 else 4
    return f"{median:.{digits}f} ({min(times):.{digits}f}-{max(times):.{digits}f})"


if __name__ == "__main__":
    run_command(main)
