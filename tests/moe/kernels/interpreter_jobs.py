"""What the process that runs Triton's interpreter computes for `test_triton_interpreter.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.triton import backend, backward, forward, plan
from moe.kernels.triton.plan import offset
from moe.routing import Routing
from tests.moe import oracle


@dataclass(frozen=True)
class Case:
    """One call of the kernels.

    Attributes:
        sizes: rows of each expert.
        width, expert_width: D and F.
        tokens: T; rows take them at random, the last two are taken by nobody. 0: rows are in expert order already.
        equal: tell the kernels that all experts have as many.
        spare: rows behind the last expert's, which nobody may look at (only without tokens).
        weighted: with combine weights.
        dtype: "float32" or "float16".
    """

    sizes: tuple[int, ...]
    width: int = 40
    expert_width: int = 24
    tokens: int = 29
    equal: bool = False
    spare: int = 0
    weighted: bool = True
    dtype: str = "float32"
    seed: int = field(default=0, compare=False)


def start() -> None:
    """First call of the process, which had the switch in its environment when it imported Triton."""
    assert backend.is_interpreted()
    torch.set_num_threads(1)


def inputs(case: Case) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """([x, w13, w2, weights], token of each row, end of each expert's rows)."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    experts, rows = len(case.sizes), sum(case.sizes)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    x = normal(case.tokens or rows + case.spare, case.width)
    w13 = normal(experts, 2, case.expert_width, case.width, std=case.width**-0.5)
    w2 = normal(experts, case.width, case.expert_width, std=case.expert_width**-0.5)
    weight_A = torch.rand(rows + (0 if case.tokens else case.spare), generator=generator)
    token_A = torch.randint(0, case.tokens - 2, (rows,), generator=generator) if case.tokens else None
    if case.spare:
        x[rows:] = torch.nan
    return [x, w13, w2, weight_A], token_A, torch.tensor(case.sizes).cumsum(0).to(torch.int32)


def errors(case: Case) -> dict[str, float]:
    """Relative error of output and gradients against a plain loop in fp64; of the interpreter on poisoned memory."""
    assert backend.is_interpreted()
    (x, w13, w2, weight_A), token_A, offsets_E = inputs(case)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)
    if case.spare:
        upstream[sum(case.sizes) :] = torch.nan
    leaves = [t.clone().requires_grad_() for t in (x, w13, w2, weight_A)]
    used = leaves if case.weighted else leaves[:3]
    capacity = case.sizes[0] if case.equal else None
    routing = Routing(token_A, offsets_E, leaves[3] if case.weighted else None, x.shape[0], capacity)
    with poisoned():
        out = backend.grouped_mlp_triton(*leaves[:3], routing)
        found = [out.detach(), *torch.autograd.grad(out, used, upstream)]
        again = backend.grouped_mlp_triton(*leaves[:3], routing)
        repeated = [again.detach(), *torch.autograd.grad(again, used, upstream)]
    wanted = loop(case, (x, w13, w2, weight_A), token_A, upstream)
    names = ["out", "dx", "dw13", "dw2", "dweight"][: len(found)]
    result = {}
    for name, value, second, want in zip(names, found, repeated, wanted, strict=False):
        assert torch.equal(value, second), f"{name}: a second run gave other bits"
        norm = want.norm().item()
        result[name] = ((value.double() - want).norm() / (norm or 1.0)).item()
    return result


def loop(case: Case, given: tuple[Tensor, ...], token_A: Tensor | None, upstream: Tensor) -> list[Tensor]:
    """Output and gradients, row by row in fp64. Rows of no expert: zeros."""
    x, w13, w2, weight_A = (t.double().requires_grad_() for t in given)
    expert_A = [e for e, size in enumerate(case.sizes) for _ in range(size)]
    out = [torch.zeros(case.width, dtype=torch.float64) for _ in range(x.shape[0])]
    for a, e in enumerate(expert_A):
        source = a if token_A is None else int(token_A[a])
        y = oracle.swiglu(x[source], w13[e, 0], w13[e, 1], w2[e])
        out[source] = out[source] + (weight_A[a] if case.weighted else 1.0) * y
    whole = torch.stack(out) if out else torch.zeros(0, case.width, dtype=torch.float64)
    used = [x, w13, w2] + ([weight_A] if case.weighted else [])
    if not expert_A:
        return [whole, *(torch.zeros_like(t) for t in used)]
    counted = len(expert_A) if token_A is None else len(out)
    grads = torch.autograd.grad(whole[:counted], used, upstream.double()[:counted])
    grads = [torch.where(grad.isnan(), 0.0, grad) if case.spare else grad for grad in grads]
    return [whole.detach(), *grads]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, or a number that is no row's and no expert's."""
    before = torch.Tensor.new_empty, torch.empty_like, torch.empty

    def poison(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**31) + 7)

        return made

    torch.Tensor.new_empty, torch.empty_like, torch.empty = map(poison, before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.new_empty, torch.empty_like, torch.empty = before  # type: ignore[method-assign]


@triton.jit
def product(a, b, out, N: tl.constexpr):
    """out = a b."""
    r = tl.arange(0, N)
    place = r[:, None] * N + r[None, :]
    tl.store(out + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@triton.jit
def write_offset(index, out, STRIDE: tl.constexpr):
    """What `offset` makes of a 32-bit number in memory."""
    tl.store(out, offset(tl.load(index), STRIDE))


def dot_errors() -> dict[str, float]:
    """Largest error of `tl.dot` on 16 x 16 whole numbers from -2 to 2, by dtype."""
    a, b = torch.randint(-2, 3, (2, 16, 16), generator=torch.Generator().manual_seed(0)).unbind(0)
    result = {}
    for name in ("float32", "float16", "bfloat16"):
        out = torch.empty(16, 16)
        product[(1,)](*(t.to(getattr(torch, name)).contiguous() for t in (a, b)), out, N=16)
        result[name] = (out - (a @ b).float()).abs().max().item()
    return result


def offsets(cases: list[tuple[int, int]]) -> list[int]:
    """What the kernels' `offset` makes of (index, stride), index being a 32-bit number."""
    found = []
    for index, stride in cases:
        out = torch.zeros(1, dtype=torch.int64)
        write_offset[(1,)](torch.tensor([index], dtype=torch.int32), out, STRIDE=stride)
        found.append(int(out))
    return found


def variants(token_counts: list[int]) -> dict[str, int]:
    """Sets of compile-time constants that each kernel is started with over so many token counts; none is run."""
    seen: dict[str, set[str]] = {}
    kernels = {
        **{"up_fwd": forward.up_fwd, "rows_times": forward.rows_times, "combine": forward.combine},
        **{"down_dgrad": backward.down_dgrad, "outer": backward.outer, "plan_tiles": plan.plan_tiles},
    }
    runs = {name: kernel.run for name, kernel in kernels.items()}

    def spy(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            constants = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
            seen.setdefault(name, set()).add(repr(sorted(constants.items())))

        return run

    for name, kernel in kernels.items():
        kernel.run = spy(name)
    for tokens in token_counts:
        for equal in (False, True):
            sizes = (tokens,) * 3 if equal else (tokens, 0, tokens // 2)
            case = Case(sizes, 16, 16, tokens + 2, equal)
            (x, w13, w2, weight_A), token_A, offsets_E = inputs(case)
            leaves = [t.requires_grad_() for t in (x, w13, w2, weight_A)]
            routing = Routing(token_A, offsets_E, leaves[3], x.shape[0], tokens if equal else None)
            backend.grouped_mlp_triton(*leaves[:3], routing).sum().backward()
    for name, kernel in kernels.items():
        kernel.run = runs[name]
    return {name: len(found) for name, found in seen.items()}


def refusal(what: str) -> str:
    """The message for a bad input."""
    (x, w13, w2, weight_A), token_A, offsets_E = inputs(Case((3, 2), tokens=5))
    given = {
        "fp64": (x.double(), w13.double(), w2.double()),
        "mixed": (x, w13.half(), w2),
        "strided": (x.T.contiguous().T, w13, w2),
    }
    try:
        if what == "huge":  # no memory has it: only the number is looked at
            backend.require_countable("elements of an expert's w13", 2 * 2**15 * (2**15 + 1))
        else:
            backend.check(*given[what], Routing(token_A, offsets_E, weight_A, 5))
    except ValueError as error:
        return str(error)
    return ""
