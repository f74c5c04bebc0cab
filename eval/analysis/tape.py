"""One pass over held-out text that keeps what analyses need.

Packed, so that a large model fits: for T tokens, L mixture layers, E experts and k experts a token about
T (30 + L (ceil(E/8) + 4k + 2)) bytes. 100,000 tokens of 16 layers with 64 experts, 8 a token, take 70 MB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from data.batches import document_numbers, heldout_windows
from data.corpus import Corpus
from eval.likelihood import rows_of_a_pass
from moe.model import Transformer, token_losses
from moe.routing import Routing, RoutingContext
from training.config import Config

NO_EXPERT = -1
TOKENS = 16_384  # of each domain, where nothing else is said


@dataclass(frozen=True)
class LayerTape:
    """What one layer's router did.

    Attributes:
        layer: number of the transformer block.
        num_experts: E.
        packed_TB: uint8 (T, ceil(E/8)), bits of `assigned_TE`.
        weight_A: fp32 combine weight of each assignment, in order of tokens, then experts.
        top_T: int16, the expert with the largest combine weight (the first of equal ones); -1 without expert.
    """

    layer: int
    num_experts: int
    packed_TB: np.ndarray
    weight_A: np.ndarray
    top_T: np.ndarray

    @property
    def assigned_TE(self) -> np.ndarray:
        """bool (T, E): who took which token."""
        return np.unpackbits(self.packed_TB, axis=1, count=self.num_experts).astype(bool)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.packed_TB.nbytes + self.weight_A.nbytes + self.top_T.nbytes


@dataclass(frozen=True)
class Tape:
    """What a model did with T held-out tokens under causal routing; padding is left out.

    Attributes:
        domains: names.
        token_T, label_T, predicted_T: int32 ids: the input, the one that follows, the likeliest one.
        domain_T: int16, position in `domains`.
        row_T: int32, window the token stands in, numbered over all domains.
        document_T: int32, held-out document the token belongs to, numbered over all domains.
        position_T: int32, tokens of its document that precede it in its window: what the model can look back on.
        loss_T: fp32 nats of the label.
        layers: one each for the blocks with a router.
    """

    domains: tuple[str, ...]
    token_T: np.ndarray
    label_T: np.ndarray
    predicted_T: np.ndarray
    domain_T: np.ndarray
    row_T: np.ndarray
    document_T: np.ndarray
    position_T: np.ndarray
    loss_T: np.ndarray
    layers: tuple[LayerTape, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_T)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        columns = (self.token_T, self.label_T, self.predicted_T, self.domain_T, self.row_T, self.document_T)
        return sum(c.nbytes for c in (*columns, self.position_T, self.loss_T)) + sum(x.nbytes for x in self.layers)


def planned_bytes(tokens: int, layers: int, experts: int, experts_per_token: float) -> int:
    """What a tape of so many tokens takes, where a token has `experts_per_token` experts on average."""
    columns = 6 * 4 + 4 + 2  # six int32, one fp32, one int16
    return round(tokens * (columns + layers * (math.ceil(experts / 8) + 4 * experts_per_token + 2)))


def record(model: Transformer, corpus: Corpus, config: Config, tokens: int = TOKENS) -> Tape:
    """Run a model over held-out text under causal routing, and keep what its routers did.

    Args:
        model: of the run, on any device.
        corpus: of the run.
        config: of the run: window length, and whether attention stays within documents.
        tokens: labels of each domain at most.

    Raises:
        DataError: nothing is held out, or `tokens` is below 1.
    """
    length, rows = config.training.sequence_length, rows_of_a_pass(config)
    end_of_text = corpus.tokenizer.end_of_text
    layer_recorder = _LayerRecorder({layer.index: model.moe_config.num_experts for layer in model.moe_layers()})
    # Documents and rows are numbered over all domains.
    starts = np.cumsum([0, *(len(corpus.document_starts("heldout", domain)) for domain in corpus.domains)])
    windows = 0
    columns: list[tuple[np.ndarray, ...]] = []
    for batch in heldout_windows(corpus, length, rows, tokens):
        valid_BS = None if bool(batch.valid_BS.all()) else batch.valid_BS.to(model.device)
        context = RoutingContext(rows, length, valid_BS=valid_BS, observe=layer_recorder)
        token_BS, label_BS = batch.token_BS.to(model.device), batch.label_BS.to(model.device)
        document_BS = document_numbers(token_BS, end_of_text) if config.data.document_mask else None
        with torch.no_grad():
            logits_BSV = model(token_BS, context, document_BS)
            loss_BS = token_losses(logits_BSV, label_BS)
        used_BS = batch.valid_BS.numpy()
        assert batch.document_BS is not None
        domain = corpus.domains.index(batch.domain)
        row_BS = np.broadcast_to(np.arange(windows, windows + rows, dtype=np.int32)[:, None], used_BS.shape)
        windows += int(used_BS.any(1).sum())
        columns.append(
            (
                batch.token_BS.numpy()[used_BS].astype(np.int32),
                batch.label_BS.numpy()[used_BS].astype(np.int32),
                logits_BSV.argmax(-1).cpu().numpy()[used_BS].astype(np.int32),
                np.full(int(used_BS.sum()), domain, np.int16),
                row_BS[used_BS],
                (starts[domain] + batch.document_BS.numpy()[used_BS]).astype(np.int32),
                _positions(batch.token_BS.numpy(), end_of_text, config.data.document_mask)[used_BS],
                loss_BS.float().cpu().numpy()[used_BS],
            )
        )
    token_T, label_T, predicted_T, domain_T, row_T, document_T, position_T, loss_T = map(
        np.concatenate, zip(*columns, strict=True)
    )
    return Tape(
        tuple(corpus.domains),
        token_T,
        label_T,
        predicted_T,
        domain_T,
        row_T,
        document_T,
        position_T,
        loss_T,
        layer_recorder.tapes(),
    )


class _LayerRecorder:
    """A `RoutingContext.observe`."""

    def __init__(self, experts: dict[int, int]) -> None:
        self._experts = experts
        self._parts: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {layer: [] for layer in experts}

    def __call__(self, layer: int, routing: Routing) -> None:
        assigned_TE = routing.assigned_TE().cpu().numpy()
        # A router without weights gives each expert's output as it is: weight 1.
        weight_TE = assigned_TE.astype(np.float32) if routing.weight_A is None else routing.weight_TE().cpu().numpy()
        if routing.valid_T is not None:
            used_T = routing.valid_T.cpu().numpy()
            assigned_TE, weight_TE = assigned_TE[used_T], weight_TE[used_T]
        self._parts[layer].append(
            (np.packbits(assigned_TE, axis=1), weight_TE[assigned_TE].astype(np.float32), top(assigned_TE, weight_TE))
        )

    def tapes(self) -> tuple[LayerTape, ...]:
        return tuple(
            LayerTape(layer, self._experts[layer], *map(np.concatenate, zip(*parts, strict=True)))
            for layer, parts in self._parts.items()
        )


def top(assigned_TE: np.ndarray, weight_TE: np.ndarray) -> np.ndarray:
    """int16 (T,): the assigned expert with the largest weight, the first of equal ones; -1 for a token without any."""
    top_T = np.where(assigned_TE, weight_TE, -np.inf).argmax(1)
    return np.where(assigned_TE.any(1), top_T, NO_EXPERT).astype(np.int16)


def _positions(token_BS: np.ndarray, end_of_text: int, within_documents: bool) -> np.ndarray:
    """int32 (B, S): tokens before each one that the model can look back on."""
    place_BS = np.broadcast_to(np.arange(token_BS.shape[1], dtype=np.int32), token_BS.shape)
    if not within_documents:
        return place_BS
    start_BS = np.where(token_BS == end_of_text, place_BS, 0)
    return place_BS - np.maximum.accumulate(start_BS, axis=1)
