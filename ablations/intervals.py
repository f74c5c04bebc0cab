"""Means over seeds with Student's t intervals, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of independent values, and how well it is known.

    Attributes:
        mean: of the values.
        low, high: ends of the 95% t interval; None for one value, which says nothing about its own spread.
        values: how many.
        p: of a two-sided t test of mean 0; None for one value.
    """

    mean: float
    low: float | None
    high: float | None
    values: int
    p: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of at least one value.

        Values without any spread have an interval of no width: p is 0, or 1 where all are 0.
        """
        value_N = np.asarray(values, dtype=np.float64)
        count, mean = len(value_N), float(value_N.mean())
        if count == 1:
            return cls(mean, None, None, 1, None)
        error = float(value_N.std(ddof=1)) / math.sqrt(count)
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
        if error == 0:
            return cls(mean, mean, mean, count, 1.0 if mean == 0 else 0.0)
        p = 2 * float(stats.t.sf(abs(mean) / error, count - 1))
        return cls(mean, mean - half, mean + half, count, p)

    @property
    def contains_zero(self) -> bool:
        """Whether 0 is in the interval; true for one value, where nothing is excluded."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high

    def text(self, digits: int = 4, sign: bool = False) -> str:
        """`0.1234 [0.1200, 0.1268]`, or the mean alone."""
        plus = "+" if sign else ""
        mean = f"{self.mean:{plus}.{digits}f}"
        if self.low is None or self.high is None:
            return mean
        return f"{mean} [{self.low:{plus}.{digits}f}, {self.high:{plus}.{digits}f}]"


def paired(values: dict[int, float], reference: dict[int, float]) -> Interval | None:
    """The mean difference `values` - `reference` over the seeds that both have; None where there is none.

    Two arms with one seed see the same data in the same order, so that what the seed does to both cancels.
    """
    seeds = sorted(values.keys() & reference.keys())
    return Interval.of([values[seed] - reference[seed] for seed in seeds]) if seeds else None
