"""The transformer: what it is made of, how it is initialised, how many parameters a token uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe.config import ModelConfig, MoEConfig
from moe.initialization import build_model, initialize, parameter_counts
from moe.layer import MoELayer
from moe.model import Transformer
from moe.routing import RoutingContext
from tests.moe.helpers import make_model, model_config

RESIDUAL = ("output.weight", "down.weight", "w2_EDF")


def state(model: Transformer) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_the_same_seed_gives_the_same_model_whatever_was_drawn_before() -> None:
    """Values come from the parameter's name, not from the global generator, and the global generator is not used."""
    torch.manual_seed(1)
    first = state(make_model(seed=7, router="expert_choice"))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = state(make_model(seed=7, router="expert_choice"))
    assert torch.get_rng_state().equal(before)
    other = state(make_model(seed=8, router="expert_choice"))
    for name, value in first.items():
        assert value.equal(second[name])
        assert value.dim() == 1 or not value.isclose(other[name]).any(dim=-1).all()


def test_no_two_matrices_are_alike() -> None:
    """Layers, experts, gate and up: each has values of its own, though shapes repeat."""
    model = make_model(router="token_choice", shared_width=8)
    beginnings = []
    for value in state(model).values():
        if value.dim() > 1:
            matrices = value.flatten(0, -3) if value.dim() > 2 else value[None]
            beginnings += [tuple(matrix.flatten()[:4].div(matrix.flatten()[0]).tolist()) for matrix in matrices]
    # embedding and head; in each layer attention, router, experts (gate, up, down), shared expert
    assert len(beginnings) == 2 + 3 * (4 + 1 + 6 * 3 + 3)
    assert len(set(beginnings)) == len(beginnings)


def test_no_parameter_is_left_over_from_uninitialised_memory() -> None:
    """Poisoned before `initialize`: nothing of the poison is left in parameters or buffers."""
    for router in ("expert_choice", "token_choice", "dense"):
        model = make_model(model=model_config(qk_norm="width", dense_layers=1), router=router, shared_width=8)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else -77)
        initialize(model, seed=7)
        for tensor in [*model.parameters(), *model.buffers()]:
            assert tensor.isfinite().all() and not tensor.eq(-77).any()


def test_the_order_of_construction_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled backwards, every parameter has the same value."""
    forward = state(make_model(seed=7, router="token_choice", shared_width=8))
    names = nn.Module.named_parameters
    monkeypatch.setattr(Transformer, "named_parameters", lambda self: iter(reversed(list(names(self)))))
    backward = make_model(seed=7, router="token_choice", shared_width=8)
    monkeypatch.undo()
    for name, value in forward.items():
        assert value.equal(state(backward)[name]), name


def test_a_deeper_model_begins_with_the_same_layers() -> None:
    """3 and 7 layers: the shared layers are bit-equal, except that those on the residual path shrink by sqrt(2 L)."""
    shallow, deep = (
        state(make_model(router="token_choice")),
        state(make_model(model=model_config(layers=7), router="token_choice")),
    )
    assert set(shallow) < set(deep)
    for name, value in shallow.items():
        if name.endswith(RESIDUAL):
            torch.testing.assert_close(value, deep[name] * (7 / 3) ** 0.5)
        else:
            assert value.equal(deep[name]), name


def test_more_experts_and_more_tokens_extend_the_model_instead_of_changing_it() -> None:
    """Expert e is the same among 5 as among 9; full blocks of 128 embedding rows are the same in a larger table."""
    few = state(make_model(model=model_config(vocabulary_size=256), router="token_choice", num_experts=5))
    many = state(make_model(model=model_config(vocabulary_size=300), router="token_choice", num_experts=9))
    for leaf in ("w13_E2FD", "w2_EDF"):
        name = f"blocks.1.feed_forward.experts.{leaf}"
        assert few[name].equal(many[name][:5])
        assert not many[name][5].isclose(many[name][4]).any(dim=-1).all()
    assert few["embedding.weight"].equal(many["embedding.weight"][:256])


@pytest.mark.parametrize("tie", [False, True])
def test_the_spread_of_every_matrix_is_as_documented(tie: bool) -> None:
    """Variance 1 / fan_in, divided by 2 L on the residual path; the embedding 1, or 1 / D when tied; norms are 1."""
    shape = model_config(width=64, heads=4, vocabulary_size=600, tie_embeddings=tie)
    for name, value in state(make_model(model=shape, router="token_choice", expert_width=80)).items():
        if value.dim() == 1:
            assert value.eq(1).all()
            continue
        expected = value.shape[-1] ** -0.5 * ((2 * 3) ** -0.5 if name.endswith(RESIDUAL) else 1)
        if name == "embedding.weight" and not tie:
            expected = 1.0
        assert value.std().item() == pytest.approx(expected, rel=6 * (2 * value.numel()) ** -0.5), name
        assert abs(value.mean().item()) < 5 * expected * value.numel() ** -0.5, name


def test_a_model_built_twice_computes_the_same() -> None:
    """And causal routing without padding is what a call without a context means."""
    token_BS = torch.randint(37, (2, 9))
    first, second = make_model(router="expert_choice"), make_model(router="expert_choice")
    assert first(token_BS).equal(second(token_BS, RoutingContext(2, 9, mode="causal")))


def test_the_hand_counted_anchor() -> None:
    """G04: hidden 4, SwiGLU width 8, E = 8, k = 2: 192 of 768 expert parameters are active; the router has 32."""
    shape: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "expert_width": 8}
    model = ModelConfig(vocabulary_size=11, width=4, layers=1, heads=2, tie_embeddings=True)
    plain = build_model(model, MoEConfig(router="token_choice", **shape))
    attention, norms, embedding = 4 * 4 * 4, 3 * 4, 11 * 4
    rest = attention + norms + embedding + 32
    assert parameter_counts(plain) == (rest + 768, rest + 192)
    (layer,) = plain.moe_layers()
    assert layer.router.weight_ED.numel() == 32
    assert sum(p.numel() for p in layer.experts.parameters()) == 768
    shared = build_model(model, MoEConfig(router="token_choice", shared_width=16, **shape))
    assert parameter_counts(shared) == (rest + 768 + 3 * 4 * 16, rest + 192 + 3 * 4 * 16)


def test_an_untied_head_is_counted_and_a_tied_one_is_not_counted_twice() -> None:
    """The difference is V * D."""
    counts = [
        parameter_counts(make_model(model=model_config(tie_embeddings=tie), router="dense"))[0] for tie in (True, False)
    ]
    assert counts[1] - counts[0] == 37 * 24


def test_grouped_heads_of_any_size_are_counted() -> None:
    """H head_dim queries and 2 H_kv head_dim keys and values; head_dim need not divide the width."""
    counts = [
        parameter_counts(make_model(model=model_config(heads=5, kv_heads=kv, head_dim=10), router="dense"))[0]
        for kv in (1, 5)
    ]
    assert counts[1] - counts[0] == 3 * (2 * 4 * 10) * 24


@pytest.mark.parametrize("shared_width", [0, 8])
@pytest.mark.parametrize("router", ["expert_choice", "threshold", "token_choice"])
def test_the_dense_twin_is_as_wide_as_what_one_token_passes(router: str, shared_width: int) -> None:
    """Its parameters are the mixture's active ones without the routers."""
    shape: dict[str, Any] = {"shared_width": shared_width, "experts_per_token": 3}
    mixture, twin = make_model(router=router, **shape), make_model(router="dense", **shape)
    assert not twin.moe_layers() and len(mixture.moe_layers()) == 3
    total, active = parameter_counts(twin)
    assert total == active == parameter_counts(mixture)[1] - 3 * 6 * 24
    assert twin.blocks["0"].feed_forward.down.weight.shape == (24, 3 * 16 + shared_width)


def test_where_the_experts_are() -> None:
    """The first layers dense, then every n-th with experts; the others have the given width; the twin keeps it."""
    shape: dict[str, Any] = {"layers": 7, "dense_layers": 2, "moe_every": 3, "feed_forward_width": 40}
    model, twin = (make_model(model=model_config(**shape), router=r) for r in ("token_choice", "dense"))
    kinds = [isinstance(block.feed_forward, MoELayer) for block in model.blocks.values()]
    assert kinds == [False, False, True, False, False, True, False]
    assert [layer.index for layer in model.moe_layers()] == [2, 5]
    assert model.blocks["3"].feed_forward.down.weight.shape[1] == 40
    widths = [block.feed_forward.down.weight.shape[1] for block in twin.blocks.values()]
    assert widths == [40, 40, 32, 40, 40, 32, 40]


@pytest.mark.parametrize("router", ["token_choice", "expert_choice", "threshold", "dense"])
def test_bf16_computes_in_bf16_and_keeps_fp32_masters(router: str) -> None:
    """Logits are bf16 and near the fp32 ones; parameters and gradients stay fp32 and are all there."""
    sizes: dict[str, Any] = {"router": router, "group": "flat", "group_sequences": 2}
    token_BS, context = torch.randint(37, (4, 9)), RoutingContext(4, 9, mode="train")
    half, full = make_model(dtype=torch.bfloat16, **sizes), make_model(**sizes)
    logits = half(token_BS, context)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - full(token_BS, context)).square().mean().sqrt() < 0.1
    logits.float().square().mean().backward()
    for name, parameter in half.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("tie", [False, True])
def test_a_model_learns_one_batch(tie: bool) -> None:
    """Twenty steps of Adam on one batch lower the loss by more than half a nat."""
    model = make_model(model=model_config(tie_embeddings=tie), router="expert_choice", group="flat", group_sequences=2)
    token_BS = torch.randint(37, (4, 9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        logits_BSV = model(token_BS, RoutingContext(4, 9, mode="train"))[:, :-1]
        loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), token_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(layer.router.updates == 20 for layer in model.moe_layers())


def test_state_that_nobody_initialises_is_an_error_and_not_memory_garbage() -> None:
    """A new router with a buffer or a bias must say what they start from."""
    from moe.initialization import initialize

    model = make_model(router="token_choice")
    router = model.moe_layers()[0].router
    router.register_buffer("bias_E", torch.empty(6))
    with pytest.raises(AssertionError, match="does not say in reset_... what bias_E starts from"):
        initialize(model, 0)
    router.bias_E = None
    router.offset = torch.nn.Parameter(torch.empty(6))
    with pytest.raises(AssertionError, match="does not say in reset_... what offset starts from"):
        initialize(model, 0)


def test_wrapped_blocks_are_still_found() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make_model(router="expert_choice")
    for name, block in model.blocks.items():
        model.blocks[name] = checkpoint_wrapper(block)
    assert len(model.moe_layers()) == 3
