"""What every router does with padding, empty batches, one token, NaN, ties and scores that underflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.auxiliary import auxiliary_losses
from moe.config import ConfigError, MoEConfig
from moe.groups import check_routing
from moe.layer import MoELayer
from moe.routers import ROUTERS
from moe.routing import Routing, RoutingContext
from moe.soft import SoftMoELayer
from tests.moe.helpers import gradients, pairs, reset

B, S, D, E, K = 4, 6, 16, 4, 2
NAMES = [name for name in ROUTERS if name != "dense"]
SIZES: dict[str, dict[str, Any]] = {
    "mixture_of_depths": {"num_experts": 1, "experts_per_token": 1, "depth_capacity": 0.5},
    "base": {"experts_per_token": 1},
}
# Some padding everywhere: before, after, and a whole group (of two sequences) of it.
VALID_BS = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6, [0] * 6], dtype=torch.bool)
every_router = pytest.mark.parametrize("name", NAMES)
routed = pytest.mark.parametrize("name", [name for name in NAMES if name != "soft"])


def config(name: str, **more: Any) -> MoEConfig:
    """With every loss that the router can have."""
    losses = {key: 0.01 for key in ROUTERS[name].reads if key.endswith("_coefficient")}
    sizes = {"num_experts": E, "experts_per_token": K, "expert_width": 8, "group_sequences": 2}
    return MoEConfig(router=name, **{**sizes, **losses, **SIZES.get(name, {}), **more})


def build(name: str, **more: Any) -> MoELayer | SoftMoELayer:
    layer = (SoftMoELayer if name == "soft" else MoELayer)(config(name, **more), D, index=0)
    generator = torch.Generator().manual_seed(len(name))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    reset(layer)
    return layer


def run(layer: Any, x_BSD: Tensor, valid_BS: Tensor | None = None, mode: Any = "train") -> dict[str, Tensor]:
    """Forward and backward; everything that came out of it, routers' state included."""
    batch, length, _ = x_BSD.shape
    x_BSD = x_BSD.detach().requires_grad_()
    context = RoutingContext(batch, length, valid_BS, mode=mode, token_BS=ids(batch, length))
    layer.zero_grad(set_to_none=False)
    y_BSD = layer(x_BSD, context)
    (y_BSD * torch.linspace(0.5, 2, D)).sum().backward()
    found = {"y": y_BSD.detach(), "gradient of x": x_BSD.grad}
    found |= {f"gradient of {key}": p.grad for key, p in layer.named_parameters() if p.grad is not None}
    found |= {f"logged {key}": value for key, value in context.auxiliary.items()}
    return {key: value.clone() for key, value in [*found.items(), *layer.named_buffers()]}


def ids(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % 11


def check_finite(found: dict[str, Tensor]) -> None:
    assert [key for key, value in found.items() if not value.isfinite().all()] == []


def test_every_router_is_tried() -> None:
    """Each with the losses it can have: a new router joins by its entry in the registry."""
    assert len(NAMES) >= 13
    assert config("token_choice").mutual_information_coefficient == config("noisy_top_k").load_coefficient == 0.01


@every_router
@pytest.mark.parametrize("mode", ["train", "train_router", "causal"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -1e30])
def test_nothing_depends_on_what_padding_holds(name: str, mode: str, poison: float) -> None:
    """A02: outputs, every gradient, logged losses and all that is recorded, to the last bit; 0 at padding."""
    layer, x_BSD, found = build(name, shared_width=8), torch.randn(B, S, D), []
    for filling in (0.0, poison):
        reset(layer)
        found.append(run(layer, torch.where(VALID_BS[..., None], x_BSD, filling), VALID_BS, mode))
    check_finite(found[0])
    assert [key for key, value in found[0].items() if not value.equal(found[1][key])] == []
    assert found[1]["y"][~VALID_BS].eq(0).all() and found[1]["gradient of x"][~VALID_BS].eq(0).all()
    assert found[1]["y"][VALID_BS].ne(0).any() and found[1]["gradient of x"][VALID_BS].ne(0).any()


@routed
@pytest.mark.parametrize("mode", ["train", "train_router", "causal"])
def test_a_router_by_itself_does_not_look_at_padding(name: str, mode: Any) -> None:
    """A02: the layer's zeros aside, NaN in logits and scores enters no weight, loss, counter or valid gradient."""
    layer, found = build(name), []
    x_TD, valid_T = torch.randn(B * S, D), VALID_BS.flatten()
    for filling in (0.0, torch.nan):
        reset(layer)
        context = RoutingContext(B, S, VALID_BS, mode=mode, token_BS=ids(B, S))
        inputs_TD = torch.where(valid_T[:, None], x_TD, filling).requires_grad_()
        routing = layer.router(inputs_TD, context)
        auxiliary = auxiliary_losses(layer.router, routing, context) if mode == "train" else {}
        losses = {key: value for key, (_, value) in auxiliary.items()}
        weight_TE = routing.weight_TE()
        found.append({**losses, "weights": weight_TE, "assigned": routing.assigned_TE()})
        found[-1] |= {key: buffer.clone() for key, buffer in layer.router.named_buffers()}
        if name != "hash":
            loss = weight_TE.square().sum() + sum(losses.values())
            found[-1]["gradient"] = torch.autograd.grad(loss, inputs_TD)[0][valid_T]
        assert not routing.assigned_TE()[~valid_T].any() and weight_TE[~valid_T].eq(0).all()
        assert routing.capacity or all(valid_T[token] for token, _ in pairs(routing)), "no work is done for it"
    check_finite(found[0])
    assert [key for key, value in found[0].items() if not value.equal(found[1][key])] == []


# Cutoffs, and the slots of expert choice, are shares of all places of a group, and noise goes by a token's place.
BY_PLACE = {"expert_choice", "mixture_of_depths", "threshold", "noisy_top_k", "gshard"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_PLACE])
@pytest.mark.parametrize("mode", ["train", "causal"])
def test_more_padding_changes_nothing(name: str, mode: str) -> None:
    """A02: three more columns of it."""
    layer, x_BSD = build(name), torch.randn(B, S, D)
    wide_BSD, wide_BS = torch.cat((x_BSD, torch.randn(B, 3, D)), 1), torch.nn.functional.pad(VALID_BS, (0, 3))
    layer_ids = torch.nn.functional.pad(ids(B, S), (0, 3))
    found = []
    for inputs, valid_BS, token_BS in ((x_BSD, VALID_BS, ids(B, S)), (wide_BSD, wide_BS, layer_ids)):
        reset(layer)
        layer.zero_grad(set_to_none=False)
        context = RoutingContext(*valid_BS.shape, valid_BS, mode=mode, token_BS=token_BS)
        y_BSD = layer(inputs, context)
        y_BSD.sum().backward()
        found.append({"y": y_BSD.detach()[:, :S]} | gradients(layer) | context.auxiliary | dict(layer.named_buffers()))
        found[-1] = {key: value.clone() for key, value in found[-1].items()}
    for key, value in found[0].items():
        torch.testing.assert_close(
            found[1][key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@every_router
@pytest.mark.parametrize("mode", ["train", "causal"])
def test_a_batch_of_padding_only_gives_zero_and_moves_nothing(name: str, mode: str) -> None:
    """A02: output, losses, gradients and counters are 0; the state after the step is that before it."""
    layer = build(name)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    found = run(layer, torch.full((B, S, D), torch.nan), torch.zeros(B, S, dtype=torch.bool), mode)
    for key, value in found.items():
        assert key in before or value.eq(0).all(), key
    if name != "soft":
        type(layer.router).after_step_together([layer.router])
    assert [key for key, value in layer.state_dict().items() if not value.equal(before[key])] == []


@every_router
def test_one_token_is_served(name: str) -> None:
    """Also where training needs a group of more; its output is that within a larger batch."""
    layer, x_BSD = build(name, backend="reference"), torch.randn(B, S, D)
    alone, together = (
        layer(x, RoutingContext(*x.shape[:2], token_BS=ids(B, S)[: len(x), : x.shape[1]]))
        for x in (x_BSD[:1, :1], x_BSD)
    )
    torch.testing.assert_close(alone[0, 0], together[0, 0])
    check_finite(run(layer, x_BSD[:1, :1], mode="causal"))


@every_router
def test_one_token_is_trained_on_or_the_capacity_is_named(name: str) -> None:
    """A quarter or half of one token is no whole number; every other router trains on it."""
    layer = build(name, group_sequences=1)
    if name in ("expert_choice", "threshold", "mixture_of_depths"):
        with pytest.raises(ConfigError, match=r"\* 1 tokens / moe.num_experts = 0.5 is not a whole number >= 1"):
            run(layer, torch.randn(1, 1, D))
    else:
        check_finite(run(layer, torch.randn(1, 1, D)))


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    for name in NAMES:
        if "experts_per_token" in ROUTERS[name].requires:
            continue
        with pytest.raises(ConfigError, match="experts_per_token = 5: must be at most moe.num_experts = 4"):
            MoEConfig(router=name, num_experts=4, experts_per_token=5)


@pytest.mark.parametrize("name", [name for name in NAMES if "capacity_factor" in ROUTERS[name].reads])
@pytest.mark.parametrize("order", ["position", "choice", "score", "priority"])
def test_a_capacity_above_the_number_of_tokens_drops_nothing(name: str, order: str) -> None:
    x_BSD = torch.randn(B, S, D)
    dropless = run(build(name), x_BSD)
    roomy = run(build(name, capacity_factor=1e6, drop_order=order), x_BSD)
    assert [key for key, value in dropless.items() if not value.equal(roomy[key])] == []


def test_experts_that_take_every_token_are_a_dense_mixture() -> None:
    """k = E: C = N, the most that a configuration can ask for."""
    layer, seen = build("expert_choice", experts_per_token=E), []
    layer(torch.randn(B, S, D), RoutingContext(B, S, mode="train", observe=lambda _, routing: seen.append(routing)))
    assert seen[0].assigned_TE().all() and seen[0].capacity == B * S


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hash"])
def test_groups_that_do_not_divide_are_refused(name: str) -> None:
    """By the configuration, which names a divisor, and by a layer on its own, rather than mixing groups up."""
    moe = {"group_sequences": 3, "allow_leak": True, **({"depth_capacity": 0.5} if name == "mixture_of_depths" else {})}
    with pytest.raises(ConfigError, match=r"moe.group_sequences = 3 does not divide .* = 4: .* \[1, 2, 4\]"):
        check_routing(config(name, **moe), S, B)
    with pytest.raises(Exception, match="divide"):
        run(build(name, **moe), torch.randn(B, S, D))


# In training these compare tokens with each other, so a bad token may change where another goes.
COMPETING = {"expert_choice", "mixture_of_depths", "sinkhorn", "base"}


def route(layer: Any, x_TD: Tensor, mode: Any) -> Routing:
    return layer.router(x_TD, RoutingContext(B, S, mode=mode, token_BS=ids(B, S)))


@routed
@pytest.mark.parametrize("mode", ["train", "causal"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_token_leaves_the_others_alone(name: str, mode: str, bad: float) -> None:
    """NaN or infinite logits: the experts it gets exist; wherever tokens do not compete, no other token notices.

    A balanced assignment of NaN has no meaning, and is refused.
    """
    layer, x_TD = build(name), torch.randn(B * S, D)
    bad_TD = x_TD.clone()
    bad_TD[7] = bad
    good = route(layer, x_TD, mode)
    if (name, mode) == ("base", "train"):
        with pytest.raises(ValueError, match="the score of token 7 of routing group 0 .* needs finite scores"):
            route(layer, bad_TD, mode)
        return
    routing = route(layer, bad_TD, mode)
    found = pairs(routing)
    assert all(0 <= t < B * S and 0 <= e < routing.num_experts for t, e in found)
    assert found == sorted(found, key=lambda pair: (pair[1], pair[0])) or name in COMPETING
    if mode == "causal" or name not in COMPETING:
        others = [t for t in range(B * S) if t != 7]
        assert routing.assigned_TE()[others].equal(good.assigned_TE()[others])
        assert routing.weight_TE()[others].equal(good.weight_TE()[others])


@pytest.mark.parametrize("mode", ["train", "causal"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("soft", "base")])
def test_a_router_of_nothing_but_nan_still_names_experts_that_exist(name: str, mode: str) -> None:
    """So that a diverged run ends in the training step's error and not in an index out of bounds."""
    layer, x_BSD = build(name), torch.randn(B, S, D)
    if name != "hash":
        nn.init.constant_(layer.router.weight_ED, torch.nan)
    routing = route(layer, x_BSD.flatten(0, 1), mode)
    assert all(0 <= t < B * S and 0 <= e < routing.num_experts for t, e in pairs(routing))
    run(layer, x_BSD, mode=mode)


TIED = {
    "expert_choice": [(t, e) for e in range(E) for t in [*range(6), *range(12, 18)]],
    "mixture_of_depths": [(t, 0) for t in [*range(6), *range(12, 18)]],
    "threshold": [(t, e) for e in range(E) for t in range(B * S)],
    "remoe": [],
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hash", "soft", "base")])
def test_ties_go_to_the_lowest_index(name: str) -> None:
    """A12: a silent router and identical tokens, three times over, in the training router's way.

    Experts take the first C of each group's 12 tokens, tokens the first k experts. All reach a cutoff that equals
    their score; no logit is above 0.
    """
    layer = build(name)
    nn.init.zeros_(layer.router.weight_ED)
    for _ in range(3):
        routing = route(layer, torch.randn(D).expand(B * S, D), "train_router")
        assert pairs(routing) == TIED.get(name, [(t, e) for e in range(K) for t in range(B * S)])


def test_tied_tokens_are_assigned_alike_every_time() -> None:
    """A12: BASE promises no order of ties, but balanced loads (3 of 12 tokens a group each) and the same again."""
    layer = build("base")
    nn.init.zeros_(layer.router.weight_ED)
    found = [route(layer, torch.ones(B * S, D), "train") for _ in range(3)]
    assert all(pairs(routing) == pairs(found[0]) for routing in found)
    assert found[0].counts_E().tolist() == [6] * E


SCORED = [(name, False) for name in NAMES if name not in ("hash", "soft")]
SCORED += [(name, True) for name in NAMES if "renormalize" in ROUTERS[name].reads]


@pytest.mark.parametrize(("name", "renormalize"), SCORED)
@pytest.mark.parametrize("logit", [-200.0, -90.0, -60.0, 200.0])
@pytest.mark.parametrize("mode", ["train", "causal"])
def test_scores_that_underflow_or_saturate_give_finite_numbers(
    name: str, renormalize: bool, logit: float, mode: str
) -> None:
    """Sigmoids of 0, 1e-39 or 1e-26, by which losses and renormalisation divide, or of 1."""
    more = {"score": "sigmoid"} if "score" in ROUTERS[name].reads else {}
    layer = build(name, **more, **({"renormalize": True} if renormalize else {}))
    with torch.no_grad():
        layer.router.weight_ED.zero_()
        layer.router.weight_ED[:, 0] = logit
    x_BSD = torch.randn(B, S, D)
    x_BSD[..., 0] = 1
    check_finite(run(layer, x_BSD, mode=mode))


@routed
def test_logits_far_apart_give_finite_numbers(name: str) -> None:
    """A softmax of exactly 1 and 0; and all at once in one batch: far apart either way, and tied."""
    layer, x_BSD = build(name), torch.randn(B, S, D)
    if name != "hash":
        with torch.no_grad():
            layer.router.weight_ED.zero_()
            layer.router.weight_ED[0, 0] = 1
    x_BSD[..., 0] = torch.tensor([300.0, 0.0, -300.0]).repeat(B * S // 3).view(B, S)
    for mode in ("train", "causal"):
        check_finite(run(layer, x_BSD, mode=mode))
