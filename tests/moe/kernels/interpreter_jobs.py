"""What runs in the interpreter's process: kernels beside a plain float64 loop over assignments.

Memory that PyTorch hands out uninitialised is filled with NaN here, so that what a kernel forgets to write shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe.routing import Routing
from tests.moe.helpers import make_layer, relative_error

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A layer to compute.

    Attributes:
        counts: rows of each expert.
        tokens: T.
        width, hidden: D and F.
        dtype: of the operands.
        weighted: there are combine weights; else all are 1.
        ordered: rows stand in expert order already: no `token_A`.
        uniform: expert choice: the number of rows is known to the host.
        target: whose tiles, and whether those are loaded by descriptors.
    """

    counts: tuple[int, ...]
    tokens: int = 140
    width: int = 40
    hidden: int = 24
    dtype: torch.dtype = torch.float32
    weighted: bool = True
    ordered: bool = False
    uniform: bool = False
    target: str = "interpreter"


def start() -> None:
    """Poison uninitialised memory. Rows wider than 64 are summed in several pieces."""
    from moe.kernels.triton import combine

    combine.BLOCK_D = 64
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all() and torch.empty(2, dtype=torch.float16).isnan().all()


def run(job: Callable[..., Any], *args: Any) -> Any:
    """Call a job from a random state that no earlier one has changed."""
    torch.manual_seed(0)
    return job(*args)


def make(case: Case, seed: int = 0) -> tuple[Named, Routing]:
    """Operands, an upstream gradient "dout" and a routing, the same every time."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    rows, num_experts = sum(case.counts), len(case.counts)
    tokens = rows if case.ordered else case.tokens
    drawn = [torch.randperm(tokens, generator=generator)[:count].sort().values for count in case.counts]
    named = {
        "x": normal(tokens, case.width),
        "w13": normal(num_experts, 2, case.hidden, case.width) * 0.3,
        "w2": normal(num_experts, case.width, case.hidden) * 0.3,
        "weight": torch.rand(rows, generator=generator),
        "dout": normal(tokens, case.width),
    }
    routing = Routing(
        None if case.ordered else torch.cat(drawn),
        torch.tensor(case.counts).cumsum(0).to(torch.int32),
        named["weight"] if case.weighted else None,
        tokens,
        case.counts[0] if case.uniform else None,
    )
    return named, routing


def plain_loop(case: Case, named: Named, routing: Routing) -> Named:
    """Every tensor that a kernel writes, in float64, one assignment after the other."""
    x, w13, w2, weight = (named[name].double().requires_grad_() for name in ("x", "w13", "w2", "weight"))
    rows = sum(case.counts)
    token_A = list(range(rows)) if routing.token_A is None else routing.token_A.tolist()
    expert_A = [expert for expert, count in enumerate(case.counts) for _ in range(count)]
    rows_x = [x[token].clone() for token in token_A]
    hidden = [w13[expert].flatten(0, 1) @ row for expert, row in zip(expert_A, rows_x, strict=True)]
    gates_ups = [row.chunk(2) for row in hidden]
    act = [gate / (1 + (-gate).exp()) * up for gate, up in gates_ups]
    y = [w2[expert] @ row for expert, row in zip(expert_A, act, strict=True)]
    out = list(torch.zeros(x.shape, dtype=torch.float64))
    for assignment, token in enumerate(token_A):
        out[token] = out[token] + (weight[assignment] if case.weighted else 1) * y[assignment]
    scale = weight[:, None] if case.weighted else 1
    found: Named = {"out": torch.stack(out)}
    inputs = [x, w13, w2] + ([weight] if case.weighted else [])
    if rows == 0:
        return found | {f"d{name}": torch.zeros_like(named[name].double()) for name in ("x", "w13", "w2", "weight")}
    found |= {"hidden": torch.stack(hidden), "act": torch.stack(act), "y": torch.stack(y)}
    found["scaled_act"] = found["act"] * scale
    gradients = torch.autograd.grad(found["out"], [*inputs, *hidden, *rows_x], named["dout"].double())
    found |= {f"d{name}": value for name, value in zip(("x", "w13", "w2", "weight"), gradients, strict=False)}
    if not case.weighted:
        del found["dweight"]
    found["dhidden"] = torch.stack(gradients[len(inputs) : len(inputs) + rows])
    found["drows"] = torch.stack(gradients[len(inputs) + rows :])
    return {name: value.detach() for name, value in found.items()}


def kernel_by_kernel(case: Case, named: Named, routing: Routing) -> Named:
    """Every tensor that a kernel writes, by the kernels."""
    from moe.kernels.permute import Combine
    from moe.kernels.triton import backward, forward
    from moe.kernels.triton.combine import combine
    from moe.kernels.triton.launch import INTERPRETER, TARGETS
    from moe.kernels.triton.plan import make_plan
    from moe.kernels.triton.tiles import find_tiles

    x, w13, w2, dout = named["x"], named["w13"], named["w2"], named["dout"]
    rows, token_A, weight_A = sum(case.counts), routing.token_A, routing.weight_A
    at = TARGETS.get(case.target, INTERPRETER)
    tiles = find_tiles(at, case.dtype, case.width, case.hidden, rows / len(case.counts))
    tile, plan = tiles.by_kernel, make_plan(routing.offsets_E, routing.capacity, rows, tiles.block_m)
    found: Named = {}
    found["hidden"], found["act"] = forward.up_fwd(x, w13, token_A, rows, plan, tile["up_fwd"], at)
    found["y"] = forward.down_fwd(found["act"], w2, plan, tile["down_fwd"], at)
    found["dhidden"], found["scaled_act"], dweight = backward.down_dgrad(
        dout, w2, found["hidden"], weight_A, token_A, plan, tile["down_dgrad"], at
    )
    found["dw2"] = backward.dw2(dout, found["scaled_act"], token_A, plan, tile["dw2"], at)
    found["dw13"] = backward.dw13(found["dhidden"], x, token_A, plan, tile["dw13"], at).view_as(w13)
    found["drows"] = backward.up_dgrad(found["dhidden"], w13, plan, tile["up_dgrad"], at)
    if dweight is not None:
        found["dweight"] = dweight
    if token_A is not None:
        order = Combine.by_token(token_A, x.shape[0])
        found["out"] = combine(found["y"], weight_A, order.order_A, order.start_T)
        found["dx"] = combine(found["drows"], None, order.order_A, order.start_T)
    return found


def whole(named: Named, routing: Routing) -> Named:
    """The output and the gradients of the operands, by the backend."""
    from moe.kernels import grouped_mlp

    weighted = routing.weight_A is not None
    names = ["x", "w13", "w2"] + (["weight"] if weighted else [])
    inputs = [named[name].detach().clone().requires_grad_() for name in names]
    routing = replace(routing, weight_A=inputs[3] if weighted else None)
    out = grouped_mlp(*inputs[:3], routing, "triton")
    gradients = torch.autograd.grad(out, inputs, named["dout"])
    return {"out": out.detach()} | {f"d{name}": value for name, value in zip(names, gradients, strict=True)}


def errors_of_kernels(case: Case) -> dict[str, float]:
    """How far every kernel's output is from the loop's, as a part of its largest value."""
    named, routing = make(case)
    return _compare(kernel_by_kernel(case, named, routing), plain_loop(case, named, routing))


def errors_of_backend(case: Case) -> dict[str, float]:
    """How far the backend's output and gradients are from the loop's."""
    named, routing = make(case)
    return _compare(whole(named, routing), plain_loop(case, named, routing))


def sizes_of_values(case: Case) -> dict[str, float]:
    """The sum of the absolute values of the output and of each gradient; NaN if there is one."""
    return {name: value.abs().sum().item() for name, value in whole(*make(case)).items()}


def changed_by_programs_and_repeats(case: Case) -> list[str]:
    """What is not bit for bit the same when it is computed again, or by other numbers of programs."""
    from moe.kernels.triton import launch

    named, routing = make(case)
    first, changed, before = whole(named, routing), [], launch.INTERPRETER
    try:
        for programs in (before.processors, 1, 5):
            launch.INTERPRETER = replace(before, processors=programs)
            again = whole(named, routing)
            changed += [f"{name} by {programs}" for name in first if not first[name].equal(again[name])]
    finally:
        launch.INTERPRETER = before
    return changed


def changed_by_poison(case: Case, expert: int) -> tuple[list[str], int]:
    """Fill an expert's weights, the tokens that only it takes and those that nobody takes with NaN.

    Returns:
        (what changed of the other experts' results: nothing may, how many tokens were poisoned).
    """
    named, routing = make(case)
    assert routing.token_A is not None
    expert_A = routing.expert_A()
    clean_T = torch.zeros(case.tokens, dtype=torch.bool)
    clean_T[routing.token_A[expert_A != expert]] = True
    mixed_T = torch.zeros_like(clean_T)
    mixed_T[routing.token_A[expert_A == expert]] = True
    others = [e for e in range(len(case.counts)) if e != expert]
    first = whole(named, routing)
    poisoned = {name: value.clone() for name, value in named.items()}
    for name in ("x", "dout"):
        poisoned[name][~clean_T] = torch.nan
    for name in ("w13", "w2"):
        poisoned[name][expert] = torch.nan
    second = whole(poisoned, routing)
    alone_T, nobody_T = clean_T & ~mixed_T, ~clean_T & ~mixed_T
    changed = [name for name in ("out", "dx") if not first[name][alone_T].equal(second[name][alone_T])]
    changed += [f"{name} of nobody" for name in ("out", "dx") if second[name][nobody_T].count_nonzero()]
    changed += [name for name in ("dw13", "dw2") if not first[name][others].equal(second[name][others])]
    weights = expert_A != expert
    if not first["dweight"][weights].equal(second["dweight"][weights]):
        changed.append("dweight")
    return changed, int((~clean_T).sum())


def errors_of_a_layer(router: str) -> dict[str, float]:
    """A whole mixture layer with the backend "triton" beside itself with "torch": output and every gradient."""
    from moe.routing import RoutingContext

    found: list[Named] = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        sizes = {"num_experts": 4, "expert_width": 24, "experts_per_token": 2, "group_sequences": 2, "allow_leak": True}
        layer = make_layer(40, router=router, backend=backend, **sizes)
        x_BSD = torch.randn(2, 12, 40, requires_grad=True)
        out_BSD = layer(x_BSD, RoutingContext(2, 12, mode="train"))
        out_BSD.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"out": out_BSD.detach(), "x": x_BSD.grad, **gradients})
    return _compare(found[1], found[0])


def message_of_bf16() -> str:
    """What the backend says about bfloat16 in the interpreter."""
    named, routing = make(Case((3, 4), dtype=torch.bfloat16))
    try:
        whole(named, routing)
    except ValueError as error:
        return str(error)
    return ""


class Far(Tensor):
    """A tensor that says it starts `before` bytes earlier than it does: the end of a large one, to a kernel."""

    before = 0

    def data_ptr(self) -> int:
        """Where the large tensor would start."""
        return super().data_ptr() - self.before


def errors_far_from_the_start() -> dict[str, float]:
    """Tensors of more than 2^31 elements, of which kernels read and write one expert and some rows at the end.

    The tensors do not exist: pointers are moved back by what lies before, which nothing may touch, and where a kernel
    goes through all experts or tokens, its programs are numbered from the last one's on.
    """
    from triton.runtime.interpreter import interpreter_builder

    from moe.kernels.triton import backward, combine, forward, launch
    from moe.kernels.triton.plan import Plan
    from moe.kernels.triton.tiles import find_tiles

    case = Case((20,), tokens=20, width=37, hidden=19)  # no descriptors
    named, routing = make(case)
    x, w13, w2, dout, weight_A = (named[name] for name in ("x", "w13", "w2", "dout", "weight"))
    expected, at = plain_loop(case, named, routing), launch.INTERPRETER
    tile = find_tiles(at, case.dtype, case.width, case.hidden, 20).by_kernel
    expert, first = 2**31 // (case.width * case.hidden) + 5, 2**31 // case.hidden + 5
    by_expert, not_moved = {"w13", "w2", "weight"}, {"tiles_ptr", "count_ptr", "order_ptr", "start_ptr"}
    set_place = interpreter_builder.set_grid_idx

    def set_far(before: int, place: int, *rest: int) -> None:
        interpreter_builder.grid_idx = (place + before, *rest)

    def launch_far(name: str, kernel: object, grid: tuple[int, ...], warps: int, stages: int, **given: Any) -> None:
        outer, before = name in ("dw2", "dw13"), 0
        if outer:
            block, size = (given["BLOCK_M"], given["BLOCK_N"]), (given["G"], given["R"])
            tiles = math.prod(-(-n // b) for n, b in zip(size[:: -1 if given["ROWS_LEFT"] else 1], block, strict=True))
            grid, before, given["num_experts"] = (tiles,), expert * tiles, expert + 1
        elif name == "combine":
            before = first
            given["num_tokens"] += first
        for key, value in given.items():
            if isinstance(value, Tensor) and (key not in not_moved or (name, key) == ("combine", "start_ptr")):
                moved = expert if key in by_expert | {"offsets_ptr"} or (outer and key == "out_ptr") else first
                given[key] = value.as_subclass(type("Far", (Far,), {"before": moved * value[0].nbytes}))
        interpreter_builder.set_grid_idx = lambda *place: set_far(before, *place)
        launch.launch(name, kernel, grid, warps, stages, **given)

    plan = Plan(
        torch.tensor([first + 20], dtype=torch.int32),
        capacity=0,
        block_m=32,
        bound=1,
        tiles_N2=torch.tensor([[expert, first]], dtype=torch.int32),
        count_1=torch.ones(1, dtype=torch.int32),
    )
    # Where the last expert's run starts is the end of the one before it.
    ends = replace(plan, offsets_E=torch.tensor([first, first + 20], dtype=torch.int32)[1:])
    assert routing.token_A is not None
    token_A, found = routing.token_A + first, {}
    modules = (forward, backward, combine)
    try:
        for module in modules:
            module.launch = launch_far
        found["hidden"], found["act"] = forward.up_fwd(x, w13, token_A, 20, plan, tile["up_fwd"], at)
        found["y"] = forward.down_fwd(found["act"], w2, plan, tile["down_fwd"], at)
        found["dhidden"], found["scaled_act"], found["dweight"] = backward.down_dgrad(
            dout, w2, found["hidden"], weight_A, token_A, plan, tile["down_dgrad"], at
        )
        found["dw2"] = backward.dw2(dout, found["scaled_act"], token_A, ends, tile["dw2"], at)
        found["dw13"] = backward.dw13(found["dhidden"], x, token_A, ends, tile["dw13"], at).view_as(w13)
        found["drows"] = backward.up_dgrad(found["dhidden"], w13, plan, tile["up_dgrad"], at)
        order_A = routing.token_A.argsort() + first
        found["out"] = combine.combine(found["y"], weight_A, order_A, torch.arange(20))
    finally:
        interpreter_builder.set_grid_idx = set_place
        for module in modules:
            module.launch = launch.launch
    return _compare(found, expected)


def sums_of_rows(rows_AD: Tensor) -> Tensor:
    """What `combine` makes of rows that all belong to the first of two tokens, in stored order."""
    from moe.kernels.triton.combine import combine

    return combine(rows_AD, None, torch.arange(rows_AD.shape[0]), torch.tensor([0, rows_AD.shape[0]]))


def changed_by_an_expanded_gradient(case: Case) -> list[str]:
    """What the gradient of a plain sum, which is one number seen many times, does not leave as it is."""
    named, routing = make(case)
    one = torch.ones(1, 1, dtype=case.dtype)
    found = [
        whole(named | {"dout": dout}, routing)
        for dout in (one.expand_as(named["dout"]), one.expand_as(named["dout"]).contiguous())
    ]
    return [name for name in found[0] if not found[0][name].equal(found[1][name])]


def _compare(found: Named, expected: Named) -> dict[str, float]:
    assert found.keys() <= expected.keys()
    return {name: relative_error(value, expected[name]) if value.numel() else 0.0 for name, value in found.items()}


def sizes_behind_the_last_expert(spare: int) -> dict[str, float]:
    """Rows that belong to nobody, NaN in them and in their gradient: what comes out there, and all errors."""
    from moe.kernels.triton.backend import grouped_mlp_triton

    case = Case((1, 0, 5), ordered=True)
    named, routing = make(case)
    rows = sum(case.counts)
    leaves = {name: named[name].clone() for name in ("x", "w13", "w2", "weight")}
    for name in ("x", "weight"):
        filler = torch.full((spare, *leaves[name].shape[1:]), torch.nan)
        leaves[name] = torch.cat([leaves[name], filler])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    longer = replace(routing, weight_A=leaves["weight"], num_tokens=rows + spare)
    out = grouped_mlp_triton(leaves["x"], leaves["w13"], leaves["w2"], longer)
    dout = torch.cat([named["dout"], torch.full((spare, case.width), torch.nan)])
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    wanted = plain_loop(case, named, routing)
    found = {"behind": max(t[rows:].abs().max().item() for t in (out, gradients[0], gradients[3]))}
    found["out"] = relative_error(out[:rows].detach(), wanted["out"])
    for name, gradient in zip(leaves, gradients, strict=True):
        own = gradient[:rows] if name in ("x", "weight") else gradient
        found[f"d{name}"] = relative_error(own, wanted[f"d{name}"])
    return found
