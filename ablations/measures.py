"""What is measured of every run, and how each figure is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
"""One run's figures: what `ablations.job.measure` writes to its eval/ablation.json."""
Results = dict[str, dict[int, Result]]
"""By arm and seed."""


@dataclass(frozen=True)
class Measure:
    """One figure of a run.

    Attributes:
        key: in a `Result`.
        head: of its column.
        unit: in sentences.
        digits: behind the point.
        low_is_good: which way is better.
    """

    key: str
    head: str
    unit: str
    digits: int
    low_is_good: bool = True

    def by_seed(self, runs: dict[int, Result]) -> dict[int, float]:
        """The values that there are; a dense model has no load, and only some ablations measure a leak."""
        return {seed: run[self.key] for seed, run in runs.items() if run.get(self.key) is not None}


MEASURES = {
    measure.key: measure
    for measure in (
        Measure("bits_per_byte", "bits/byte", "bits a byte", 4),
        Measure("nats_per_token", "nats/token", "nats a token", 4),
        Measure("max_violation", "MaxVio", "of MaxVio", 3),
        Measure("zero_expert_fraction", "without expert", "of the tokens without an expert", 3),
        Measure("leak_bits", "leak, bits/token", "bits a token leaked", 4),
        Measure("logit_norm", "router logits", "of the router logits' norm", 2),
        Measure("tokens_per_second", "tokens/s", "tokens a second", 0, low_is_good=False),
        Measure("cpu_minutes", "CPU min", "CPU minutes", 2),
    )
}
"""All but the last two are of held-out text under causal routing; the leak is the training router's."""
