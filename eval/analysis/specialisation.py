"""Do experts keep to domains, ids or positions? Statistics of label counts for `counting.measure`.

Each takes float64 (M, E) pairs of each label and expert, and (M,) tokens of each label, and states its values for known
cases.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from eval.analysis.counting import Assignments, Measured, frequent, measure, octaves
from eval.analysis.tape import LayerTape, Tape
from eval.routing_metrics import mutual_information
from training.load_metrics import entropy

LEAST_OCCURRENCES = 10  # an id that occurs once has one "modal expert" for all its tokens, and says nothing
LEAST_DOCUMENTS = 5
VOCABULARIES = {"input id": "token_T", "target id": "label_T", "predicted id": "predicted_T"}


def information(counts_ME: np.ndarray, tokens_M: np.ndarray) -> float:
    """Bits that the label of an assignment tells about its expert: 0 when independent, at most log2 min(M, E)."""
    return mutual_information(counts_ME)


def modal_share(counts_ME: np.ndarray, tokens_M: np.ndarray) -> float:
    """Share of a label's tokens that its commonest expert takes, averaged over labels with tokens.

    Vocabulary specialisation (Muennighoff et al. 2024, OLMoE, section 5.4).
    1 when every label has an expert that takes all its tokens (a hash router); k/E, plus what small counts add, when
    experts do not look at it. Every label counts alike, so leave out rare ones (`counting.frequent`).
    """
    used_M = tokens_M > 0
    return float((counts_ME[used_M].max(1) / tokens_M[used_M]).mean()) if used_M.any() else math.nan


def mean_divergence(counts_ME: np.ndarray, tokens_M: np.ndarray) -> float:
    """Jensen-Shannon divergence, in bits, between the loads of two labels, averaged over pairs of labels.

    0 when all load the experts alike, 1 when no two share an expert.
    """
    share_ME = counts_ME[counts_ME.sum(1) > 0]
    share_ME = share_ME / share_ME.sum(1, keepdims=True)
    pairs = [entropy((p_E + q_E) / 2) - (entropy(p_E) + entropy(q_E)) / 2 for p_E, q_E in combinations(share_ME, 2)]
    return math.fsum(pairs) / len(pairs) / math.log(2) if pairs else math.nan


def units(tape: Tape) -> tuple[np.ndarray, str]:
    """(unit_T, its name): documents where every domain has at least five of them, else rows.

    Rows of one document resemble each other, so that intervals and nulls over rows are too narrow where documents are
    long; with one or two documents of a domain there would be no interval at all.
    """
    of_domain = [np.unique(tape.document_T[tape.domain_T == d]).size for d in np.unique(tape.domain_T)]
    if of_domain and min(of_domain) >= LEAST_DOCUMENTS:
        # A document belongs to one domain; a row may hold several documents.
        return tape.document_T, "documents"
    return tape.row_T, "rows"


def domain(tape: Tape, layer: LayerTape) -> Measured:
    """Information between domain and expert; its null deals domains to whole units."""
    unit_T, _ = units(tape)
    label_T = tape.domain_T.astype(np.int64)
    assignments = Assignments.of(layer.assigned_TE)
    return measure(information, label_T, assignments, unit_T, octaves(tape.token_T), deal_units=True)


def domain_divergence(tape: Tape, layer: LayerTape) -> Measured:
    """Mean divergence between domains; its null deals domains to whole units."""
    unit_T, _ = units(tape)
    label_T = tape.domain_T.astype(np.int64)
    assignments = Assignments.of(layer.assigned_TE)
    return measure(mean_divergence, label_T, assignments, unit_T, octaves(tape.token_T), deal_units=True)


def vocabulary(tape: Tape, layer: LayerTape, which: str) -> Measured:
    """Modal share of ids with at least ten occurrences.

    Args:
        tape: of a run.
        layer: one of its layers.
        which: "input id", "target id" or "predicted id".
    """
    label_T = frequent(getattr(tape, VOCABULARIES[which]), LEAST_OCCURRENCES)
    return measure(modal_share, label_T, Assignments.of(layer.assigned_TE), units(tape)[0], octaves(tape.token_T))


def position(tape: Tape, layer: LayerTape) -> Measured:
    """Information between expert and how far the model can look back, in octaves (see `position_octave`)."""
    label_T = position_octave(tape.position_T)
    return measure(information, label_T, Assignments.of(layer.assigned_TE), units(tape)[0], octaves(tape.token_T))


def position_octave(position_T: np.ndarray) -> np.ndarray:
    """0 at a document's (or window's) first token, then 1, 2 (2-3), 3 (4-7), ..."""
    return np.where(position_T > 0, np.log2(np.maximum(position_T, 1)).astype(np.int64) + 1, 0)
