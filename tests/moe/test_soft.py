"""Soft mixture against a plain float64 loop of the paper's equations, and its causal mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe.attention import KeyValueCache
from moe.config import MoEConfig
from moe.routing import RoutingContext
from moe.soft import SoftMoELayer
from tests.moe import oracle
from tests.moe.helpers import gradients, make_model, relative_error

B, S, D, E, P, F = 4, 6, 20, 3, 2, 16
VALID_BS = torch.arange(S) < torch.tensor([6, 2, 0, 0])[:, None]
GROUPS: dict[str, dict[str, Any]] = {
    "flat": {"group": "flat"},
    "position": {"group": "position"},
    "chunk": {"group": "chunk", "chunk_length": 3},
}


def soft(group: str = "flat", **moe: Any) -> SoftMoELayer:
    sizes = {"num_experts": E, "slots_per_expert": P, "expert_width": F, "group_sequences": 2, **GROUPS[group]}
    layer = SoftMoELayer(MoEConfig(router="soft", **{**sizes, **moe}), D, index=1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    nn.init.constant_(layer.slots.scale_1, 2.5)
    return layer


def plain_soft(
    x_TD: Tensor, slots: Tensor, scale: Tensor, token_GN: list[list[int]], valid: list[bool], w13: Tensor, w2: Tensor
) -> Tensor:
    """Equations 1 to 3 of section 2.1 with the cosines of 2.3, token by token and slot by slot."""
    slots_per_expert = slots.shape[0] // w2.shape[0]
    rows = [0.0 * x_D for x_D in x_TD]
    for members in token_GN:
        tokens = [t for t in members if valid[t]]
        if not tokens:
            continue
        cosine = [[scale[0] * (x_TD[t] @ s_D) / (x_TD[t].norm() * s_D.norm()) for s_D in slots] for t in tokens]
        affinity = torch.stack([torch.stack(row) for row in cosine])
        dispatch, combine = affinity.softmax(0), affinity.softmax(1)
        for m in range(slots.shape[0]):
            slot_D = sum(dispatch[n, m] * x_TD[t] for n, t in enumerate(tokens))
            expert = m // slots_per_expert
            out_D = oracle.swiglu(slot_D, w13[expert, 0], w13[expert, 1], w2[expert])
            for n, t in enumerate(tokens):
                rows[t] = rows[t] + combine[n, m] * out_D
    return torch.stack(rows)


def compare(layer: SoftMoELayer, token_GN: list[list[int]], mode: Any, valid_BS: Tensor | None = None) -> None:
    """Output, the gradient of x and that of every parameter; padding is NaN."""
    x_BSD, upstream_BSD = torch.randn(B, S, D), torch.randn(B, S, D)
    if valid_BS is not None:
        x_BSD[~valid_BS] = torch.nan
    x_BSD.requires_grad_()
    y_BSD = layer(x_BSD, RoutingContext(B, S, valid_BS, mode=mode))
    (y_BSD * upstream_BSD).sum().backward()
    names = ("slots.slot_MD", "slots.scale_1", "experts.w13_E2FD", "experts.w2_EDF")
    copies = {name: layer.get_parameter(name).detach().double().requires_grad_() for name in names}
    valid = [True] * (B * S) if valid_BS is None else valid_BS.flatten().tolist()
    x_TD = x_BSD.detach().double().nan_to_num().flatten(0, 1).requires_grad_()
    y_TD = plain_soft(x_TD, copies[names[0]], copies[names[1]], token_GN, valid, copies[names[2]], copies[names[3]])
    (y_TD * upstream_BSD.double().flatten(0, 1)).sum().backward()
    found = gradients(layer) | {"x": x_BSD.grad.flatten(0, 1), "y": y_BSD.detach().flatten(0, 1)}
    expected = {name: copy.grad for name, copy in copies.items()} | {"x": x_TD.grad, "y": y_TD.detach()}
    for name, value in expected.items():
        assert value.abs().max() > 1e-3, name
        assert relative_error(found[name], value) < 1e-5, name


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mode", ["train", "train_router"])
def test_training_is_the_loop_over_groups(group: str, mode: str, backend: str) -> None:
    """Dispatch: a softmax over the group's tokens; combine: one over all slots."""
    layer = soft(group, backend=backend)
    compare(layer, oracle.groups(group, B, S, 2, layer.config.chunk_length), mode)


@pytest.mark.parametrize("group", GROUPS)
def test_padding_contributes_nothing_and_gets_nothing(group: str) -> None:
    """A02: NaN at padding; output 0 there, and every gradient is that of the valid tokens; one group has none."""
    layer = soft(group)
    compare(layer, oracle.groups(group, B, S, 2, layer.config.chunk_length), "train", VALID_BS)
    x_BSD = torch.where(VALID_BS[..., None], torch.randn(B, S, D), torch.nan)
    y_BSD = layer(x_BSD, RoutingContext(B, S, VALID_BS, mode="train"))
    assert y_BSD[~VALID_BS].eq(0).all() and y_BSD[VALID_BS].ne(0).all()


@pytest.mark.parametrize("valid_BS", [None, VALID_BS], ids=["whole", "padded"])
def test_causal_mode_is_the_loop_over_groups_of_one(valid_BS: Tensor | None) -> None:
    compare(soft(), [[t] for t in range(B * S)], "causal", valid_BS)


def test_causal_mode_is_training_with_every_token_a_group_of_its_own() -> None:
    layer, x_BSD = soft(group_sequences=1), torch.randn(B * S, 1, D)
    alone_BSD = layer(x_BSD, RoutingContext(B * S, 1, mode="train"))
    torch.testing.assert_close(layer(x_BSD, RoutingContext(B * S, 1)), alone_BSD)
    torch.testing.assert_close(layer(x_BSD.view(B, S, D), RoutingContext(B, S)).flatten(0, 1), alone_BSD.flatten(0, 1))


@pytest.mark.parametrize("mode", ["train", "causal"])
def test_a_batch_of_padding_only_gives_zero_and_finite_gradients(mode: Any) -> None:
    """A02."""
    layer, x_BSD = soft(shared_width=8), torch.full((2, S, D), torch.nan)
    y_BSD = layer(x_BSD, RoutingContext(2, S, torch.zeros(2, S, dtype=torch.bool), mode=mode))
    y_BSD.sum().backward()
    assert y_BSD.eq(0).all()
    assert all(gradient.eq(0).all() for gradient in gradients(layer).values())


def test_training_sees_the_future_and_serving_does_not() -> None:
    """H02: a changed last token moves earlier outputs of its group in training only."""
    layer, x_BSD = soft(backend="reference"), torch.randn(B, S, D)
    other_BSD = x_BSD.clone()
    other_BSD[:, -1] += 1
    for mode, sees in (("train", True), ("causal", False)):
        first, second = (layer(x, RoutingContext(B, S, mode=mode))[:, :-1] for x in (x_BSD, other_BSD))
        assert first.ne(second).any().item() == sees


def test_one_slot_that_all_tokens_like_alike_is_their_mean() -> None:
    """By hand: scale 0 gives even weights; one expert, one slot: everybody gets the expert of the mean."""
    layer, x_BSD = soft(num_experts=1, experts_per_token=1, slots_per_expert=1), torch.randn(2, S, D)
    nn.init.zeros_(layer.slots.scale_1)
    y_BSD = layer(x_BSD, RoutingContext(2, S, mode="train"))
    w13_2FD, w2_DF = layer.experts.w13_E2FD[0], layer.experts.w2_EDF[0]
    expected_D = oracle.swiglu(x_BSD.mean((0, 1)), w13_2FD[0], w13_2FD[1], w2_DF)
    torch.testing.assert_close(y_BSD, expected_D.expand_as(y_BSD))


def test_a_shared_expert_is_added() -> None:
    layer, x_BSD = soft(shared_width=8), torch.randn(B, S, D)
    context = RoutingContext(B, S, mode="train")
    with_shared_BSD, shared = layer(x_BSD, context), layer.shared
    layer.shared = None
    torch.testing.assert_close(with_shared_BSD, layer(x_BSD, context) + shared(x_BSD))


def test_affinities_are_fp32_in_a_bf16_model() -> None:
    """Close to the fp32 layer on the same rounded numbers, also under autocast."""
    layer, x_BSD = soft().to(torch.bfloat16), torch.randn(B, S, D).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y_BSD = layer(x_BSD, RoutingContext(B, S, mode="train"))
    expected_BSD = layer.float()(x_BSD.float(), RoutingContext(B, S, mode="train"))
    assert y_BSD.dtype == torch.bfloat16
    assert relative_error(y_BSD.float(), expected_BSD) < 0.02


@pytest.mark.parametrize("group", GROUPS)
def test_recompute_gives_bit_equal_gradients(group: str) -> None:
    """A12."""
    layer, found = soft(group), []
    x_BSD = torch.randn(B, S, D)
    for recompute in (False, True):
        layer.zero_grad()
        x, context = x_BSD.clone().requires_grad_(), RoutingContext(B, S, VALID_BS, mode="train")
        y_BSD = checkpoint(layer, x, context, use_reentrant=False) if recompute else layer(x, context)
        (y_BSD * torch.linspace(0.5, 2, D)).sum().backward()
        found.append(gradients(layer) | {"x": x.grad, "y": y_BSD.detach()})
    assert all(value.equal(found[1][name]) for name, value in found[0].items())


def test_groups_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(Exception, match="divide"):
        soft(group_sequences=3)(torch.randn(B, S, D), RoutingContext(B, S, mode="train"))


def test_a_model_of_soft_layers_trains_and_generates() -> None:
    """H04: served token by token it is the full causal pass; its scale starts from 1."""
    model, token_BS = make_model(router="soft", group_sequences=2, slots_per_expert=3), torch.randint(37, (2, 7))
    assert model.blocks["0"].feed_forward.slots.scale_1.item() == 1
    model(token_BS, RoutingContext(2, 7, mode="train")).logsumexp(-1).sum().backward()
    assert all(gradient.isfinite().all() and gradient.ne(0).any() for gradient in gradients(model).values())
    cache = KeyValueCache(model.config, 2, 7, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        full_BSV = model(token_BS)
        steps = [model(token_B1, cache=cache) for token_B1 in token_BS.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), full_BSV, rtol=0, atol=1e-5)
