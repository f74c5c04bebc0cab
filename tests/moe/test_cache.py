"""Generation with the key/value cache is the full forward pass: in any steps, for any padding, to the last slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.attention import KeyValueCache
from moe.model import Transformer, positions
from moe.routing import RoutingContext
from tests.moe.helpers import calibrate, make_model, model_config

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "token choice, shared expert": {"router": "token_choice", "shared_width": 8},
    "expert choice": {"router": "expert_choice", "group": "flat", "group_sequences": 2},
    "threshold": {"router": "threshold", "group_sequences": 3},
    "dense": {"router": "dense"},
}


def build(name: str) -> Transformer:
    return calibrate(make_model(model=model_config(qk_norm="head"), **MODELS[name]))


def new_cache(model: Transformer, batch: int, capacity: int, dtype: torch.dtype = torch.float32) -> KeyValueCache:
    """A cache whose unused memory is poisoned."""
    cache = KeyValueCache(model.config, batch, capacity, dtype, CPU)
    cache.states.fill_(torch.nan)
    return cache


@torch.no_grad()
def in_steps(model: Transformer, token_BS: Tensor, steps: list[int], valid_BS: Tensor | None = None) -> Tensor:
    """Logits, with the tokens fed in pieces into a cache of exactly the right size."""
    batch, length = token_BS.shape
    cache, out = new_cache(model, batch, length), []
    valid_pieces = [None] * len(steps) if valid_BS is None else valid_BS.split(steps, 1)
    for tokens, valid in zip(token_BS.split(steps, 1), valid_pieces, strict=True):
        out.append(model(tokens, RoutingContext(batch, tokens.shape[1], valid), cache=cache))
    assert cache.length == length
    return torch.cat(out, 1)


def pieces(length: int, size: int) -> list[int]:
    """`length` in pieces of `size`, the last one shorter."""
    return [min(size, length - start) for start in range(0, length, size)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 4, 31, 33])
def test_prefill_in_pieces_of_any_size_is_the_full_pass(name: str, size: int) -> None:
    """H04: 33 tokens token by token, in fours, in 31 + 2 and at once; the cache is filled to its last slot."""
    model = build(name)
    token_BS = torch.randint(37, (2, 33))
    with torch.no_grad():
        full = model(token_BS)
    torch.testing.assert_close(in_steps(model, token_BS, pieces(33, size)), full, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 4, 9])
def test_left_padded_prompts_in_one_batch_are_as_if_alone(name: str, size: int) -> None:
    """H05: prompts of 2, 5 and 9 tokens, fed in pieces that cut through the padding, against one at a time."""
    model = build(name)
    lengths = [2, 5, 9]
    token_BS, valid_BS = torch.randint(37, (3, 9)), torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]
    logits_BSV = in_steps(model, token_BS, pieces(9, size), valid_BS)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(token_BS[row : row + 1, 9 - length :])
        torch.testing.assert_close(logits_BSV[row, 9 - length :], alone[0], rtol=0, atol=1e-4)


@torch.no_grad()
def generate(model: Transformer, token_BS: Tensor, valid_BS: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens with a cache, and the logits they were taken from."""
    batch, length = token_BS.shape
    cache = new_cache(model, batch, length + steps)
    context = RoutingContext(batch, length, valid_BS)
    new, logits = [], []
    for _ in range(steps):
        last_BV = model(token_BS, context, cache=cache)[:, -1]
        token_BS, context = last_BV.argmax(-1, keepdim=True), RoutingContext(batch, 1)
        new.append(token_BS), logits.append(last_BV)
    return torch.cat(new, 1), torch.stack(logits, 1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_with_the_cache_is_greedy_generation_without(name: str) -> None:
    """H04, H05: prompts of 1, 7 and 31 tokens in one left-padded batch, 20 tokens: same tokens, logits within 1e-4."""
    model, lengths = build(name), [1, 7, 31]
    token_BS, valid_BS = torch.randint(37, (3, 31)), torch.arange(31) >= 31 - torch.tensor(lengths)[:, None]
    new_BS, logits_BSV = generate(model, token_BS, valid_BS, 20)
    for row, length in enumerate(lengths):
        sequence = torch.cat((token_BS[row, 31 - length :], new_BS[row]))
        with torch.no_grad():
            full_SV = model(sequence[None, :-1])[0, length - 1 :]
        torch.testing.assert_close(logits_BSV[row], full_SV, rtol=0, atol=1e-4)
        assert new_BS[row].tolist() == full_SV.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["token choice, shared expert", "expert choice"])
def test_the_experts_chosen_while_decoding_are_those_of_the_full_pass(name: str) -> None:
    """H04: every layer's routes, token by token."""
    model, token_BS = build(name), torch.randint(37, (2, 9))
    full: dict[int, Tensor] = {}
    stepwise: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    with torch.no_grad():
        model(token_BS, RoutingContext(2, 9, observe=lambda i, r: full.update({i: r.assigned_TE().view(2, 9, -1)})))
        cache = new_cache(model, 2, 9)
        for tokens in token_BS.split(1, 1):
            model(tokens, RoutingContext(2, 1, observe=lambda i, r: stepwise[i].append(r.assigned_TE())), cache=cache)
    for layer, routes in full.items():
        assert torch.stack(stepwise[layer], 1).equal(routes)
        assert routes.any() and not routes.all()


def test_bf16_decoding_agrees_with_the_full_pass_wherever_the_choice_is_clear() -> None:
    """H04: rounding only: the same best token unless the two best are within 1e-2 of the logits' size."""
    model = make_model(dtype=torch.bfloat16, router="token_choice")
    token_BS = torch.randint(37, (2, 17))
    with torch.no_grad():
        full = model(token_BS).float()
        cache = new_cache(model, 2, 17, torch.bfloat16)
        steps = torch.cat([model(t, RoutingContext(2, 1), cache=cache) for t in token_BS.split(1, 1)], 1).float()
    best = full.topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > 5e-2
    assert clear.float().mean() > 0.5
    assert full.argmax(-1)[clear].equal(steps.argmax(-1)[clear])


def test_cached_positions_go_on_counting_and_skip_the_padding() -> None:
    """H05: row 0 has 3 pads: its real tokens stand at 0, 1, 2, ..., as they would alone and without a cache."""
    cache = KeyValueCache(model_config(), 2, 8, torch.float32, CPU)
    cache.valid_BS[:] = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
    assert positions(2, 4, CPU, None, None, cache)[:, 3:].tolist() == [[0], [3]]
    cache.length = 4
    assert positions(2, 4, CPU, None, None, cache).tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]


def test_one_position_more_than_there_is_room_for_is_an_error_that_changes_nothing() -> None:
    """H04: the message names the sizes; the cache can be used on as if nothing had happened."""
    model, token_BS = build("dense"), torch.randint(37, (2, 7))
    cache = new_cache(model, 2, 7)
    with torch.no_grad():
        model(token_BS[:, :5], cache=cache)
        with pytest.raises(ValueError, match=r"room for 7 positions, 5 are filled and 3 more"):
            model(torch.randint(37, (2, 3)), cache=cache)
        assert cache.length == 5
        last = model(token_BS[:, 5:], cache=cache)
        torch.testing.assert_close(last, model(token_BS)[:, 5:], rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match="larger cache"):
            model(token_BS[:, :1], cache=cache)


def test_documents_and_a_cache_exclude_each_other() -> None:
    """A cache holds one document a row."""
    model, token_BS = build("dense"), torch.randint(37, (2, 5))
    with pytest.raises(ValueError, match="not both"):
        model(token_BS, document_BS=torch.zeros_like(token_BS), cache=new_cache(model, 2, 5))
