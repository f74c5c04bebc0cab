"""Generation is what full recomputation gives, whatever the batch, the padding and the cache."""

from __future__ import annotations

import pytest
import torch

from eval.generate import generate, pad_left
from moe.attention import KeyValueCache
from moe.model import Transformer
from moe.routing import RoutingContext
from tests.eval.small_models import ROUTERS, random_text, small_model

PROMPTS = [random_text(1, length, seed=length)[0].tolist() for length in (1, 7, 31)]


@torch.no_grad()
def recomputed(model: Transformer, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy continuation without a cache."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("router", ROUTERS)
def test_greedy_equals_full_recomputation_in_one_batch_and_alone(router: str) -> None:
    """H04, H05: prompts of 1, 7 and 31 tokens, 20 new ones."""
    model = small_model(router)
    together = generate(model, PROMPTS, 20)
    for prompt, continuation in zip(PROMPTS, together, strict=True):
        assert continuation == recomputed(model, prompt, 20)
        assert generate(model, [prompt], 20) == [continuation]


@pytest.mark.parametrize("chunk", [1, 4, 31])
def test_the_prompt_may_be_fed_in_chunks(chunk: int) -> None:
    """H04."""
    model = small_model()
    assert generate(model, PROMPTS, 9, prefill_chunk=chunk) == generate(model, PROMPTS, 9)


def test_cached_logits_equal_uncached_ones_up_to_the_last_slot() -> None:
    """H04, H05: within 1e-4."""
    model = small_model()
    token_BS, valid_BS = pad_left(PROMPTS, torch.device("cpu"))
    cache = KeyValueCache(model.config, 3, 31, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        padded_BSV = model(token_BS, RoutingContext(3, 31, valid_BS=valid_BS), cache=cache)
        for row, prompt in enumerate(PROMPTS):
            alone_SV = model(torch.tensor([prompt]))[0]
            assert (padded_BSV[row, -len(prompt) :] - alone_SV).abs().max() < 1e-4


def test_the_causal_router_is_used_not_the_training_router() -> None:
    """H02: generation takes the causal variant."""
    model = small_model("expert_choice")
    seen: list[int | None] = []
    for layer in model.moe_layers():
        layer.router.register_forward_hook(lambda module, inputs, routing: seen.append(routing.capacity))
    generate(model, PROMPTS[:2], 3)
    assert seen and all(capacity is None for capacity in seen)  # expert choice has a fixed capacity


@pytest.mark.parametrize("router", ["expert_choice", "token_choice"])
def test_a_sampled_row_does_not_depend_on_the_others(router: str) -> None:
    """H01, H05."""
    model = small_model(router)
    options = {"new_tokens": 15, "temperature": 1.0, "top_p": 0.95}
    together = generate(model, PROMPTS, **options)
    for prompt, continuation in zip(PROMPTS, together, strict=True):
        assert generate(model, [prompt], **options) == [continuation]
    assert generate(model, PROMPTS[::-1], **options) == together[::-1]


def test_seeds() -> None:
    model = small_model()
    first, again, other = (generate(model, [PROMPTS[1]], 15, temperature=1.0, seed=seed)[0] for seed in (0, 0, 1))
    assert first == again != other
    # Several samples of one prompt: one seed for each row.
    assert generate(model, [PROMPTS[1]] * 2, 15, temperature=1.0, seed=[0, 1]) == [first, other]


def test_a_row_that_stops_stays_as_it_is_and_disturbs_nobody() -> None:
    """H05."""
    model = small_model()
    free = generate(model, PROMPTS, 12)
    stop = free[1][4]
    stopped = generate(model, PROMPTS, 12, stop_token=stop)
    for row, continuation in zip(stopped, free, strict=True):
        end = continuation.index(stop) if stop in continuation else 12
        assert row == continuation[:end]
    assert len(stopped[1]) <= 4


def test_nothing_to_do_is_no_error() -> None:
    model = small_model()
    assert generate(model, [], 5) == []
    assert generate(model, PROMPTS[:2], 0) == [[], []]


def test_mistakes_are_explained() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="prompt 1 is empty: start it with the end-of-text id"):
        generate(model, [[1], []], 5)
    with pytest.raises(ValueError, match="prompt 0 holds the ids 1 to 99; the model's vocabulary has 0 to 36"):
        generate(model, [[1, 99]], 5)
    with pytest.raises(ValueError, match="new_tokens is -1"):
        generate(model, [[1]], -1)
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        generate(model, [[1]], 1, prefill_chunk=0)
    with pytest.raises(ValueError, match="2 seeds and 1 prompts"):
        generate(model, [[1]], 1, seed=[1, 2])
