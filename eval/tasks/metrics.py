"""From log-likelihoods to accuracies, as lm-eval 0.4.13 defines them for `output_type: multiple_choice`.

acc              the most probable continuation is the right one
acc_norm         likewise after division of the log-likelihood by the continuation's characters, as `len(choice)`
acc_bytes        likewise after division by its UTF-8 bytes
acc_mutual_info  likewise after subtraction of the continuation's log-likelihood without context: ln P(c|x) - ln P(c)
without_context  the null: the continuation that is most probable without context is the right one
The first of equal ones counts as the most probable. Standard errors are those of the mean over questions, with n - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.tokenizer import Tokenizer
from eval.tasks.encoding import encode_pair
from eval.tasks.loglikelihood import Scored, Scorer
from eval.tasks.requests import Question

METRICS = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "without_context")


@dataclass
class Answer:
    """What was said about one question.

    Attributes:
        question: it.
        scored: each continuation behind its context.
        alone: each continuation right after the marker.
        merged: continuations whose border is within a token; see `encode_pair`.
    """

    question: Question
    scored: list[Scored]
    alone: list[Scored]
    merged: int = 0

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one continuation."""
        return len(self.scored) > 1

    def correct(self, metric: str) -> float:
        """1 or 0, by one of `METRICS`."""
        texts = self.question.continuations
        given_K = -np.array([scored.nats for scored in self.scored])
        alone_K = -np.array([scored.nats for scored in self.alone])
        if metric == "acc_norm":
            given_K /= np.array([float(len(text)) for text in texts])
        elif metric == "acc_bytes":
            given_K /= np.array([float(len(text.encode())) for text in texts])
        elif metric == "acc_mutual_info":
            given_K -= alone_K
        elif metric == "without_context":
            given_K = alone_K
        elif metric != "acc":
            raise ValueError(f"there is no metric {metric}; there are {', '.join(METRICS)}")
        return float(int(np.argmax(given_K)) == self.question.label)

    @property
    def right(self) -> Scored:
        """The right continuation."""
        return self.scored[self.question.label]


def answer(questions: Sequence[Question], tokenizer: Tokenizer, scorer: Scorer) -> list[Answer]:
    """Score every continuation of every question, all in one go so that rows of similar length meet.

    Args:
        questions: any number of continuations each.
        tokenizer: of the run's corpus.
        scorer: what gives the likelihoods.
    """
    asked = [pair for question in questions for pair in zip(question.contexts, question.continuations, strict=True)]
    pairs = [encode_pair(tokenizer, context, continuation) for context, continuation in asked]
    alone = [encode_pair(tokenizer, "", continuation) for _, continuation in asked]
    scored, answers, first = scorer([*pairs, *alone]), [], 0
    for question in questions:
        here = slice(first, first + len(question.continuations))
        there = slice(len(pairs) + here.start, len(pairs) + here.stop)
        merged = sum(pair.merged for pair in pairs[here])
        answers.append(Answer(question, scored[here], scored[there], merged))
        first = here.stop
    return answers


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error sqrt(sum (x - mean)^2 / (n - 1) / n); None for a single value.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("there is no question to take a mean of")
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return mean, None
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (count - 1)) / math.sqrt(count)


def bits_per_byte(answers: Sequence[Answer]) -> tuple[float, float | None]:
    """Of the right continuations, sums first: all bits over all bytes, and its standard error over questions.

    The error is that of a ratio of sums: sqrt(n / (n - 1) * sum (bits_i - ratio * bytes_i)^2) / sum bytes.

    Raises:
        ValueError: no answer.
    """
    if not answers:
        raise ValueError("there is no question to take bits per byte of")
    bits = [a.right.nats / math.log(2) for a in answers]
    sizes = [a.right.bytes for a in answers]
    ratio, count = math.fsum(bits) / sum(sizes), len(answers)
    if count == 1:
        return ratio, None
    if math.isinf(ratio):
        return ratio, None
    squares = math.fsum((b - ratio * size) ** 2 for b, size in zip(bits, sizes, strict=True))
    return ratio, math.sqrt(count / (count - 1) * squares) / sum(sizes)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """All figures of some answers, as plain data.

    Questions with one continuation count for bits per byte only.

    Returns:
        "questions", "with_choice"; the `METRICS`, "less_chance" and "mutual_info_less_chance" (acc and
        acc_mutual_info less one over the number of continuations, question by question) as (mean, standard error),
        None where no question has a choice; "bits_per_byte" likewise; "right_nats", "right_tokens" and "right_bytes"
        of the right continuations; "continuations", and how many of them are "context_cut" (with less context than
        asked), "in_pieces" and "border_in_token".
    """
    chosen = [a for a in answers if a.has_choice]
    scored = [s for a in answers for s in a.scored]
    figures: dict[str, Any] = {"questions": len(answers), "with_choice": len(chosen)}
    for metric in METRICS:
        figures[metric] = mean_and_error([a.correct(metric) for a in chosen]) if chosen else None
    for name, metric in (("less_chance", "acc"), ("mutual_info_less_chance", "acc_mutual_info")):
        beyond = [a.correct(metric) - 1 / len(a.scored) for a in chosen]
        figures[name] = mean_and_error(beyond) if chosen else None
    return figures | {
        "bits_per_byte": bits_per_byte(answers),
        "right_nats": math.fsum(a.right.nats for a in answers),
        "right_tokens": sum(a.right.tokens for a in answers),
        "right_bytes": sum(a.right.bytes for a in answers),
        "continuations": len(scored),
        "context_cut": sum(s.lost > 0 for s in scored),
        "in_pieces": sum(s.pieces > 1 for s in scored),
        "border_in_token": sum(a.merged for a in answers),
    }


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference of two lists about the same questions, and its standard error.

    Raises:
        ValueError: the lists differ in length.
    """
    return mean_and_error([a - b for a, b in zip(first, second, strict=True)])
