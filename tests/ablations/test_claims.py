"""Claims: supported, contradicted, or not decided."""

from __future__ import annotations

from typing import Any

import pytest

from ablations.claims import CONTRADICTED, SUPPORTED, UNDECIDED, Claim, decide
from moe.config import ConfigError


def results(key: str = "bits_per_byte", **arms: list[float]) -> dict[str, dict[int, dict[str, Any]]]:
    return {name: {seed: {key: value} for seed, value in enumerate(values)} for name, values in arms.items()}


CLEAR = results(good=[2.00, 2.11, 2.22], bad=[2.10, 2.20, 2.32], like_bad=[2.05, 2.25, 2.30])


@pytest.mark.parametrize(
    ("arms", "verdict"),
    [(("good", "bad"), SUPPORTED), (("bad", "good"), CONTRADICTED), (("bad", "like_bad"), UNDECIDED)],
)
def test_the_verdict_follows_sign_and_interval(arms: tuple[str, str], verdict: str) -> None:
    assert decide([Claim(arms)], CLEAR)[0].verdict == verdict


def test_better_is_higher_where_high_is_good() -> None:
    speeds = results("tokens_per_second", fast=[100, 110, 120], slow=[50, 61, 70])
    assert decide([Claim(("fast", "slow"), measure="tokens_per_second")], speeds)[0].verdict == SUPPORTED
    assert decide([Claim(("slow", "fast"), measure="tokens_per_second")], speeds)[0].verdict == CONTRADICTED


def test_a_margin_must_be_exceeded_too() -> None:
    """The gain is 0.10, 0.09, 0.10."""
    assert decide([Claim(("good", "bad"), by=0.05)], CLEAR)[0].verdict == SUPPORTED
    assert decide([Claim(("good", "bad"), by=0.15)], CLEAR)[0].verdict == CONTRADICTED
    assert decide([Claim(("good", "bad"), by=0.095)], CLEAR)[0].verdict == UNDECIDED


def test_a_chain_needs_every_link_and_one_broken_link_contradicts_it() -> None:
    assert decide([Claim(("good", "bad", "like_bad"))], CLEAR)[0].verdict == UNDECIDED
    found = decide([Claim(("bad", "good", "like_bad"))], CLEAR)[0]
    assert found.verdict == CONTRADICTED
    assert "bad over good: gain -0.09" in found.detail


def test_many_claims_demand_more_of_each() -> None:
    """A gain of 2.0, 2.3, 2.6: two-sided p = 0.0056, which twenty comparisons take above 0.05."""
    one = results(a=[0.0, 0.0, 0.0], b=[2.0, 2.3, 2.6])
    claim = Claim(("a", "b"))
    assert decide([claim], one)[0].verdict == SUPPORTED
    others = [Claim(("b", "nothing"))] * 19
    assert decide([claim, *others], one)[0].verdict == UNDECIDED


def test_one_seed_or_no_common_seed_decides_nothing() -> None:
    found = decide([Claim(("a", "b")), Claim(("a", "gone"))], results(a=[1.0], b=[2.0]))
    assert [each.verdict for each in found] == [UNDECIDED, UNDECIDED]
    assert "one seed" in found[0].detail and "no seed has both" in found[1].detail


def test_identical_arms_are_not_told_apart() -> None:
    assert decide([Claim(("a", "b"))], results(a=[1.0, 2.0], b=[1.0, 2.0]))[0].verdict == UNDECIDED


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arm_better_then": ["a", "b"]}, "did you mean claims.arm_better_than"),
        ({"says": "x"}, "arm_better_than is missing"),
        ({"arm_better_than": ["a"]}, "two arms or more"),
        ({"arm_better_than": ["a", "c"]}, "'c' must be among the arms: a, b"),
        ({"arm_better_than": ["a", "b"], "measure": "bits"}, "must be one of bits_per_byte"),
        ({"arm_better_than": ["a", "b"], "measure": "leak_bits"}, "needs leak_pairs"),
        ({"arm_better_than": ["a", "b"], "by": -1}, "must be 0 or more"),
        ("a > b", "write each as"),
    ],
)
def test_a_claim_that_cannot_be_read_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Claim.from_dict(given, ["a", "b"], False, "file")
