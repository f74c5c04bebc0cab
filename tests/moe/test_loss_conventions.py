"""Other libraries' losses as plain loops: what they print, what they minimise, and the factors between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from moe.loss_conventions import (
    BALANCE,
    Z,
    convert_balance_coefficient,
    convert_balance_value,
    convert_z_coefficient,
    convert_z_value,
    printed_balance,
)
from moe.losses import router_z
from moe.routers.selection import top_k_mask

L, T, E, K = 3, 5, 4, 2
Mask = list[list[list[bool]]]


def layer_loops(probability_LTE: Tensor, assigned: Mask) -> list[Tensor]:
    """sum_e (assignments of e) * (summed probability of e), layer by layer, in scalars."""
    layers = []
    for p_TE, chosen in zip(probability_LTE, assigned, strict=True):
        tokens, experts = p_TE.shape
        layers.append(
            sum(
                sum(chosen[t][e] for t in range(tokens)) * sum(p_TE[t, e] for t in range(tokens))
                for e in range(experts)
            )
        )
    return layers


def choir(p: Tensor, assigned: Mask) -> Tensor:
    return sum(E / (K * T * T) * layer for layer in layer_loops(p, assigned))


def megatron(p: Tensor, assigned: Mask) -> Tensor:
    """probabilities * counts * E / (k T T), attached to each layer, so summed."""
    return sum(layer * E / (K * T * T) for layer in layer_loops(p, assigned))


def megablocks(p: Tensor, assigned: Mask) -> Tensor:
    """E / (L T k) * counts . mean probabilities, over the layers side by side."""
    return E / (L * T * K) * sum(layer / T for layer in layer_loops(p, assigned))


def flaxformer(p: Tensor, assigned: Mask) -> Tensor:
    """E^2 * mean over experts of mean mask * mean probability; T5X takes the mean over layers."""
    return sum(E**2 * (layer / (T * T)) / E for layer in layer_loops(p, assigned)) / L


def transformers(p: Tensor, assigned: Mask) -> Tensor:
    """E * sum_e (assignments of e per row) (mean probability of e), over the rows of all layers together."""
    rows = [p[layer, t] for layer, t in product(range(L), range(T))]
    chosen = [assigned[layer][t] for layer, t in product(range(L), range(T))]
    return E * sum(
        sum(row[e] for row in chosen) / len(rows) * sum(row[e] for row in rows) / len(rows) for e in range(E)
    )


MINIMISED: dict[str, Callable[[Tensor, Mask], Tensor]] = {
    "choir": choir,
    "megatron": megatron,
    "megablocks": megablocks,
    "flaxformer": flaxformer,
    "transformers": transformers,
}
# Only Megatron logs something else than it minimises.
PRINTED = {**MINIMISED, "megatron": lambda p, assigned: megatron(p, assigned) / L}
EXACT = [name for name in BALANCE if name != "transformers"]
each_library = pytest.mark.parametrize("name", BALANCE)


def routing(same_load: bool) -> tuple[Tensor, Tensor]:
    """Probabilities of L layers, and top-k of them, or of the first layer's for all (other probabilities, equal f)."""
    p_LTE = torch.randn(L, T, E).mul(2).softmax(-1)
    assigned_LTE = torch.stack([top_k_mask(p_TE, K) for p_TE in p_LTE])
    return p_LTE, assigned_LTE[:1].expand(L, -1, -1) if same_load else assigned_LTE


def test_every_convention_has_a_plain_loop() -> None:
    assert set(MINIMISED) == set(BALANCE)


@each_library
def test_printed_balance_is_the_librarys_formula(name: str) -> None:
    """A01: for any routing, equal loads or not."""
    p_LTE, assigned_LTE = routing(same_load=False)
    value = printed_balance(name, p_LTE, assigned_LTE, K)
    torch.testing.assert_close(value, PRINTED[name](p_LTE, assigned_LTE.tolist()))


@each_library
@pytest.mark.parametrize("k, layers", [(1, 1), (2, 1), (1, 3), (2, 3), (4, 3)])
def test_value_at_uniform_routing(name: str, k: int, layers: int) -> None:
    """A01: what each library prints for zero logits, by its documentation's words rather than by a formula."""
    at_uniform = {"choir": layers, "transformers": k, "megatron": 1, "megablocks": 1, "flaxformer": k}
    logits_LTE = torch.zeros(layers, 8, 4)
    chosen_LTE = torch.stack([top_k_mask(logits_TE, k) for logits_TE in logits_LTE])
    assert printed_balance(name, logits_LTE.softmax(-1), chosen_LTE, k).item() == pytest.approx(at_uniform[name])
    assert convert_balance_value(layers, "choir", name, k, layers) == pytest.approx(at_uniform[name])


@pytest.mark.parametrize("source, target", list(product(EXACT, EXACT)))
def test_values_convert_exactly_for_any_routing(source: str, target: str) -> None:
    p_LTE, assigned_LTE = routing(same_load=False)
    assigned = assigned_LTE.tolist()
    value = convert_balance_value(PRINTED[source](p_LTE, assigned).item(), source, target, K, L)
    assert value == pytest.approx(PRINTED[target](p_LTE, assigned).item(), rel=1e-6)


@pytest.mark.parametrize("source, target", list(product(EXACT, EXACT)))
def test_coefficients_convert_to_the_same_gradient_for_any_routing(source: str, target: str) -> None:
    assert_same_gradient(source, target, *routing(same_load=False))


@each_library
def test_transformers_converts_exactly_where_every_layer_has_the_same_load(name: str) -> None:
    """Both ways, values and gradients; the probabilities may differ between layers."""
    p_LTE, assigned_LTE = routing(same_load=True)
    assigned = assigned_LTE.tolist()
    for source, target in ((name, "transformers"), ("transformers", name)):
        value = convert_balance_value(PRINTED[source](p_LTE, assigned).item(), source, target, K, L)
        assert value == pytest.approx(PRINTED[target](p_LTE, assigned).item(), rel=1e-6)
        assert_same_gradient(source, target, p_LTE, assigned_LTE)


def assert_same_gradient(source: str, target: str, p_LTE: Tensor, assigned_LTE: Tensor) -> None:
    p_LTE = p_LTE.clone().requires_grad_()
    coefficients = {source: 0.01, target: convert_balance_coefficient(0.01, source, target, K, L)}
    gradients = [
        torch.autograd.grad(coefficient * MINIMISED[name](p_LTE, assigned_LTE.tolist()), p_LTE)[0]
        for name, coefficient in coefficients.items()
    ]
    torch.testing.assert_close(gradients[0], gradients[-1])


def test_opposite_layers_cancel_in_transformers_and_nowhere_else() -> None:
    """A01: two collapsed layers, one for expert 0 and one for expert 1, k = 1: E each, but E / 2 pooled.

    The factor k / L would have promised E for the pooled value: no factor can be right for both routings.
    """
    logits_LTE = torch.zeros(2, 5, 4)
    logits_LTE[0, :, 0] = logits_LTE[1, :, 1] = 100
    p_LTE = logits_LTE.softmax(-1)
    printed = {name: printed_balance(name, p_LTE, p_LTE > 0.5, 1).item() for name in BALANCE}
    expected = {"choir": 8, "transformers": 2, "megatron": 4, "megablocks": 4, "flaxformer": 4}
    assert printed == pytest.approx(expected)
    assert convert_balance_value(printed["choir"], "choir", "transformers", 1, 2) == pytest.approx(4)


@pytest.mark.parametrize("poison", [math.nan, 1e30])
@each_library
def test_printed_balance_cuts_padding_out(name: str, poison: float) -> None:
    """A02: the value of the valid tokens alone, the mask lying right against the layers."""
    p_LTE, assigned_LTE = routing(same_load=False)
    valid_T = torch.tensor([False, True, True, False, True])
    expected = printed_balance(name, p_LTE[:, valid_T], assigned_LTE[:, valid_T], K)
    poisoned_LTE = torch.where(valid_T[:, None], p_LTE, poison)
    torch.testing.assert_close(printed_balance(name, poisoned_LTE, assigned_LTE, K, valid_T), expected)


def test_coefficients_by_hand() -> None:
    """k = 8, 48 layers: 0.001 in transformers (Qwen3-MoE's default) pulls each layer like 0.001 * 8 / 48 here."""
    assert convert_balance_coefficient(0.001, "transformers", "choir", 8, 48) == pytest.approx(0.001 / 6)
    assert convert_balance_coefficient(0.001, "megatron", "choir", 8, 48) == 0.001
    assert convert_balance_coefficient(0.01, "megablocks", "choir", 8, 16) == pytest.approx(0.01 / 16)
    assert convert_balance_coefficient(0.01, "flaxformer", "megablocks", 2, 12) == pytest.approx(0.02)
    assert convert_z_coefficient(0.001, "flaxformer", "choir", 12) == pytest.approx(0.001 / 12)
    assert convert_z_coefficient(0.001, "megatron", "choir", 12) == 0.001


@pytest.mark.parametrize("source, target", list(product(Z, Z)))
def test_z_loss_values_and_coefficients_convert_exactly(source: str, target: str) -> None:
    """A07: layers summed or averaged, and Megatron's log averages what its gradient sums."""
    logits_LTE = torch.randn(L, T, E, requires_grad=True)
    z_L = torch.stack([router_z(logits_TE).mean() for logits_TE in logits_LTE])
    minimised = {"choir": z_L.sum(), "megatron": z_L.sum(), "flaxformer": z_L.mean(), "transformers": z_L.mean()}
    printed = {**minimised, "megatron": z_L.mean()}
    value = convert_z_value(printed[source].item(), source, target, L)
    assert value == pytest.approx(printed[target].item(), rel=1e-6)
    coefficient = convert_z_coefficient(0.01, source, target, L)
    gradients = [
        torch.autograd.grad(scale * minimised[name], logits_LTE, retain_graph=True)[0]
        for name, scale in ((source, 0.01), (target, coefficient))
    ]
    torch.testing.assert_close(*gradients)


def test_an_unknown_convention_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="'deepspeed' is unknown: choose among choir, transformers, megatron, megabl"):
        convert_balance_value(1, "choir", "deepspeed", 2, 3)
    with pytest.raises(ValueError, match="'deepspeed' is unknown"):
        printed_balance("deepspeed", torch.rand(1, 5, 3), torch.rand(1, 5, 3) > 0.5, 2)
    with pytest.raises(ValueError, match="one value a layer: name choir for their sum, flaxformer for their mean"):
        convert_z_value(1, "megablocks", "choir", 3)


@pytest.mark.parametrize("k, layers, name", [(0, 3, "experts_per_token"), (2, 0, "layers")])
def test_impossible_numbers_are_refused(k: int, layers: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0: must be at least 1"):
        convert_balance_coefficient(0.01, "choir", "flaxformer", k, layers)


@pytest.mark.parametrize("padded", [False, True])
def test_transformers_formula_is_transformers_function(padded: bool) -> None:
    """A01, A02: against the library itself, where it is installed: value and gradient."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits_LTE = torch.randn(L, 6, E).mul(2).requires_grad_()
    valid_BS = torch.tensor([[False, True, True], [True, True, False]]) if padded else None
    chosen_LTE = torch.stack([top_k_mask(logits_TE.detach(), K) for logits_TE in logits_LTE])
    ours = printed_balance(
        "transformers", logits_LTE.softmax(-1), chosen_LTE, K, None if valid_BS is None else valid_BS.flatten()
    )
    theirs = mixtral.load_balancing_loss_func(tuple(logits_LTE), E, K, None if valid_BS is None else valid_BS.long())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits_LTE)[0] for value in (ours, theirs)))
