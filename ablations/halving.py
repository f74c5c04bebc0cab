"""Successive halving: many candidates for a short while, the better ones for longer.

Jamieson & Talwalkar 2016 (arXiv 1502.07943): at each rung all that are left are compared, a share of them goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One comparison.

    Attributes:
        budget: spent on each candidate by then, all rungs together.
        scores: of every candidate that was left, the best (lowest) first; of equal ones the earlier candidate.
        kept: those that went on; at the last rung the winner alone.
    """

    budget: float
    scores: tuple[tuple[str, float], ...]
    kept: tuple[str, ...]


def successive_halving(
    candidates: Sequence[str],
    budgets: Sequence[float],
    keep: float,
    score: Callable[[Sequence[str], float], Sequence[float]],
) -> list[Rung]:
    """Compare, keep the better ones, go on.

    Args:
        candidates: names, all different.
        budgets: at which they are compared, rising. A candidate that goes on continues from the budget before.
        keep: share that goes on from each rung but the last, rounded up; at least one.
        score: gives the scores (low is good) of the candidates, brought to a budget. A candidate without a score, nan,
            is dropped.

    Returns:
        One entry a rung; fewer than `budgets` where no candidate has a score any more.

    Raises:
        ValueError: no candidate has a score at the first rung.
    """
    left, rungs = list(candidates), []
    for budget in budgets:
        found = [(name, value) for name, value in zip(left, score(left, budget), strict=True) if not math.isnan(value)]
        if not found:
            break
        ordered = sorted(found, key=lambda each: each[1])  # stable: of equal ones the earlier stays in front
        count = 1 if budget == budgets[-1] else max(1, math.ceil(round(keep * len(ordered), 9)))
        left = [name for name, _ in ordered[:count]]
        rungs.append(Rung(budget, tuple(ordered), tuple(left)))
    if not rungs:
        raise ValueError("no candidate has a score: all runs failed")
    return rungs
