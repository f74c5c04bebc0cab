"""Log-likelihoods of continuations given contexts, under causal routing. One function for score and harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eval.likelihood import LOGITS
from eval.ngram import Bigram, Unigram
from eval.tasks.encoding import Pair, Piece, pieces
from moe.model import Transformer
from moe.routing import RoutingContext

ROWS = 32  # of one forward pass at most
Row = tuple[tuple[int, ...], int]  # its ids, and how many of the last ones are labels
Scorer = Callable[[Sequence[Pair]], list["Scored"]]


@dataclass
class Scored:
    """A continuation's likelihood.

    Attributes:
        nats: summed negative log-likelihood of its tokens; inf if one had probability 0.
        tokens: of the continuation.
        bytes: UTF-8 bytes that these stand for, white space moved from the context included.
        greedy: each of its tokens was the most probable one.
        lost: tokens of the context that were cut off on the left.
        pieces: rows it took; more than one where the continuation is longer than the model's rows.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    greedy: bool = True
    lost: int = 0
    pieces: int = 0


def model_scorer(
    model: Transformer,
    length: int,
    token_bytes_V: np.ndarray,
    rows: int = ROWS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Scorer:
    """What scores pairs with a model.

    Rows of similar length share a forward pass, padded on the right: padding is neither attended to nor routed, and
    causal routing looks at one token only, so that a score does not depend on its neighbours, except through rounding.

    Args:
        model: any router; on any device.
        length: inputs of a row at most: what the run was trained on. See `pieces`.
        token_bytes_V: bytes of each id.
        rows: of one forward pass at most.
        progress: told how many rows of how many are done.

    Returns:
        A function of pairs to their scores, in order. It raises a ValueError where the model gives nan.
    """
    widest = max(1, LOGITS // model.config.vocabulary_size)

    @torch.no_grad()
    def score(pairs: Sequence[Pair]) -> list[Scored]:
        found = [Scored() for _ in pairs]
        # Equal rows are scored once: that saves work, and they tie exactly, whatever batch they would have been in.
        places: dict[Row, list[int]] = {}
        for place, pair in enumerate(pairs):
            cut = pieces(pair.context, pair.continuation, length)
            scored = found[place]
            scored.tokens, scored.pieces = len(pair.continuation), len(cut)
            scored.bytes = int(np.asarray(token_bytes_V, dtype=np.int64)[pair.continuation].sum())
            scored.lost = len(pair.context) - (len(cut[0].inputs) - len(cut[0].labels) + 1)
            for piece in cut:
                places.setdefault((tuple(piece.inputs + piece.labels[-1:]), len(piece.labels)), []).append(place)
        # The longest first: too little memory shows at once.
        queue = sorted(places, key=lambda row: -len(row[0]))
        done = 0
        for batch in _batches(queue, rows, widest):
            cut = [Piece(list(ids[:-1]), list(ids[-count:])) for ids, count in batch]
            for row, (nats, greedy) in zip(batch, _forward(model, cut), strict=True):
                for place in places[row]:
                    found[place].nats += nats
                    found[place].greedy &= greedy
            done += len(batch)
            progress(done, len(queue))
        return found

    return score


def ngram_scorer(baseline: Unigram | Bigram, token_bytes_V: np.ndarray) -> Scorer:
    """What scores pairs with a count model, which reads one token of context, or none. `greedy` is False throughout."""

    def score(pairs: Sequence[Pair]) -> list[Scored]:
        found = []
        for context, continuation, _ in pairs:
            nats_1S = baseline.nats(np.array([[context[-1], *continuation[:-1]]]), np.array([continuation]))
            count = int(np.asarray(token_bytes_V, dtype=np.int64)[continuation].sum())
            found.append(Scored(float(nats_1S.sum()), len(continuation), count, greedy=False, pieces=1))
        return found

    return score


def _batches(queue: list[Row], rows: int, widest: int) -> Iterator[list[Row]]:
    """Rows that follow each other, as many as have at most `widest` positions together."""
    first = 0
    while first < len(queue):
        count = max(1, min(rows, widest // (len(queue[first][0]) - 1)))
        yield queue[first : first + count]
        first += count


def _forward(model: Transformer, batch: list[Piece]) -> list[tuple[float, bool]]:
    """(nats, greedy) of each row's labels."""
    length = max(len(piece.inputs) for piece in batch)
    token_BS = torch.zeros(len(batch), length, dtype=torch.int64)
    label_BS = torch.full_like(token_BS, -100)
    valid_BS = torch.zeros_like(token_BS, dtype=torch.bool)
    for row, (inputs, labels) in enumerate(batch):
        end = len(inputs)
        token_BS[row, :end] = torch.tensor(inputs)
        label_BS[row, end - len(labels) : end] = torch.tensor(labels)
        valid_BS[row, :end] = True
    device = model.device
    context = RoutingContext(len(batch), length, None if valid_BS.all() else valid_BS.to(device), mode="causal")
    label_BS = label_BS.to(device)
    scored_BS = label_BS >= 0
    logits_TV: Tensor = model(token_BS.to(device), context)[scored_BS].float()
    label_T = label_BS[scored_BS]
    # As in `moe.model.token_losses`: the loss that training and held-out evaluation report.
    nats_T = F.cross_entropy(logits_TV, label_T, reduction="none").double().cpu()
    greedy_T = (logits_TV.argmax(-1) == label_T).cpu()
    if nats_T.isnan().any():
        raise ValueError(
            "the model's log-likelihood is not a number (nan): its parameters or activations have overflowed; "
            "evaluate an earlier checkpoint, and train with a lower learning rate"
        )
    found, first = [], 0
    for _, labels in batch:
        here = slice(first, first + len(labels))
        found.append((float(nats_T[here].sum()), bool(greedy_T[here].all())))
        first += len(labels)
    return found
