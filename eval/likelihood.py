"""Held-out likelihood. Sums first, divisions last, in float64.

Every figure is causal unless it says otherwise: `mode="causal"` routes by thresholds (expert choice) and drops no
token. `mode="train_router"` measures the training router on the same text; where that router sees later tokens its
figure is no likelihood of anything and must never be reported as a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.batches import HeldoutBatch, document_numbers, heldout_windows
from data.corpus import Corpus
from data.sliding import sliding_windows
from eval.routing_recorder import RoutingRecorder
from moe.model import Transformer
from moe.routing import RoutingContext
from parallel.engine import Engine
from training.config import Config

Mode = Literal["causal", "train_router"]
MOST_ROWS = 16
LOGITS = 1 << 26  # logits of one forward pass at most, where one row does not need more: 256 MiB in fp32


class NothingToScore(ValueError):
    """No held-out token is left to score."""


class MixedWindows(NamedTuple):
    """Rows of any domains.

    Attributes:
        domains: each row's domain.
        token_BS: int64 inputs.
        label_BS: int64 labels, -100 at padding.
        valid_BS: bool, False at padding.
        document_BS: int64, each input's document in its domain, or None; see `HeldoutBatch`.
    """

    domains: list[str]
    token_BS: Tensor
    label_BS: Tensor
    valid_BS: Tensor
    document_BS: Tensor | None = None


@dataclass
class Likelihood:
    """Sums over tokens, and the ratios that are quoted.

    Attributes:
        nats: summed negative log-likelihood; inf if a token had probability 0.
        tokens: labels scored, end-of-document markers included.
        bytes: UTF-8 bytes that the labels stand for; a marker stands for none.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: Likelihood) -> Likelihood:
        return Likelihood(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood of a token."""
        return self.nats / _require_some(self.tokens, "tokens")

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode one byte of text: comparable between tokenizers."""
        return self.nats / math.log(2) / _require_some(self.bytes, "bytes of text")

    @property
    def perplexity(self) -> float:
        """exp(nats per token); inf where that overflows (from about 709 nats)."""
        try:
            return math.exp(self.nats_per_token)
        except OverflowError:
            return math.inf

    def values(self) -> dict[str, Any]:
        """As plain data; bits per byte are None where there is no text."""
        return {
            "nats": self.nats,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "bits_per_byte": self.bits_per_byte if self.bytes else None,
            "nats_per_token": self.nats_per_token,
        }


@dataclass
class Scores:
    """Likelihoods by domain, and over all of them.

    Attributes:
        domains: of the domains that have held-out tokens, in corpus order.
        documents: of each domain, the likelihood of each held-out document of which something was scored, by its
            number. The parts of a document that several windows hold are one document, and one that a limit on tokens
            cuts counts with what was scored of it. Empty where the rows do not say which documents they hold, and
            with `mode="train_router"`. In a job of several processes all of them have the same sums.
        skipped_rows: rows that were left out (only with `mode="train_router"`).
        skipped_tokens: labels in them.
    """

    domains: dict[str, Likelihood] = field(default_factory=dict)
    documents: dict[str, dict[int, Likelihood]] = field(default_factory=dict)
    skipped_rows: int = 0
    skipped_tokens: int = 0

    @property
    def total(self) -> Likelihood:
        """Sums over all domains: large domains count for more."""
        return sum(self.domains.values(), Likelihood())

    @property
    def nats_per_token(self) -> float:
        """Of all tokens together."""
        return self.total.nats_per_token

    @property
    def bits_per_byte(self) -> float:
        """Of all bytes together."""
        return self.total.bits_per_byte

    @property
    def mean_bits_per_byte(self) -> float:
        """Mean over domains of their bits per byte: every domain counts alike."""
        values = [likelihood.bits_per_byte for likelihood in self.domains.values()]
        return math.fsum(values) / _require_some(len(values), "domains")


def evaluate(
    model: Transformer | Engine,
    corpus: Corpus,
    config: Config,
    tokens: int | None = None,
    mode: Mode = "causal",
    recorder: RoutingRecorder | None = None,
    rows_as_in_training: bool | None = None,
    stride: int | None = None,
) -> Scores:
    """Score the held-out split of a run's corpus, in windows of the length the run was trained with.

    Args:
        model: of the run; in a job of several processes, which all call this, an engine.
        corpus: of the run.
        config: of the run: sequence length, and whether attention stays within documents.
        tokens: labels of each domain at most; None reads all.
        mode: "causal", the honest figure, or "train_router".
        recorder: shown every routing.
        rows_as_in_training: see `evaluate_windows`.
        stride: labels from one window to the next, for causal figures; see `data.sliding.sliding_windows`. None, as
            the length itself, takes windows that do not overlap.

    Raises:
        ValueError: there is nothing to score, a number is out of range, or the model's output is not a number.
    """
    length, rows = config.training.sequence_length, rows_of_a_pass(config)
    end_of_text = corpus.tokenizer.end_of_text if config.data.document_mask else None
    if stride is None or stride == length:
        batches = heldout_windows(corpus, length, rows, tokens)
    elif mode != "causal" or rows_as_in_training:
        raise ValueError(f"stride = {stride}: windows that overlap are for causal routing; leave stride out")
    else:
        batches = sliding_windows(corpus, length, stride, rows, tokens, within_documents=config.data.document_mask)
    return evaluate_windows(
        model, batches, corpus.tokenizer.token_bytes_V, end_of_text, mode, recorder, rows_as_in_training
    )


def rows_of_a_pass(config: Config) -> int:
    """Rows of the training length whose logits fit into one forward pass."""
    return max(1, min(MOST_ROWS, LOGITS // (config.training.sequence_length * config.model.vocabulary_size)))


def evaluate_windows(
    model: Transformer | Engine,
    batches: Iterable[HeldoutBatch],
    token_bytes_V: np.ndarray,
    end_of_text: int | None = None,
    mode: Mode = "causal",
    recorder: RoutingRecorder | None = None,
    rows_as_in_training: bool | None = None,
) -> Scores:
    """Score held-out windows with a model.

    The result does not depend on the batch size or on padding, except through floating-point rounding (a score within
    rounding of its cutoff may be routed otherwise). With `mode="train_router"` rows are mixed over domains and
    regrouped as the router needs them; rows that hold padding or do not fill a routing group are skipped and counted.

    Args:
        model: on any device.
        batches: rows of one domain each, such as `heldout_windows` yields.
        token_bytes_V: bytes of each id.
        end_of_text: id that starts a document, when attention is to stay within documents; None lets it cross them.
            Give what the model was trained with.
        mode: "causal", the honest figure, or "train_router".
        recorder: told which domains the rows have, and shown every routing.
        rows_as_in_training: take the rows that `mode="train_router"` takes, whichever the mode, so that both can be
            compared; None does so in that mode only.

    Raises:
        ValueError: there is nothing to score, or the model's output is not a number.
    """
    skipped = _Skipped()
    rows: Iterable[MixedWindows] = (_mixed(batch) for batch in batches)
    if mode == "train_router" if rows_as_in_training is None else rows_as_in_training:
        rows = _as_in_training(rows, model.moe_config.group_sequences if model.moe_config.is_moe else 1, skipped)

    def nats(windows: MixedWindows) -> np.ndarray:
        return model_nats(model, windows, end_of_text, mode, recorder)

    scores = score(rows, nats, token_bytes_V)
    scores.skipped_rows, scores.skipped_tokens = skipped.rows, skipped.tokens
    return scores


def score(
    rows: Iterable[MixedWindows | HeldoutBatch],
    nats: Callable[[MixedWindows], np.ndarray],
    token_bytes_V: np.ndarray,
) -> Scores:
    """Sum the negative log-likelihoods that `nats` gives, by domain.

    Args:
        rows: batches of rows.
        nats: float64 (B, S) negative log-likelihood of each label of a batch; what it gives where the label is -100
            does not count.
        token_bytes_V: bytes of each id.

    Raises:
        ValueError: there is nothing to score, or a value is not a number.
    """
    scores = Scores()
    for batch in rows:
        if not isinstance(batch, MixedWindows):
            batch = _mixed(batch)
        label_BS = batch.label_BS.numpy()
        kept_BS = label_BS >= 0
        if not kept_BS.any():
            continue
        nats_BS = np.where(kept_BS, nats(batch), 0.0)
        if np.isnan(nats_BS).any():
            raise ValueError(
                "the model's log-likelihood is not a number (nan): its parameters or activations have overflowed; "
                "evaluate an earlier checkpoint, and train with a lower learning rate"
            )
        byte_BS = np.where(kept_BS, np.asarray(token_bytes_V, dtype=np.int64)[np.maximum(label_BS, 0)], 0)
        for row, domain in enumerate(batch.domains):
            tokens = int(kept_BS[row].sum())
            if tokens:
                found = Likelihood(float(nats_BS[row].sum()), tokens, int(byte_BS[row].sum()))
                scores.domains[domain] = scores.domains.get(domain, Likelihood()) + found
                if batch.document_BS is not None:
                    kept_S, numbers_S = kept_BS[row], batch.document_BS[row].numpy()
                    sums = scores.documents.setdefault(domain, {})
                    _add_documents(sums, numbers_S[kept_S], nats_BS[row][kept_S], byte_BS[row][kept_S])
    if not scores.domains:
        raise NothingToScore("there is no held-out token to score: hold more text out, or skip fewer rows")
    return scores


@torch.no_grad()
def model_nats(
    model: Transformer | Engine,
    windows: MixedWindows,
    end_of_text: int | None = None,
    mode: Mode = "causal",
    recorder: RoutingRecorder | None = None,
) -> np.ndarray:
    """float64 (B, S) negative log-likelihood in nats of each label; 0 where the label is -100.

    Args:
        model: on any device.
        windows: the rows.
        end_of_text: see `evaluate_windows`.
        mode: see `evaluate_windows`.
        recorder: see `evaluate_windows`.
    """
    device = model.device
    token_BS, label_BS = windows.token_BS.to(device), windows.label_BS.to(device)
    # Without padding no mask is needed, which is quicker.
    valid_BS = None if bool(windows.valid_BS.all()) else windows.valid_BS.to(device)
    context = RoutingContext(len(token_BS), token_BS.shape[1], valid_BS=valid_BS, mode=mode)
    if recorder is not None:
        recorder.start(windows.domains)
        context.observe = recorder
    document_BS = None if end_of_text is None else document_numbers(token_BS, end_of_text)
    return model(token_BS, context, document_BS, label_BS=label_BS).double().cpu().numpy()


def _mixed(batch: HeldoutBatch) -> MixedWindows:
    return MixedWindows([batch.domain] * len(batch.token_BS), *batch[1:])


def _add_documents(sums: dict[int, Likelihood], number_N: np.ndarray, nats_N: np.ndarray, byte_N: np.ndarray) -> None:
    """Add a row's labels to the sums of their documents."""
    numbers_M, place_N = np.unique(number_N, return_inverse=True)
    nats_M, bytes_M = np.bincount(place_N, nats_N), np.bincount(place_N, byte_N)
    found = zip(numbers_M.tolist(), nats_M.tolist(), np.bincount(place_N).tolist(), bytes_M.tolist(), strict=True)
    for number, nats, tokens, text_bytes in found:
        sums[number] = sums.get(number, Likelihood()) + Likelihood(nats, tokens, int(text_bytes))


@dataclass
class _Skipped:
    rows: int = 0
    tokens: int = 0


def _as_in_training(rows: Iterable[MixedWindows], group_sequences: int, skipped: _Skipped) -> Iterator[MixedWindows]:
    """Batches of whole routing groups whose rows are mixed over domains, as training mixes them.

    A group of one domain only would make the experts of that domain full and the others idle, which the router never
    met in training.
    """
    domains: list[str] = []
    kept: list[MixedWindows] = []
    for batch in rows:
        whole_B = batch.valid_BS.all(1) & (batch.label_BS >= 0).all(1)
        partial_B = (batch.label_BS >= 0).any(1) & ~whole_B
        skipped.rows += int(partial_B.sum())
        skipped.tokens += int((batch.label_BS[partial_B] >= 0).sum())
        domains += [domain for domain, whole in zip(batch.domains, whole_B.tolist(), strict=True) if whole]
        kept.append(MixedWindows([], batch.token_BS[whole_B], batch.label_BS[whole_B], batch.valid_BS[whole_B]))
    if not domains:
        return
    token_RS, label_RS = torch.cat([k.token_BS for k in kept]), torch.cat([k.label_BS for k in kept])
    order_R = np.random.default_rng(0).permutation(len(domains))
    used = len(domains) // group_sequences * group_sequences
    skipped.rows += len(domains) - used
    skipped.tokens += int((label_RS[order_R[used:]] >= 0).sum())
    step = group_sequences * max(1, 8 // group_sequences)
    for first in range(0, used, step):
        index_B = order_R[first : min(first + step, used)]
        token_BS = token_RS[index_B]
        yield MixedWindows(
            [domains[row] for row in index_B], token_BS, label_RS[index_B], torch.ones_like(token_BS, dtype=torch.bool)
        )


def _require_some(count: int, what: str) -> int:
    if count == 0:
        raise ValueError(f"there are no {what} to divide by: hold more text out")
    return count
