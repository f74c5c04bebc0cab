"""Does a token's id alone decide its experts, or does its context?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eval.analysis.counting import Assignments, Measured, Statistic, frequent, label_counts, measure, octaves
from eval.analysis.specialisation import LEAST_OCCURRENCES, units
from eval.analysis.tape import LayerTape, Tape
from training.load_metrics import entropy


def explained_decisions(counts_ME: np.ndarray, tokens_M: np.ndarray) -> float:
    """How much of all the yes-or-no decisions the id explains.

    sum_e I(b_e; id) / sum_e H(b_e), where b_e says whether expert e takes a token.
    1 when the id decides (a hash router, for any number of experts a token); 0, plus what small counts add, when the
    id does not matter.
    """
    tokens = tokens_M.sum()
    if not tokens:
        return math.nan
    whole = float(_binary_entropy(counts_ME.sum(0) / tokens).sum())
    used_M = tokens_M > 0
    share_ME = counts_ME[used_M] / tokens_M[used_M, None]
    left = float((_binary_entropy(share_ME).sum(1) * tokens_M[used_M]).sum() / tokens)
    return 1 - left / whole if whole > 0 else math.nan


def explained_first(counts_ME: np.ndarray, tokens_M: np.ndarray) -> float:
    """I(e; id) / H(e) of each token's first expert: 1 when the id decides it, 0 (plus bias) when it does not matter."""
    total = counts_ME.sum()
    if not total:
        return math.nan
    joint_ME = counts_ME / total
    whole = entropy(joint_ME.sum(0))
    return (whole + entropy(joint_ME.sum(1)) - entropy(joint_ME)) / whole if whole > 0 else math.nan


def corrected(found: Measured) -> float:
    """(value - null mean) / (1 - null mean): 0 at the shuffled null, 1 when the id decides."""
    return (found.value - found.null_mean) / (1 - found.null_mean) if found.null_mean < 1 else math.nan


def decisions(tape: Tape, layer: LayerTape) -> Measured:
    """`explained_decisions` over ids with at least ten occurrences."""
    return _measured(explained_decisions, tape, Assignments.of(layer.assigned_TE))


def first(tape: Tape, layer: LayerTape) -> Measured:
    """`explained_first` over ids with at least ten occurrences."""
    return _measured(explained_first, tape, Assignments.of_top(layer.top_T, layer.num_experts))


@dataclass(frozen=True)
class TableAccuracy:
    """How well a table from ids to experts guesses on other text.

    Attributes:
        accuracy: share of tokens whose first expert is the one that is commonest for their id in the other half.
        base_rate: the same of one guess for all tokens: the commonest expert.
        covered: share of the scored half's tokens whose id has at least ten tokens in the other half; only these count.
        tokens: counted.
    """

    accuracy: float
    base_rate: float
    covered: float
    tokens: int


def table_accuracy(
    token_T: np.ndarray, top_T: np.ndarray, num_experts: int, unit_T: np.ndarray, least: int = LEAST_OCCURRENCES
) -> TableAccuracy:
    """Fit an id-to-expert table on every other unit and score it on the rest. A hash router gives 1.

    Args:
        token_T: input ids.
        top_T: each token's first expert; tokens without one (-1) do not count.
        num_experts: E.
        unit_T: documents or rows: never split.
        least: tokens of an id that the table needs.
    """
    has_T = top_T >= 0
    fitted_T = np.unique(unit_T, return_inverse=True)[1] % 2 == 0
    known, scored = has_T & fitted_T, has_T & ~fitted_T
    if not known.any() or not scored.any():
        return TableAccuracy(math.nan, math.nan, math.nan, 0)
    ids = int(token_T.max()) + 1
    counts_VE, count_V = label_counts(
        np.where(known, token_T, -1), Assignments.of_top(np.where(known, top_T, -1), num_experts), ids
    )
    covered = scored & (count_V[token_T] >= least)
    if not covered.any():
        return TableAccuracy(math.nan, math.nan, 0.0, 0)
    right_T = counts_VE.argmax(1)[token_T] == top_T
    return TableAccuracy(
        float(right_T[covered].mean()),
        float((top_T[covered] == counts_VE.sum(0).argmax()).mean()),
        float(covered.sum() / scored.sum()),
        int(covered.sum()),
    )


def _measured(statistic: Statistic, tape: Tape, assignments: Assignments) -> Measured:
    label_T = frequent(tape.token_T, LEAST_OCCURRENCES)
    return measure(statistic, label_T, assignments, units(tape)[0], octaves(tape.token_T))


def _binary_entropy(p_X: np.ndarray) -> np.ndarray:
    """Nats of a yes-or-no choice; 0 at 0 and 1."""
    p_X = np.clip(p_X, 0.0, 1.0)
    inner_X = np.clip(p_X, 1e-300, 1.0)
    outer_X = np.clip(1 - p_X, 1e-300, 1.0)
    return -(p_X * np.log(inner_X) + (1 - p_X) * np.log(outer_X))
