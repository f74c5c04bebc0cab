"""What `grouped_mlp` takes, and what it says of the rest: a kernel that trusted such operands would read past them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.config import ConfigError
from moe.kernels import grouped_mlp
from moe.kernels.operands import check_operands
from moe.kernels.permute import Combine, combine_rows, gather_rows, permute_rows
from moe.modules import RMSNorm
from moe.routing import Routing

T, D, E, F = 7, 16, 3, 8
Given = dict[str, Any]


def given() -> Given:
    """Nine assignments, ragged: 4, 0 and 5."""
    return {
        "x": torch.randn(T, D),
        "w13": torch.randn(E, 2, F, D),
        "w2": torch.randn(E, D, F),
        "token_A": torch.tensor([0, 2, 3, 6, 0, 1, 2, 4, 5]),
        "offsets_E": torch.tensor([4, 4, 9], dtype=torch.int32),
        "weight_A": torch.rand(9),
        "capacity": None,
    }


def compute(operands: Given, backend: str = "torch") -> Tensor:
    routing = Routing(*(operands[name] for name in ("token_A", "offsets_E", "weight_A")), T, operands["capacity"])
    return grouped_mlp(operands["x"], operands["w13"], operands["w2"], routing, backend)


BAD: dict[str, tuple[Callable[[Given], Given], str]] = {
    "w2 is (E, F, D)": (lambda g: {"w2": torch.randn(E, F, D)}, r"do not fit together: x \(7, 16\).*w2 \(3, 8, 16\)"),
    "w2 has half the width": (lambda g: {"w2": torch.randn(E, D, F // 2)}, r"do not fit.*w2 \(3, 16, 4\)"),
    "w13 has no gate": (lambda g: {"w13": torch.randn(E, 1, F, D)}, r"do not fit.*w13 \(3, 1, 8, 16\)"),
    "w13 of other experts": (lambda g: {"w13": torch.randn(E + 1, 2, F, D)}, r"do not fit.*w13 \(4, 2, 8, 16\)"),
    "x of another width": (lambda g: {"x": torch.randn(T, D + 1)}, r"do not fit.*x \(7, 17\)"),
    "x of three dimensions": (lambda g: {"x": torch.randn(1, T, D)}, r"do not fit.*x \(1, 7, 16\)"),
    "too few weights": (lambda g: {"weight_A": torch.rand(8)}, r"do not fit.*weight_A \(8,\)"),
    "an offset too few": (lambda g: {"offsets_E": g["offsets_E"][:2]}, r"do not fit.*offsets_E \(2,\)"),
    "no experts": (
        lambda g: {"w13": torch.randn(0, 2, F, D), "w2": torch.randn(0, D, F), "offsets_E": g["offsets_E"][:0]},
        r"do not fit.*w13 \(0, 2, 8, 16\)",
    ),
    "int64 offsets": (lambda g: {"offsets_E": g["offsets_E"].long()}, r"offsets_E is torch.int64.*int32"),
    "strided offsets": (
        lambda g: {"offsets_E": g["offsets_E"].repeat_interleave(2)[::2]},
        r"strides \(2,\).*contiguous",
    ),
    "tokens that are no numbers of tokens": (lambda g: {"token_A": g["token_A"].float()}, "token_A is torch.float32"),
    "a capacity of other rows": (lambda g: {"capacity": 4}, "capacity = 4 of 3 experts is 12 rows, and there are 9"),
    "a capacity of unequal runs": (lambda g: {"capacity": 3}, r"capacity = 3 and offsets_E = \[4, 4, 9\]"),
    "falling offsets": (
        lambda g: {"offsets_E": torch.tensor([4, 2, 9], dtype=torch.int32)},
        r"offsets_E = \[4, 2, 9\]: must be the rising ends of runs in 9 rows",
    ),
    "a negative offset": (lambda g: {"offsets_E": torch.tensor([-1, 4, 9], dtype=torch.int32)}, "rising ends"),
    "more than there is": (lambda g: {"offsets_E": torch.tensor([4, 4, 10], dtype=torch.int32)}, "in 9 rows"),
    "mixed types": (lambda g: {"w2": g["w2"].double()}, r"x is torch.float32, .*w2 is torch.float64\. Cast"),
    "whole numbers": (lambda g: {n: g[n].long() for n in ("x", "w13", "w2")}, "not in torch.int64: cast"),
    "two devices": (lambda g: {"w2": g["w2"].to("meta")}, "on cpu and meta: move"),
}


@pytest.mark.parametrize("name", BAD)
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    operands = given()
    compute(operands)
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        compute(operands | change(operands))


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'"tritn": must be one of "auto", "reference", "torch"'):
        compute(given(), "tritn")


def test_a_distributed_tensor_is_refused() -> None:
    class Elsewhere(Tensor):
        def to_local(self) -> Tensor:
            return self

    operands = given()
    with pytest.raises(ValueError, match=r"w13 is a Elsewhere: .*w13.to_local\(\)"):
        compute(operands | {"w13": operands["w13"].as_subclass(Elsewhere)})


def test_values_on_another_device_are_not_waited_for() -> None:
    operands = given()
    meta = {name: value.to("meta") for name, value in operands.items() if isinstance(value, Tensor)}
    check_operands(meta["x"], meta["w13"], meta["w2"], Routing(meta["token_A"], meta["offsets_E"], meta["weight_A"], T))


def test_experts_without_a_place_give_zeros() -> None:
    """Capacity 0: no rows, zero output, and gradients that are 0 and not missing."""
    operands = given() | {"capacity": 0, "token_A": torch.empty(0, dtype=torch.int64), "weight_A": torch.empty(0)}
    operands["offsets_E"] = torch.zeros(E, dtype=torch.int32)
    leaves = [operands[name].requires_grad_() for name in ("x", "w13", "w2")]
    out = compute(operands)
    out.sum().backward()
    assert out.shape == (T, D) and not out.any()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


@pytest.mark.parametrize("capacity", [None, 3])
def test_expanded_rows_and_gradients_are_taken(capacity: int | None) -> None:
    """In expert order, where nothing gathers them: one row seen nine times, and the gradient of a plain sum."""
    offsets_E = torch.tensor([3, 6, 9] if capacity else [4, 4, 9], dtype=torch.int32)
    w13, w2, row = torch.randn(E, 2, F, D), torch.randn(E, D, F), torch.randn(1, D)
    found = []
    for expanded in (row.expand(9, D), row.repeat(9, 1)):
        x, leaf = expanded.requires_grad_(), w2.clone().requires_grad_()
        out = grouped_mlp(x, w13, leaf, Routing(None, offsets_E, None, 9, capacity), "torch")
        found.append(torch.autograd.grad(out.sum(), [x, leaf]))
    assert all(one.equal(other) and one.any() for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("wanted", [("x",), ("w13",), ("w2",), ("weight_A",), ("x", "weight_A"), ("w13", "w2")])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_frozen_operand_changes_no_other_gradient(wanted: tuple[str, ...], ordered: bool) -> None:
    names = ("x", "w13", "w2", "weight_A")
    operands = given() | ({"token_A": None, "x": torch.randn(9, D)} if ordered else {})
    every = [operands[name].requires_grad_() for name in names]
    expected = dict(zip(names, torch.autograd.grad(compute(operands).square().sum(), every), strict=True))
    for name in names:
        operands[name] = operands[name].detach().requires_grad_(name in wanted)
    compute(operands).square().sum().backward()
    for name in names:
        gradient = operands[name].grad
        assert gradient is None if name not in wanted else gradient.equal(expected[name])


TOKEN_A = torch.tensor([0, 2, 2])
ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "experts": lambda x: compute(given() | {"x": x}),
    "norm": lambda x: RMSNorm(D, 1e-5)(x),
    "gather": lambda x: gather_rows(x, TOKEN_A, Combine.by_token(TOKEN_A, T)),
    "combine": lambda x: combine_rows(x[:3], torch.rand(3), TOKEN_A, Combine.by_token(TOKEN_A, T)),
    "permute": lambda x: permute_rows(x, torch.randperm(T)),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused_and_not_wrong(name: str) -> None:
    """Their backward is written by hand and taken once; a wrong second derivative would be silent."""
    x = torch.randn(T, D, requires_grad=True)
    (gradient,) = torch.autograd.grad(ONCE[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_token_adds_up_its_experts_lowest_first_and_in_wide_numbers() -> None:
    """1 + 1e8 - 1e8 is 0 in this order in fp32, and 1 in the other."""
    token_A, rows = torch.tensor([1, 1, 1]), torch.tensor([[1.0], [1e8], [-1e8]])
    assert Combine.by_token(token_A, 2)(rows).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("capacity", [None, 300])
def test_a_weights_gradient_is_added_up_in_fp32(capacity: int | None) -> None:
    """In a bf16 run: products are rounded, their sum over F is not. Rounding it too would be off by up to 0.4%."""
    generator, rows, width, hidden = torch.Generator().manual_seed(0), 300, 64, 512
    x, dout = (torch.randn(rows, width, generator=generator).bfloat16() for _ in range(2))
    w13 = torch.randn(1, 2, hidden, width, generator=generator).bfloat16()
    w2 = torch.randn(1, width, hidden, generator=generator).bfloat16()
    weight_A = torch.ones(rows, requires_grad=True)
    routing = Routing(None, torch.tensor([rows], dtype=torch.int32), weight_A, rows, capacity)
    grouped_mlp(x, w13, w2, routing, "torch").backward(dout)
    assert weight_A.grad is not None
    rounded = weight_A.grad.bfloat16().float()
    assert (rounded != weight_A.grad).float().mean() > 0.9
