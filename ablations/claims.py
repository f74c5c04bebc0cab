"""Claims as data, and what the numbers say of each: supported, contradicted, or not decided at these seeds.

    [[claims]]
    says = "a smaller group leaks more"
    arm_better_than = ["flat", "chunk 64", "chunk 16"]    # each better than the next
    measure = "leak_bits"                                 # "bits_per_byte" where not given
    by = 0.0                                              # and by more than this

A pair is compared by the paired difference over seeds. Its two-sided t test is corrected (Holm) for all pairs of all
claims of the file: at a corrected p below 0.05 the difference is taken as real, and the claim is supported or, where
it has the other sign, contradicted. Anything else is not decided, however the means lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ablations.intervals import CONFIDENCE, Interval, paired
from ablations.measures import MEASURES, Results
from eval.intervals import corrected_p_values
from moe.config import require
from training.load_config import checked_values

Verdict = Literal["supported", "contradicted", "not decided at these seeds"]
SUPPORTED: Verdict = "supported"
CONTRADICTED: Verdict = "contradicted"
UNDECIDED: Verdict = "not decided at these seeds"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        arm_better_than: at least two arms, each claimed to be better than the next.
        says: in words.
        measure: what "better" is about: a name of `MEASURES`, which says whether low or high is good.
        by: least difference, in the measure's unit.
    """

    arm_better_than: tuple[str, ...]
    says: str = ""
    measure: str = "bits_per_byte"
    by: float = 0.0

    @classmethod
    def from_dict(cls, given: Any, arms: Sequence[str], leak: bool, source: str) -> Claim:
        """Check one entry of the file.

        Raises:
            ConfigError: a key, an arm or a measure that there is not.
        """
        require(isinstance(given, dict), f"{source}: claims: write each as [[claims]]")
        values = checked_values(cls, given, "claims.", source)
        require("arm_better_than" in values, f"{source}: claims: arm_better_than is missing in {given}")
        claim = cls(**values)
        require(len(claim.arm_better_than) >= 2, f"{source}: claims.arm_better_than: give two arms or more")
        for arm in claim.arm_better_than:
            require(arm in arms, f"{source}: claims.arm_better_than: {arm!r} must be among the arms: {', '.join(arms)}")
        require(
            claim.measure in MEASURES,
            f"{source}: claims.measure = {claim.measure!r}: must be one of {', '.join(MEASURES)}",
        )
        require(claim.measure != "leak_bits" or leak, f'{source}: claims.measure = "leak_bits" needs leak_pairs >= 2')
        require(claim.by >= 0, f"{source}: claims.by = {claim.by}: must be 0 or more")
        return claim

    @property
    def text(self) -> str:
        """In words."""
        return self.says or " better than ".join(self.arm_better_than)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(better, worse) as claimed."""
        return list(itertools.pairwise(self.arm_better_than))


@dataclass(frozen=True)
class Finding:
    """What came of a claim.

    Attributes:
        claim: the claim.
        verdict: of all its pairs.
        pairs: for each pair its verdict, the paired difference (second less first, so above 0 where low is good and
            the claim holds; the other way where high is good) less `by`, and the corrected p.
    """

    claim: Claim
    verdict: Verdict
    pairs: tuple[tuple[Verdict, Interval | None, float | None], ...]

    @property
    def detail(self) -> str:
        """The numbers of each pair."""
        parts = []
        for (better, worse), (verdict, gain, p) in zip(self.claim.pairs, self.pairs, strict=True):
            which = f"{better} over {worse}: " if len(self.pairs) > 1 else ""
            if gain is None:
                parts.append(f"{which}no seed has both")
                continue
            beyond = f" beyond {self.claim.by:g}" if self.claim.by else ""
            tested = "one seed, no interval" if p is None else f"corrected p {p:.2g}"
            also = f", {verdict}" if len(self.pairs) > 1 else ""
            parts.append(
                f"{which}gain{beyond} {gain.text(sign=True)} {MEASURES[self.claim.measure].unit}, {tested}{also}"
            )
        return "; ".join(parts)


def decide(claims: Sequence[Claim], results: Results) -> list[Finding]:
    """A verdict for every claim.

    Args:
        claims: all of the file: they are corrected for together.
        results: by arm and seed.
    """
    gains = [[_gain(claim, pair, results) for pair in claim.pairs] for claim in claims]
    corrected = iter(corrected_p_values([gain.p if gain else None for of_claim in gains for gain in of_claim]))
    findings = []
    for claim, of_claim in zip(claims, gains, strict=True):
        pairs = tuple((_verdict(gain, p := next(corrected)), gain, p) for gain in of_claim)
        verdicts = [verdict for verdict, _, _ in pairs]
        verdict = SUPPORTED if set(verdicts) == {SUPPORTED} else UNDECIDED
        findings.append(Finding(claim, CONTRADICTED if CONTRADICTED in verdicts else verdict, pairs))
    return findings


def _gain(claim: Claim, pair: tuple[str, str], results: Results) -> Interval | None:
    """By how much the first is better than claimed at least, over seeds."""
    measure = MEASURES[claim.measure]
    better, worse = (measure.by_seed(results.get(arm, {})) for arm in pair)
    sign = 1 if measure.low_is_good else -1
    shifted = {seed: sign * value + claim.by for seed, value in better.items()}
    return paired({seed: sign * value for seed, value in worse.items()}, shifted)


def _verdict(gain: Interval | None, p: float | None) -> Verdict:
    if gain is None or p is None or p >= 1 - CONFIDENCE or gain.mean == 0:
        return UNDECIDED
    return SUPPORTED if gain.mean > 0 else CONTRADICTED
