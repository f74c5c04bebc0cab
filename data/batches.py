"""Steps to tensors: training batches, and the windows of the held-out split.

A row is a window of S+1 tokens of one domain: the first S are inputs and the
last S are labels. Consecutive windows of a domain share one token, so each
token but the domain's first is a label once in a pass (a last part shorter than
a window is left out of training; it is in the held-out windows).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from data.errors import DataError
from data.order import Location, SampleOrder

IGNORED_LABEL = -100  # what torch's cross-entropy ignores by default


class Batch(NamedTuple):
    """Rows of one step's global batch.

    Attributes:
        token_BS: int64 inputs.
        label_BS: int64, the token after each input.
        domain_B: int64, each row's position in `corpus.domains`.
        valid_BS: bool, False at padding; None where there is none, as in all that `Batches` reads.
    """

    token_BS: Tensor
    label_BS: Tensor
    domain_B: Tensor
    valid_BS: Tensor | None = None


class HeldoutBatch(NamedTuple):
    """Rows of one domain's held-out tokens, in order.

    Attributes:
        domain: its name.
        token_BS: int64 inputs; padding is the end-of-text id.
        label_BS: int64 labels; padding is -100.
        valid_BS: bool, False on padding.
        document_BS: int64, the number of each input's document in the domain's held-out file, -1 on padding; None
            where the rows come from no corpus. A label belongs to the document of its input: it continues or ends it.
    """

    domain: str
    token_BS: Tensor
    label_BS: Tensor
    valid_BS: Tensor
    document_BS: Tensor | None = None


class Window(NamedTuple):
    """One row, as positions in a domain's held-out tokens.

    Attributes:
        start: first input.
        scored: first input whose label is scored.
        end: after the last input.
    """

    start: int
    scored: int
    end: int


class Batches:
    """The global batch of every step, as a function of (seed, step).

    Any process can read any rows of any step, so data-parallel ranks read only
    their own, and a resumed run of another layout goes on with the same samples.

    Attributes:
        domain_counts: samples of each domain in every 1,024 consecutive samples
            that start at a multiple of 1,024.
        windows_per_domain: windows of each domain in one pass over it.
    """

    domain_counts: dict[str, int]
    windows_per_domain: dict[str, int]

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        batch_sequences: int,
        seed: int,
        mixture_exponent: float = 0.5,
        row_order: Literal["mixed", "domain"] = "mixed",
    ) -> None:
        """Plan the batches.

        Args:
            corpus: an open corpus; its train split is read.
            sequence_length: S, tokens in a row.
            batch_sequences: rows of a global batch.
            seed: of the order, an integer >= 0.
            mixture_exponent: a domain is drawn in proportion to tokens ** exponent:
                1 is by size, 0 is equally often.
            row_order: "mixed" as drawn; "domain" puts the rows of one domain beside
                each other. A step has the same rows in either order.

        Raises:
            DataError: the corpus is too small, or an argument is out of range.
        """
        _require_positive("sequence_length", sequence_length)
        _require_positive("batch_sequences", batch_sequences)
        if not 0 <= mixture_exponent <= 10:
            raise DataError(f"mixture_exponent is {mixture_exponent}; allowed are 0 to 10")
        if row_order not in ("mixed", "domain"):
            raise DataError(f'row_order is {row_order!r}; allowed are "mixed" and "domain"')
        self.sequence_length = sequence_length
        self.batch_sequences = batch_sequences
        self._row_order = row_order
        self._vocabulary_size = corpus.vocabulary_size
        self._tokens = [corpus.tokens("train", domain) for domain in corpus.domains]
        windows = [_windows(token_N, sequence_length) for token_N in self._tokens]
        _require_enough(corpus, windows, sequence_length, batch_sequences)
        weights = [float(len(token_N)) ** mixture_exponent for token_N in self._tokens]
        self._order = SampleOrder(windows, weights, seed)
        self.domain_counts = dict(zip(corpus.domains, self._order.block_counts, strict=True))
        self.windows_per_domain = dict(zip(corpus.domains, windows, strict=True))

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> Batch:
        """Read rows [start, stop) of the global batch of `step`.

        Args:
            step: 0 and up; steps never run out, the data are passed over again.
            start: first row.
            stop: row after the last; None is `batch_sequences`.

        Raises:
            DataError: rows outside the batch, or a negative step.
        """
        stop = self.batch_sequences if stop is None else stop
        if not 0 <= start <= stop <= self.batch_sequences:
            raise DataError(f"rows [{start}, {stop}) were asked for; a batch has rows [0, {self.batch_sequences})")
        if step < 0:
            raise DataError(f"the step is {step}; allowed are 0 and up")
        window_BS = np.empty((stop - start, self.sequence_length + 1), dtype=np.int64)
        domain_B = np.empty(stop - start, dtype=np.int64)
        for row, (domain, window) in enumerate(self._locations(step, start, stop)):
            first = window * self.sequence_length
            window_BS[row] = self._tokens[domain][first : first + self.sequence_length + 1]
            domain_B[row] = domain
        if window_BS.max(initial=0) >= self._vocabulary_size:
            raise DataError(
                f"step {step} holds the token id {window_BS.max()}, outside the vocabulary of {self._vocabulary_size}: "
                "a token file is damaged; build the corpus again"
            )
        # Contiguous copies: a view of S of S+1 columns could not be reshaped to T.
        return Batch(
            torch.from_numpy(window_BS[:, :-1].copy()),
            torch.from_numpy(window_BS[:, 1:].copy()),
            torch.from_numpy(domain_B),
        )

    def windows_before(self, step: int) -> list[set[int]]:
        """Give the windows of each domain that the steps before `step` read; window w starts at token w * S."""
        used: list[set[int]] = [set() for _ in self._tokens]
        for sample in range(step * self.batch_sequences):
            domain, window = self._order.locate(sample)
            used[domain].add(window)
        return used

    def _locations(self, step: int, start: int, stop: int) -> list[Location]:
        """Where rows [start, stop) of a step are read."""
        first = step * self.batch_sequences
        if self._row_order == "mixed":
            return [self._order.locate(first + row) for row in range(start, stop)]
        # Every process sorts the whole step, so that each finds its own part of one order.
        every = [self._order.locate(first + row) for row in range(self.batch_sequences)]
        return sorted(every, key=lambda location: location.domain)[start:stop]

    def passes(self, step: int) -> dict[str, float]:
        """Give how often each domain has been passed over before `step` (exact to a block)."""
        blocks = step * self.batch_sequences / sum(self.domain_counts.values())
        return {
            domain: blocks * count / max(self.windows_per_domain[domain], 1)
            for domain, count in self.domain_counts.items()
        }


def heldout_windows(
    corpus: Corpus,
    sequence_length: int,
    batch_sequences: int = 8,
    max_tokens: int | None = None,
) -> Iterator[HeldoutBatch]:
    """Yield the held-out split domain by domain, always in the same order.

    Each held-out token is a label exactly once: each text token is predicted from
    what precedes it in its document, and each marker from the document that it
    ends. (The domain's first marker ends nothing; the marker after its last
    document is a label in its place.) All batches have the same shape: the last
    ones of a domain are padded, with whole rows where needed.

    Args:
        corpus: an open corpus.
        sequence_length: S.
        batch_sequences: B, the rows of every batch.
        max_tokens: about so many labels of each domain, in whole windows spread evenly over
            its held-out text; None reads all.

    Raises:
        DataError: an argument is not positive, or the corpus holds nothing out.
    """
    require_heldout(corpus, sequence_length, batch_sequences, max_tokens)
    return _heldout_windows(corpus, sequence_length, batch_sequences, max_tokens)


def require_heldout(corpus: Corpus, sequence_length: int, batch_sequences: int, max_tokens: int | None) -> None:
    """Refuse numbers out of range, and a corpus that holds nothing out.

    Raises:
        DataError: says which, and what is allowed.
    """
    _require_positive("sequence_length", sequence_length)
    _require_positive("batch_sequences", batch_sequences)
    if max_tokens is not None:
        _require_positive("max_tokens", max_tokens)
    if not any(len(corpus.tokens("heldout", domain)) for domain in corpus.domains):
        raise DataError(f"{corpus.folder} holds nothing out; build it with --heldout-fraction above 0")


def _heldout_windows(
    corpus: Corpus, sequence_length: int, batch_sequences: int, max_tokens: int | None
) -> Iterator[HeldoutBatch]:
    for domain in corpus.domains:
        tokens = len(corpus.tokens("heldout", domain))
        starts = (window * sequence_length for window in spread_windows(tokens, sequence_length, max_tokens))
        windows = [Window(start, start, min(tokens, start + sequence_length)) for start in starts]
        yield from window_batches(corpus, domain, windows, sequence_length, batch_sequences)


def window_batches(
    corpus: Corpus, domain: str, windows: Sequence[Window], sequence_length: int, batch_sequences: int
) -> Iterator[HeldoutBatch]:
    """Read windows of a domain's held-out tokens, in batches of equal shape."""
    end_of_text = corpus.tokenizer.end_of_text
    token_N = corpus.tokens("heldout", domain)
    document_N = (token_N == end_of_text).cumsum() - 1  # each document starts with its marker
    # The last label is the marker after all documents.
    label_N = np.append(token_N[1:], token_N.dtype.type(end_of_text))
    for first in range(0, len(windows), batch_sequences):
        token_BS = np.full((batch_sequences, sequence_length), end_of_text, dtype=np.int64)
        label_BS = np.full_like(token_BS, IGNORED_LABEL)
        document_BS = np.full_like(token_BS, -1)
        valid_BS = np.zeros_like(token_BS, dtype=bool)
        for row, (start, scored, end) in enumerate(windows[first : first + batch_sequences]):
            inputs = slice(0, end - start)
            token_BS[row, inputs] = token_N[start:end]
            label_BS[row, scored - start : inputs.stop] = label_N[scored:end]
            document_BS[row, inputs] = document_N[start:end]
            valid_BS[row, inputs] = True
        yield HeldoutBatch(domain, *map(torch.from_numpy, (token_BS, label_BS, valid_BS, document_BS)))


def spread_windows(tokens: int, length: int, max_tokens: int | None) -> list[int]:
    """Which of a domain's windows are scored, where at most about `max_tokens` labels are to be."""
    windows = -(-tokens // length)
    wanted = windows if max_tokens is None else min(windows, -(-max_tokens // length))
    # Spread over the split: its first windows might be one long document.
    return [index * windows // wanted for index in range(wanted)]


def neighbouring_windows(windows: Iterable[int]) -> list[tuple[int, int]]:
    """Join windows that follow each other, given in rising order: [first, last + 1) of each stretch."""
    stretches: list[tuple[int, int]] = []
    for window in windows:
        joins = stretches and stretches[-1][1] == window
        first = stretches.pop()[0] if joins else window
        stretches.append((first, window + 1))
    return stretches


def document_numbers(token_BS: Tensor, end_of_text: int) -> Tensor:
    """Number the documents in each row: int64 (B, S), the markers met so far.

    A marker starts its document, so it already has the new number; what precedes
    the row's first marker has number 0. Attention between tokens of equal number
    stays within a document.
    """
    return (token_BS == end_of_text).cumsum(dim=1)


def _windows(token_N: np.ndarray, sequence_length: int) -> int:
    return max(len(token_N) - 1, 0) // sequence_length


def _require_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{name} is {value!r}; allowed are integers >= 1")


def _require_enough(corpus: Corpus, windows: list[int], sequence_length: int, batch_sequences: int) -> None:
    for domain, count in zip(corpus.domains, windows, strict=True):
        if count == 0:
            raise DataError(
                f'the domain "{domain}" has {len(corpus.tokens("train", domain)):,} training '
                f"tokens, fewer than one window of {sequence_length + 1:,}; shorten the sequence, "
                "add text, or leave the domain out"
            )
    if sum(windows) < batch_sequences:
        raise DataError(
            f"the corpus has {sum(windows):,} windows of {sequence_length + 1:,} tokens, fewer "
            f"than one batch of {batch_sequences:,}; use a smaller batch, a shorter sequence, or "
            "more text"
        )
