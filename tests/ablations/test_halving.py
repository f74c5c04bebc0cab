"""Successive halving on a function whose picks are known by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ablations.halving import Rung, successive_halving

# Score at budget n: final + gap / n. d ends best but starts worst; a starts best.
CURVES = {"a": (5.0, 0.0), "b": (4.0, 2.0), "c": (3.0, 4.0), "d": (1.0, 9.0), "e": (4.5, 1.0)}


def score(names: Sequence[str], budget: float) -> list[float]:
    return [CURVES[name][0] + CURVES[name][1] / budget for name in names]


def test_the_picks_are_those_computed_by_hand() -> None:
    """At 1: a 5, e 5.5, b 6, c 7, d 10; half of five, rounded up, is a e b. At 2 all have 5. At 4: e 4.75, a 5."""
    rungs = successive_halving(list("abcde"), [1, 2, 4], 0.5, score)
    assert rungs[0] == Rung(1, (("a", 5.0), ("e", 5.5), ("b", 6.0), ("c", 7.0), ("d", 10.0)), ("a", "e", "b"))
    assert rungs[1] == Rung(2, (("a", 5.0), ("e", 5.0), ("b", 5.0)), ("a", "e"))  # equal: in the order before
    assert rungs[2] == Rung(4, (("e", 4.75), ("a", 5.0)), ("e",))


def test_each_candidate_is_scored_only_as_long_as_it_is_left() -> None:
    asked = []

    def counting(names: Sequence[str], budget: float) -> list[float]:
        asked.append((tuple(names), budget))
        return score(names, budget)

    successive_halving(list("abcde"), [1, 2, 4], 0.2, counting)
    assert asked == [(tuple("abcde"), 1), (("a",), 2), (("a",), 4)]


@pytest.mark.parametrize(("candidates", "keep", "kept"), [(18, 1 / 3, 6), (18, 0.34, 7), (9, 1 / 3, 3), (3, 0.01, 1)])
def test_the_share_is_rounded_up_and_not_by_rounding_error(candidates: int, keep: float, kept: int) -> None:
    names = [str(n) for n in range(candidates)]
    rungs = successive_halving(names, [1, 2], keep, lambda left, _: [float(name) for name in left])
    assert rungs[0].kept == tuple(names[:kept]) and rungs[1].kept == ("0",)


def test_a_candidate_without_a_score_is_dropped() -> None:
    def failing(names: Sequence[str], budget: float) -> list[float]:
        return [math.nan if name == "a" else value for name, value in zip(names, score(names, budget), strict=True)]

    assert successive_halving(list("ab"), [1, 2], 0.9, failing)[-1].kept == ("b",)
    with pytest.raises(ValueError, match="all runs failed"):
        successive_halving(["a"], [1], 0.5, failing)
