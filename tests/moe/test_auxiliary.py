"""Every auxiliary loss: its scope, its strength, and that neither micro-batches nor processes change a gradient."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.layer import MoELayer
from moe.routing import RoutingContext
from tests.moe import oracle
from tests.moe.helpers import make_layer, relative_error

B, S, D, E, K = 8, 5, 16, 4, 2
GROUP = 2
# Unequal numbers of valid tokens in sequences, groups, micro-batches and halves; the third group has none.
VALID_BS = torch.arange(S) < torch.tensor([5, 1, 3, 5, 0, 0, 2, 5])[:, None]
# What asks for each loss, and under which name it is logged. The first key is its coefficient.
LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "balance of sequences": ({"balance_coefficient": 0.01, "balance_scope": "sequence"}, "balance"),
    "balance of groups": ({"balance_coefficient": 0.01}, "balance"),
    "balance of global batches": ({"balance_coefficient": 0.01, "balance_scope": "global"}, "balance"),
    "balance of thresholds": ({"balance_coefficient": 0.01, "router": "threshold"}, "balance"),
    "balance of biased sigmoids": ({"balance_coefficient": 0.01, "router": "loss_free"}, "balance"),
    "importance": ({"importance_coefficient": 0.01}, "importance"),
    "mutual information": ({"mutual_information_coefficient": 0.01}, "negative_mutual_information"),
    "z": ({"z_coefficient": 0.01}, "z"),
    "orthogonality": ({"orthogonality_coefficient": 0.01}, "orthogonality"),
    "load": ({"load_coefficient": 0.01, "router": "noisy_top_k"}, "load"),
    "l1": ({"l1_initial": 0.01, "router": "remoe"}, "l1"),
    "predictor": ({"predictor_coefficient": 0.01, "router": "expert_choice"}, "predictor"),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def build(name: str, factor: float = 1, **more: Any) -> MoELayer:
    moe, _ = LOSSES[name]
    coefficient = next(iter(moe))
    sizes = {"router": "token_choice", "num_experts": E, "experts_per_token": K, "expert_width": 8}
    layer = make_layer(D, **{**sizes, "group_sequences": GROUP, **moe, coefficient: moe[coefficient] * factor, **more})
    if layer.router.keeps_load:
        layer.router.load_E.copy_(torch.tensor([0.4, 0.3, 0.1, 0.2]))
    return layer


def in_pieces(layer: MoELayer, x_BSD: Tensor, cuts: list[int], first: int = 0, **context: Any) -> dict[str, Tensor]:
    """Backward of the auxiliary losses alone, piece by piece of one step; returns what was logged."""
    log: dict[str, Tensor] = {}
    valid_BS, step = VALID_BS[first : first + len(x_BSD)], {"step_tokens": 21, "step_groups": B // GROUP, **context}
    for x, valid in zip(x_BSD.split(cuts), valid_BS.split(cuts), strict=True):
        told = RoutingContext(len(x), S, valid, mode="train", first_token=first * S, auxiliary=log, **step)
        (layer(x, told) * 0).sum().backward()
        first += len(x)
    return log


def router_gradients(layer: MoELayer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.router.named_parameters() if p.grad is not None}


@each_loss
@pytest.mark.parametrize("cuts", [[2, 2, 2, 2], [2, 4, 2], [6, 2]], ids=str)
def test_the_cut_into_micro_batches_changes_neither_gradient_nor_log(name: str, cuts: list[int]) -> None:
    """A04: one pass over the step against several; the parts add up."""
    layer, x_BSD, found = build(name), torch.randn(B, S, D), []
    for sizes in ([B], cuts):
        layer.zero_grad()
        found.append((in_pieces(layer, x_BSD, sizes), router_gradients(layer)))
    (whole_log, whole), (parts_log, parts) = found
    assert set(whole_log) == {LOSSES[name][1]}
    torch.testing.assert_close(parts_log, whole_log, rtol=1e-5, atol=1e-7)
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-5
    for key, gradient in whole.items():
        assert relative_error(parts[key], gradient) < 1e-5 or gradient.eq(0).all(), key


@each_loss
@pytest.mark.parametrize("first_half", [2, 4])
def test_two_processes_that_share_a_step_add_up_to_one(name: str, first_half: int) -> None:
    """A04, A05: each has a copy of the layer and a part of the step, with other numbers of valid tokens."""
    layer, x_BSD = build(name), torch.randn(B, S, D)
    other = copy.deepcopy(layer)
    in_pieces(layer, x_BSD, [B])
    whole = router_gradients(layer)
    layer.zero_grad()
    in_pieces(layer, x_BSD[:first_half], [first_half])
    in_pieces(other, x_BSD[first_half:], [B - first_half], first=first_half)
    summed = {key: gradient + router_gradients(other)[key] for key, gradient in router_gradients(layer).items()}
    for key, gradient in whole.items():
        assert relative_error(summed[key], gradient) < 1e-5 or gradient.eq(0).all(), key


@each_loss
def test_the_coefficient_is_the_strength(name: str) -> None:
    """A06: 0 asks for nothing, twice the coefficient is twice the gradient, and the log has the loss without it."""
    layer, x_BSD, found = build(name), torch.randn(B, S, D), {}
    for factor in (1, 2) if name == "l1" else (0, 1, 2):
        without = {"predictor": {"predictor_coefficient": 0.0}}.get(name, {"balance_scope": "group"})
        other = build(name, factor, **({} if factor else without))
        other.load_state_dict(layer.state_dict(), strict=factor > 0)
        if name == "l1":
            other.router.l1_weight.fill_(0.01 * factor)
        found[factor] = (in_pieces(other, x_BSD, [B]), router_gradients(other))
    if name != "l1":
        assert not found[0][0] and all(gradient.eq(0).all() for gradient in found[0][1].values())
    assert found[1][0] == found[2][0]
    for key, gradient in found[1][1].items():
        torch.testing.assert_close(found[2][1][key], 2 * gradient, rtol=1e-5, atol=1e-9)


@each_loss
def test_only_the_router_learns_from_it(name: str) -> None:
    """Neither the experts nor, by way of the router's input, a loss that is not meant for it; all gradients finite."""
    layer, x_BSD = build(name), torch.randn(B, S, D, requires_grad=True)
    in_pieces(layer, x_BSD, [B])
    assert layer.experts.w2_EDF.grad.eq(0).all() and layer.experts.w13_E2FD.grad.eq(0).all()
    assert x_BSD.grad.isfinite().all() and x_BSD.grad[~VALID_BS].eq(0).all()
    assert x_BSD.grad.ne(0).any().item() == (name not in ("orthogonality", "predictor"))


@each_loss
def test_it_is_logged_once_under_recompute(name: str) -> None:
    """A11: to the last bit. (Recompute stops after the last thing it needs; a second loss makes that come later.)"""
    layer, x_BSD, found = build(name, orthogonality_coefficient=0.01), torch.randn(B, S, D), []
    for recompute in (False, True):
        layer.zero_grad()
        context = RoutingContext(B, S, VALID_BS, mode="train")
        out = checkpoint(layer, x_BSD, context, use_reentrant=False) if recompute else layer(x_BSD, context)
        (out * 0).sum().backward()
        found.append(context.auxiliary | router_gradients(layer))
    assert found[0].keys() == found[1].keys()
    assert all(value.equal(found[1][key]) for key, value in found[0].items())


@each_loss
@pytest.mark.parametrize("mode", ["causal", "train_router"])
def test_evaluation_attaches_nothing(name: str, mode: Any) -> None:
    """A06: neither log nor gradient, whatever was configured."""
    layer, context = build(name), RoutingContext(B, S, VALID_BS, mode=mode)
    (layer(torch.randn(B, S, D), context) * 0).sum().backward()
    assert not context.auxiliary and layer.router.weight_ED.grad.eq(0).all()


def test_losses_add_up() -> None:
    """All at once is the sum of each alone."""
    together = [name for name, (moe, _) in LOSSES.items() if "router" not in moe and moe.get("balance_scope") is None]
    layer = build("z", **{key: value for name in together for key, value in LOSSES[name][0].items()})
    x_BSD, total_ED = torch.randn(B, S, D), 0
    log = in_pieces(layer, x_BSD, [B])
    assert set(log) == {LOSSES[name][1] for name in together} and len(log) == 5
    for name in together:
        alone = build(name)
        alone.load_state_dict(layer.state_dict())
        torch.testing.assert_close(in_pieces(alone, x_BSD, [B])[LOSSES[name][1]], log[LOSSES[name][1]])
        total_ED = total_ED + alone.router.weight_ED.grad
    torch.testing.assert_close(layer.router.weight_ED.grad, total_ED, rtol=1e-5, atol=1e-8)


def plain_balance(layer: MoELayer, x_BSD: Tensor, token_GN: list[list[int]], load: list[float] | None) -> Tensor:
    """Gradient of 0.01 * mean over groups of E sum_e f_e P_e; f of the group, or a given one for every token."""
    weight_ED = layer.router.weight_ED.detach().double().requires_grad_()
    scores_TE, valid = (x_BSD.double().flatten(0, 1) @ weight_ED.T).softmax(-1), VALID_BS.flatten().tolist()
    chosen, loss = oracle.choose_by_token(scores_TE, K, valid), torch.zeros((), dtype=torch.float64)
    for members in token_GN:
        tokens = [t for t in members if valid[t]]
        for e in range(E):
            f = sum(pair in chosen for pair in [(t, e) for t in tokens]) / max(1, len(tokens) * K)
            share = sum(scores_TE[t, e] for t in tokens) / max(1, len(tokens))
            loss = loss + E * (f if load is None else load[e]) * share / len(token_GN)
    (0.01 * loss).backward()
    return weight_ED.grad


@pytest.mark.parametrize(("scope", "sequences"), [("sequence", 1), ("group", 2)])
def test_the_scope_is_whose_load_counts(scope: str, sequences: int) -> None:
    """Each sequence's or each group's f and P; the mean over sequences or groups, empty ones included."""
    layer, x_BSD = build("balance of groups", balance_scope=scope), torch.randn(B, S, D)
    in_pieces(layer, x_BSD, [B])
    expected_ED = plain_balance(layer, x_BSD, oracle.groups("flat", B, S, sequences), None)
    assert relative_error(layer.router.weight_ED.grad, expected_ED) < 1e-5


def test_a_group_of_one_sequence_is_a_sequence() -> None:
    x_BSD, found = torch.randn(B, S, D), []
    for scope in ("sequence", "group"):
        torch.manual_seed(0)
        layer = build("balance of groups", balance_scope=scope, group_sequences=1)
        found.append(in_pieces(layer, x_BSD, [B], step_groups=B) | router_gradients(layer))
    assert all(value.equal(found[1][key]) for key, value in found[0].items())


def test_the_global_scope_looks_at_the_last_global_batchs_load() -> None:
    """Uniform at first: loss 1, no gradient. Then the counts of all micro-batches of the step before, however cut."""
    layer = build("balance of global batches")
    layer.router.reset_buffers()
    first_BSD, second_BSD = torch.randn(B, S, D), torch.randn(B, S, D)
    log = in_pieces(layer, first_BSD, [2, 4, 2])
    assert log["balance"].item() == pytest.approx(1, abs=1e-6)
    assert layer.router.weight_ED.grad.abs().max() < 1e-8
    with torch.no_grad():
        scores_TE = (first_BSD.flatten(0, 1) @ layer.router.weight_ED.T).softmax(-1)
    chosen = oracle.choose_by_token(scores_TE, K, VALID_BS.flatten().tolist())
    load = [sum(expert == e for _, expert in chosen) / len(chosen) for e in range(E)]
    assert layer.router.load_E.tolist() == [1 / E] * E, "not before the step is taken"
    layer.router.after_step()
    assert layer.router.load_E.tolist() == pytest.approx(load)
    layer.zero_grad()
    in_pieces(layer, second_BSD, [B])
    # The mean is over valid tokens, all of one group.
    expected_ED = plain_balance(layer, second_BSD, [list(range(B * S))], load)
    assert relative_error(layer.router.weight_ED.grad, expected_ED) < 1e-5
    layer.router.after_step()
    layer.router.after_step()
    assert sum(layer.router.load_E.tolist()) == pytest.approx(1), "a step that saw nothing keeps the load"


SCOPES = ("group", "global")


def half_of_a_step(rank: int, folder: str) -> None:
    """One of two processes: two steps of its own sequences; rank 0 writes the summed gradients of both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found, own = {}, slice(0, 2) if rank == 0 else slice(2, B)
    for scope in SCOPES:
        torch.manual_seed(0)
        layer = build("z", balance_coefficient=0.01, balance_scope=scope)
        for step, x_BSD in enumerate(torch.randn(2, B, S, D)):
            layer.zero_grad()
            in_pieces(layer, x_BSD[own], [2] * ((own.stop - own.start) // 2), first=own.start)
            for name, parameter in layer.named_parameters():
                dist.all_reduce(parameter.grad)
                found[f"{scope} {step} {name}"] = parameter.grad.clone()
            for name, buffer in layer.router.named_buffers():
                if name.startswith("step_"):
                    dist.all_reduce(buffer)
            layer.router.after_step()
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.destroy_process_group()


def test_two_real_processes_have_the_gradient_of_one(tmp_path: Path) -> None:
    """A04, A05: gloo, 6 and 15 valid tokens, gradients and step buffers summed; two steps, so that loads matter."""
    processes = torch.multiprocessing.spawn(half_of_a_step, (str(tmp_path),), nprocs=2, join=False)
    end = time.monotonic() + 60
    try:
        while not processes.join(timeout=max(0, end - time.monotonic())):  # True once both have ended
            assert time.monotonic() < end, "the two processes did not end within a minute"
    finally:
        for process in processes.processes:
            process.kill()
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for scope in SCOPES:
        torch.manual_seed(0)
        layer = build("z", balance_coefficient=0.01, balance_scope=scope)
        for step, x_BSD in enumerate(torch.randn(2, B, S, D)):
            layer.zero_grad()
            in_pieces(layer, x_BSD, [B])
            assert layer.router.weight_ED.grad.abs().max() > 1e-5
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(found[f"{scope} {step} {name}"], parameter.grad, rtol=1e-5, atol=1e-8)
            layer.router.after_step()


def test_importance_sees_what_a_capacity_drops() -> None:
    """Dropping hides the imbalance that the loss is there to mend."""
    values = []
    for capacity in ({}, {"capacity_factor": 0.25}):
        torch.manual_seed(1)
        moe = {"router": "token_choice", "num_experts": 5, "group_sequences": 2, "importance_coefficient": 0.1}
        layer, context = make_layer(D, **moe, **capacity), RoutingContext(4, 6, mode="train")
        layer(torch.randn(4, 6, D) + 1, context)
        values.append(context.auxiliary["importance"].item())
    assert values[0] == values[1] > 0.01


def test_gshards_balance_loss_counts_first_choices() -> None:
    """Algorithm 1: f is the share of first choices, so a silent router has the loss 1 whatever second experts do."""
    layer = make_layer(D, router="gshard", num_experts=4, group_sequences=1, balance_coefficient=0.1)
    x_BSD, context = torch.randn(1, 8, D), RoutingContext(1, 8, mode="train")
    layer(x_BSD, context)
    scores_TE = layer.router(x_BSD[0], RoutingContext(1, 8)).scores()
    first_E = torch.nn.functional.one_hot(scores_TE.argmax(1), 4).double().mean(0)
    expected = 4 * (first_E * scores_TE.double().mean(0)).sum()
    assert context.auxiliary["balance"].item() == pytest.approx(expected.item(), rel=1e-5)
