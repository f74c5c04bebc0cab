"""Generation: always under causal routing, with a key/value cache.

python -m eval.generate RUN --prompt "Once upon a time" --new-tokens 100 --temperature 0.8 --seed 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from eval.command import run_command
from eval.sampling import Sampler
from moe.attention import KeyValueCache
from moe.model import Transformer
from moe.routing import RoutingContext
from training.run import Run

# Prompt positions of one forward pass: bounds the memory of logits and masks.
MOST_NEW_TOKENS = 1_000_000  # the cache is set aside at once
PREFILL_CHUNK = 256


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_token: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    vocabulary_size: int | None = None,
) -> list[list[int]]:
    """Continue prompts.

    Shorter prompts are padded on the left; padding is neither attended to, nor routed, nor counted in positions. A
    row's continuation does not depend on the other rows (up to floating-point rounding).

    Args:
        model: any router; routing is causal.
        prompts: token ids of each row, at least one: begin each with the end-of-text id, as documents in training.
        new_tokens: at most so many for each row.
        temperature: 0 takes the most probable token.
        top_k: sample among the k most probable tokens only.
        top_p: sample among the fewest most probable tokens that together reach this probability only.
        seed: of the sampling, one for all rows or one of each. Equal prompts with equal seeds give equal
            continuations: for several samples of one prompt give several seeds.
        stop_token: a row ends before this token.
        prefill_chunk: prompt positions of one forward pass.
        vocabulary_size: of the tokenizer, where the model's is padded: ids from there on are never drawn.

    Returns:
        The new tokens of each row, without prompt and stop token.

    Raises:
        ValueError: an argument is out of range; says which, and what is allowed.
    """
    vocabulary_size = model.config.vocabulary_size if vocabulary_size is None else vocabulary_size
    _check(prompts, new_tokens, prefill_chunk, vocabulary_size)
    if not prompts or new_tokens == 0:
        return [[] for _ in prompts]
    seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds and {len(prompts)} prompts: give one seed, or one for each prompt")
    sampler = Sampler(prompts, seeds, temperature, top_k, top_p)
    device = model.device
    token_BS, valid_BS = pad_left(prompts, device)
    length = token_BS.shape[1]
    # The last new token is never fed back, hence one position less.
    cache = KeyValueCache(model.config, len(prompts), length + new_tokens - 1, model.compute_dtype, device)
    for start in range(0, length, prefill_chunk):
        chunk = slice(start, start + prefill_chunk)
        logits_BV = _forward(model, token_BS[:, chunk], valid_BS[:, chunk], cache)

    continuations: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    while True:
        for row, token in enumerate(sampler.draw(logits_BV[:, :vocabulary_size], running)):
            if token is None:
                continue
            if token == stop_token:
                running[row] = False
            else:
                continuations[row].append(token)
                running[row] = len(continuations[row]) < new_tokens
        if not any(running):
            return continuations
        # A row that has ended goes on as padding.
        next_tokens = [[c[-1] if run else 0] for c, run in zip(continuations, running, strict=True)]
        token_B1 = torch.tensor(next_tokens, device=device)
        valid_B1 = torch.tensor(running, device=device)[:, None]
        logits_BV = _forward(model, token_B1, valid_B1, cache)


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(token_BS int64, valid_BS bool): prompts aligned at their ends; padding is id 0 and not valid."""
    length = max(len(prompt) for prompt in prompts)
    token_BS = torch.zeros(len(prompts), length, dtype=torch.int64)
    valid_BS = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        token_BS[row, length - len(prompt) :] = torch.tensor(prompt)
        valid_BS[row, length - len(prompt) :] = True
    return token_BS.to(device), valid_BS.to(device)


def _forward(model: Transformer, token_BS: Tensor, valid_BS: Tensor, cache: KeyValueCache) -> Tensor:
    """(B, V) logits after the last position."""
    context = RoutingContext(len(token_BS), token_BS.shape[1], valid_BS=valid_BS, mode="causal")
    return model(token_BS, context, cache=cache)[:, -1]


def _check(prompts: Sequence[Sequence[int]], new_tokens: int, prefill_chunk: int, vocabulary_size: int) -> None:
    if not 0 <= new_tokens <= MOST_NEW_TOKENS:
        raise ValueError(f"new_tokens is {new_tokens}; allowed are 0 to {MOST_NEW_TOKENS:,}")
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk is {prefill_chunk}; allowed are 1 and above")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: start it with the end-of-text id, as documents in training")
        if min(prompt) < 0 or max(prompt) >= vocabulary_size:
            raise ValueError(
                f"prompt {row} holds the ids {min(prompt)} to {max(prompt)}; the model's vocabulary has 0 to "
                f"{vocabulary_size - 1}: encode it with the tokenizer of the run's corpus"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.generate", description="Continue a text with a trained run.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    parser.add_argument("--new-tokens", type=int, default=100, help="at most so many (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=None, help="sample among the k most probable tokens")
    parser.add_argument("--top-p", type=float, default=None, help="sample among the tokens that reach this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    options = parser.parse_args(arguments)

    run = Run.open(options.run)
    corpus, model = run.corpus(), run.model()
    end_of_text = corpus.tokenizer.end_of_text
    prompt = [end_of_text, *corpus.tokenizer.encode(options.prompt)]
    trained_length = run.config.training.sequence_length
    if len(prompt) + options.new_tokens > trained_length:
        print(
            f"note: prompt and continuation reach {len(prompt) + options.new_tokens} tokens, the run was trained on "
            f"{trained_length}; expect worse text beyond",
            file=sys.stderr,
        )
    (continuation,) = generate(
        model,
        [prompt],
        options.new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.seed,
        stop_token=end_of_text,
        vocabulary_size=corpus.vocabulary_size,
    )
    # One decoding of both parts, so that a character cut between them comes out whole.
    print(corpus.tokenizer.decode([*prompt[1:], *continuation]))


if __name__ == "__main__":
    run_command(main)
