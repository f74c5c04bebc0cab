"""Results of the leak experiment: the table, and whether its ordering is the known one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CHUNK, SEQUENCE, FLAT = "EC chunk 16", "EC per sequence", "EC flat B x T"
POSITION, THRESHOLD, TOKEN_CHOICE = "EC position, 32 rows", "ET", "token choice, top-2"
ROWS = (CHUNK, SEQUENCE, FLAT, POSITION, THRESHOLD, TOKEN_CHOICE)
COLUMNS = (
    "trained by",
    "train",
    "held out, training router",
    "held out, thresholds (causal)",
    "held out, token choice (causal)",
    "leak, bits/token ± se",
    "prefix audit",
)
NOTE = (
    "Nats per token; mean (lowest - highest) over seeds. A figure that its router could leak into is marked noncausal "
    "and is no result. Train: last 100 steps. Leak: what the training router's loss gains from the true future over an "
    "independent one; ± is the standard error of one model's measurement, averaged over seeds. Prefix audit: of "
    "so many resampled ends of sequences, how many changed any bit of an earlier route, weight or logit. Token choice "
    "under thresholds: the same weights, with cutoffs found on training text."
)


@dataclass(frozen=True)
class Result:
    """One trained model. Losses are nats per token.

    Attributes:
        row: one of `ROWS`.
        seed: of the parameters and of the data order.
        causal: whether the router that it was trained by last, as declared, sees no later token.
        train: training loss, mean of the last 100 steps.
        training_router: held-out loss under the router that it was trained by last.
        threshold: held-out loss under threshold routing.
        token_choice: held-out loss when each token takes its k best experts.
        leak_bits: of a token, under the router that it was trained by last.
        leak_error: standard error of `leak_bits`.
        audit_leaks: resampled ends of sequences that changed any bit before them, under that router.
        audit_probes: ends that were resampled.
        seconds: of training and measuring.
    """

    row: str
    seed: int
    causal: bool
    train: float
    training_router: float
    threshold: float
    token_choice: float
    leak_bits: float
    leak_error: float
    audit_leaks: int
    audit_probes: int
    seconds: float

    @property
    def honest(self) -> float:
        """Held-out loss as the model would be served."""
        return self.token_choice if self.row == TOKEN_CHOICE else self.threshold

    def to_json(self) -> dict[str, Any]:
        """Plain data; what may be leaked into is called noncausal."""
        values = asdict(self)
        prefix = "" if self.causal else "noncausal_"
        names = {"train": f"{prefix}train", "training_router": f"{prefix}training_router"}
        return {names.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True)
class Check:
    """One claim about the table.

    Attributes:
        claim: in words.
        passed: whether it holds.
        detail: by how much.
    """

    claim: str
    passed: bool
    detail: str


def check_ordering(results: Sequence[Result]) -> list[Check]:
    """Whether the table says what it is known to say; losses are compared within each seed.

    Args:
        results: every row with the same seeds.
    """
    seeds = sorted({result.seed for result in results})
    found = {(result.row, result.seed): result for result in results}

    def in_every_seed(claim: str, margin: Callable[[int], float]) -> Check:
        lowest = min(margin(seed) for seed in seeds)
        return Check(
            claim, lowest > 0, f"by at least {lowest:.4f} nats" if lowest > 0 else f"fails by {abs(lowest):.4f}"
        )

    def others(seed: int) -> list[Result]:
        return [found[row, seed] for row in ROWS if row != CHUNK]

    def gain_of_thresholds(row: str) -> Callable[[int], float]:
        return lambda seed: found[row, seed].token_choice - found[row, seed].threshold

    checks = [
        in_every_seed(
            f"{CHUNK} looks best: lowest held-out loss under the routers of training",
            lambda seed: min(each.training_router for each in others(seed)) - found[CHUNK, seed].training_router,
        ),
        in_every_seed(
            f"{CHUNK} is worst honestly: highest held-out loss of all under causal routing",
            lambda seed: found[CHUNK, seed].honest - max(each.honest for each in others(seed)),
        ),
    ]
    checks += [
        in_every_seed(f"{row}: threshold inference beats token-choice inference", gain_of_thresholds(row))
        for row in ROWS
        if row != TOKEN_CHOICE
    ]
    bits = [statistics.mean(found[row, seed].leak_bits for seed in seeds) for row in (CHUNK, SEQUENCE, FLAT)]
    checks.append(
        Check(
            f"what leaks falls with the size of the group: {CHUNK}, {SEQUENCE}, {FLAT}",
            bits[0] > bits[1] > bits[2],
            ", ".join(f"{value:.4f}" for value in bits) + " bits a token",
        )
    )
    wrong = [
        f"{result.row}, seed {result.seed}"
        for result in results
        if (result.audit_leaks == 0) != result.causal or (result.causal and result.leak_bits != 0)
    ]
    checks.append(
        Check(
            "the prefix audit finds exactly the routers that leak, and the others leak 0 bits",
            not wrong,
            f"not so for {'; '.join(wrong)}" if wrong else "in every seed",
        )
    )
    return checks


def cells(results: Sequence[Result]) -> list[str]:
    """The text of one row of the table: the same router with several seeds."""

    def spread(values: list[float], digits: int = 3, error: str = "") -> str:
        text = f"{statistics.mean(values):.{digits}f}{error}"
        return text if len(values) == 1 else f"{text} ({min(values):.{digits}f} - {max(values):.{digits}f})"

    mark = "" if results[0].causal else " noncausal"
    leak = "0"
    if any(result.leak_bits for result in results):
        error = statistics.mean(result.leak_error for result in results)
        leak = spread([result.leak_bits for result in results], 4, f" ± {error:.4f}")
    return [
        results[0].row,
        spread([result.train for result in results]) + mark,
        spread([result.training_router for result in results]) + mark,
        spread([result.threshold for result in results]),
        spread([result.token_choice for result in results]),
        leak,
        f"{sum(r.audit_leaks for r in results)} of {sum(r.audit_probes for r in results)}",
    ]


def rows_of(results: Sequence[Result]) -> list[list[Result]]:
    """The results by row, in the order of the table, each by rising seed."""
    by_row = [sorted((r for r in results if r.row == row), key=lambda r: r.seed) for row in ROWS]
    return [group for group in by_row if group]


def markdown(results: Sequence[Result], checks: Sequence[Check], settings: dict[str, Any]) -> str:
    """The table, the claims, and what they were measured with."""
    lines = ["# What expert choice leaks, and what it is worth without", ""]
    lines += [
        f"Seeds: {settings['seeds']}. Steps: {settings['steps']}, of {settings['tokens_per_step']:,} tokens. {NOTE}"
    ]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(group)) + " |" for group in rows_of(results)]
    lines += ["", *(f"- {'PASS' if each.passed else 'FAIL'}: {each.claim} ({each.detail})" for each in checks)]
    return "\n".join(lines) + "\n"
