"""Does a run give back its training text? Prompts from training and from held-out text, and the longest verbatim match.

Each prompt is continued greedily (or sampled), and the longest run of tokens of the continuation that occurs anywhere
in the text that the run was trained on is measured (the setting of Carlini et al. 2023, "Quantifying Memorization",
with any match in place of the true continuation's). Common phrases match too, so that a length by itself says nothing:
held-out prompts, as many of each domain, are the null. What is compared is the difference of the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from data.batches import neighbouring_windows
from data.corpus import Corpus
from eval.audits.matches import longest_matches
from eval.command import require_at_least
from eval.generate import generate
from eval.report_tables import Table
from moe.model import Transformer
from training.build import build_batches
from training.config import Config

BATCH = 32
DRAWS = 10_000
PER_DOMAIN = 16
PROMPT_TOKENS = 32
NEW_TOKENS = 48


def audit_leakage(
    model: Transformer,
    corpus: Corpus,
    config: Config,
    steps: int,
    per_domain: int = PER_DOMAIN,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Prompt a model with training and held-out text, and look for its continuations in the training text.

    Args:
        model: of the run.
        corpus: of the run.
        config: of the run.
        steps: of training that the model has had: only their text is prompted with and searched.
        per_domain: prompts of each kind from a domain.
        prompt_tokens: of a prompt.
        new_tokens: of a continuation at most.
        temperature: 0 takes the most probable token.
        seed: of the choice of prompts, of sampling and of the interval.

    Returns:
        Plain data.

    Raises:
        ValueError: a number is out of range, or no domain has prompts of both kinds.
    """
    require_at_least(1, prompts=per_domain, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    generator = np.random.default_rng(seed)
    consumed = consumed_text(corpus, config, steps)
    prompts: dict[str, list[tuple[str, list[int]]]] = {"train": [], "heldout": []}
    left_out = []
    for domain in corpus.domains:
        heldout = _documents(corpus.tokens("heldout", domain), corpus.document_starts("heldout", domain))
        pairs = {
            "train": _prompts(consumed[domain], corpus, prompt_tokens, per_domain, generator),
            "heldout": _prompts(heldout, corpus, prompt_tokens, per_domain, generator),
        }
        count = min(map(len, pairs.values()))
        if count == 0:
            left_out.append(domain)
        for kind, found in pairs.items():
            prompts[kind] += [(domain, prompt) for prompt in found[:count]]
    if not prompts["train"]:
        raise ValueError(f"no domain has stretches of {prompt_tokens} tokens in both splits; lower --prompt-tokens")
    texts = [text_N for stretches in consumed.values() for text_N in stretches]
    kinds = {
        kind: _measure(model, corpus, found, texts, new_tokens, temperature, seed) for kind, found in prompts.items()
    }
    length = {kind: np.array([row["match_tokens"] for row in rows], dtype=np.float64) for kind, rows in kinds.items()}
    domain_N = np.array([domain for domain, _ in prompts["train"]])
    difference, low, high = _difference(length["train"], length["heldout"], domain_N, seed)
    return {
        "steps": steps,
        "prompts_of_each_kind": len(domain_N),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "temperature": temperature,
        "searched_tokens": sum(map(len, texts)),
        "domains_left_out": left_out,
        "kinds": {kind: _summary(rows) for kind, rows in kinds.items()},
        "difference_tokens": difference,
        "difference_low": low,
        "difference_high": high,
        "leaks": None if low is None else low > 0,
        "rows": kinds,
    }


def consumed_text(corpus: Corpus, config: Config, steps: int) -> dict[str, list[np.ndarray]]:
    """The training text of the first steps, by domain: stretches of neighbouring windows."""
    length = config.training.sequence_length
    used = build_batches(config, corpus).windows_before(steps)
    found: dict[str, list[np.ndarray]] = {}
    for number, domain in enumerate(corpus.domains):
        token_N = corpus.tokens("train", domain)
        stretches = neighbouring_windows(sorted(used[number]))
        found[domain] = [token_N[first * length : last * length + 1] for first, last in stretches]
    return found


def leakage_table(found: dict[str, Any]) -> Table:
    """The table of what `audit_leakage` found."""
    names = {"train": "training text", "heldout": "held-out text (null)"}
    rows = []
    for kind, name in names.items():
        one = found["kinds"][kind]
        rows.append(
            (
                name,
                str(found["prompts_of_each_kind"]),
                f"{one['mean_tokens']:.1f}",
                f"{one['median_tokens']:.0f}",
                f"{one['largest_tokens']:.0f}",
                f"{one['mean_bytes']:.1f}",
                f"{one['largest_bytes']:.0f}",
                f"{one['whole_continuations']}",
            )
        )
    if found["difference_low"] is None:
        said = "The difference has no interval: a domain has a single prompt of each kind."
    else:
        said = (
            f"Training less held-out prompts: {found['difference_tokens']:+.2f} tokens, 95% interval "
            f"{found['difference_low']:+.2f} to {found['difference_high']:+.2f} (bootstrap over prompts within domains)"
        )
        said += ": training text comes back." if found["leaks"] else ": no leakage is shown."
    note = (
        f"Longest verbatim match of each continuation, at most {found['new_tokens']} tokens, anywhere in the "
        f"{found['searched_tokens']:,} tokens that the run was trained on; prompts of {found['prompt_tokens']} tokens, "
        f"temperature {found['temperature']:g}. {said} Prompts of one document are not independent, so that the "
        "interval is somewhat short."
    )
    if found["domains_left_out"]:
        note += f" Too short for prompts: {', '.join(found['domains_left_out'])}."
    columns = ("prompts from", "prompts", "mean tokens", "median", "largest", "mean bytes", "largest bytes", "whole")
    return Table("Verbatim training text in continuations", columns, rows, note)


def _documents(token_N: np.ndarray, start_M: np.ndarray) -> list[np.ndarray]:
    return np.split(token_N, start_M[1:]) if len(token_N) else []


def _prompts(
    stretches: list[np.ndarray], corpus: Corpus, tokens: int, count: int, generator: np.random.Generator
) -> list[list[int]]:
    """Random stretches without a marker after their first token, in random order; fewer where there are not as many."""
    usable = [text_N for text_N in stretches if len(text_N) > tokens]
    if not usable:
        return []
    share = np.array([len(text_N) - tokens for text_N in usable], dtype=np.float64)
    found: dict[tuple[int, int], list[int]] = {}
    for _ in range(20 * count):
        place = int(generator.choice(len(usable), p=share / share.sum()))
        first = int(generator.integers(len(usable[place]) - tokens))
        prompt = usable[place][first : first + tokens].tolist()
        if corpus.tokenizer.end_of_text not in prompt[1:]:
            found[place, first] = prompt
        if len(found) == count:
            break
    return list(found.values())


def _measure(
    model: Transformer,
    corpus: Corpus,
    prompts: list[tuple[str, list[int]]],
    texts: list[np.ndarray],
    new_tokens: int,
    temperature: float,
    seed: int,
) -> list[dict[str, Any]]:
    tokenizer = corpus.tokenizer
    continuations: list[list[int]] = []
    for first in range(0, len(prompts), BATCH):
        continuations += generate(
            model,
            [prompt for _, prompt in prompts[first : first + BATCH]],
            new_tokens,
            temperature,
            seed=seed,
            stop_token=tokenizer.end_of_text,
            vocabulary_size=corpus.vocabulary_size,
        )
    rows = []
    for (domain, _), tokens, (start, length) in zip(
        prompts, continuations, longest_matches(continuations, texts), strict=True
    ):
        match = tokens[start : start + length]
        rows.append(
            {
                "domain": domain,
                "continuation_tokens": len(tokens),
                "match_tokens": length,
                "match_bytes": len(tokenizer.decode_bytes(match)),
                "match": tokenizer.decode(match),
            }
        )
    return rows


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens, text_bytes = ([row[key] for row in rows] for key in ("match_tokens", "match_bytes"))
    whole = sum(row["match_tokens"] == row["continuation_tokens"] > 0 for row in rows)
    return {
        "mean_tokens": float(np.mean(tokens)),
        "median_tokens": float(np.median(tokens)),
        "largest_tokens": float(np.max(tokens)),
        "mean_bytes": float(np.mean(text_bytes)),
        "largest_bytes": float(np.max(text_bytes)),
        "whole_continuations": whole,
    }


def _difference(
    train_N: np.ndarray, heldout_N: np.ndarray, domain_N: np.ndarray, seed: int
) -> tuple[float, float | None, float | None]:
    """Difference of means, and its percentile bootstrap interval; prompts are drawn again within their domain."""
    difference = float(train_N.mean() - heldout_N.mean())
    groups = [np.flatnonzero(domain_N == domain) for domain in np.unique(domain_N)]
    if min(map(len, groups)) < 2:
        return difference, None, None
    generator = np.random.default_rng(seed)
    draws_N = np.zeros(DRAWS)
    for group in groups:
        for values_N, sign in ((train_N[group], 1), (heldout_N[group], -1)):
            weight_NM = generator.multinomial(len(group), np.full(len(group), 1 / len(group)), size=DRAWS)
            draws_N += sign * (weight_NM @ values_N)
    low, high = np.quantile(draws_N / len(domain_N), [0.025, 0.975])
    return difference, float(low), float(high)
