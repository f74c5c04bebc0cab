"""Near-duplicates, removed before anything is held out.

A text that is in both splits makes the held-out loss a memory test, so the
near-copies must go first. Two documents are near-duplicates when the Jaccard
similarity of their sets of 8-word shingles is at least 0.8 (Broder 1997, "On
the resemblance and containment of documents"; the thresholds of Lee et al.
2022, "Deduplicating training data makes language models better"). MinHash with
banding proposes candidates; the exact similarity decides.

The first document of a group of near-duplicates is kept. Nothing is random, so
the same documents in the same order always give the same result. A document of
fewer than 8 words is one shingle: it is removed when the same words came before.
"""

import hashlib
import re
from collections.abc import Callable, Iterator

import numpy as np

SHINGLE_WORDS = 8
SIMILARITY = 0.8
BANDS = 16
ROWS_PER_BAND = 4
# A pair at similarity 0.8 becomes a candidate with probability
# 1 - (1 - 0.8**4)**16 = 0.9998, and an unrelated pair (0.1) with 0.002.

_PIECE_CHARACTERS = 1 << 20
_REMEMBERED_WORDS = 1 << 20
_WORD_END = re.compile(r"\s")


class Deduplicator:
    """Says of each document whether a near-duplicate came before it.

    Memory is 512 bytes for each document kept, besides one document's shingles;
    the texts themselves stay with the caller.
    """

    def __init__(self) -> None:
        self._word_hashes = _WordHashes()
        # For each band, its value in a document -> the keys of the documents that have it.
        self._documents_by_band: list[dict[int, list[int]]] = [{} for _ in range(BANDS)]
        multipliers = _mix(np.arange(1, BANDS * ROWS_PER_BAND + 1, dtype=np.uint64))
        self._multipliers = multipliers | np.uint64(1)  # odd: x -> a*x is a bijection

    def find_earlier_or_add(self, text: str, key: int, text_of_key: Callable[[int], str]) -> int | None:
        """Find an earlier near-duplicate of `text`, or else remember it under `key`.

        Args:
            text: the new document.
            key: the caller's number for it; earlier documents have smaller ones.
            text_of_key: gives the text remembered under a key, for the exact check.

        Returns:
            The smallest key of an earlier near-duplicate, or None if there is none.
        """
        shingles = self.shingles(text)
        values = self._band_values(shingles)
        bands = list(zip(self._documents_by_band, values, strict=True))
        candidates = {earlier for band, value in bands for earlier in band.get(value, ())}
        for earlier in sorted(candidates):
            if jaccard(shingles, self.shingles(text_of_key(earlier))) >= SIMILARITY:
                return earlier
        for band, value in bands:
            band.setdefault(value, []).append(key)
        return None

    def shingles(self, text: str) -> np.ndarray:
        """Give the sorted distinct 64-bit hashes of the 8-word shingles of `text`."""
        word_W = self._word_hashes.of(text)
        count = max(len(word_W) - SHINGLE_WORDS + 1, 1)
        shingle_W = np.zeros(count, dtype=np.uint64)
        for offset in range(min(SHINGLE_WORDS, len(word_W))):
            # Mixing between the words makes the hash depend on their order.
            shingle_W = _mix(shingle_W + word_W[offset : offset + count])
        return np.unique(shingle_W)

    def _band_values(self, shingles: np.ndarray) -> list[int]:
        minima = np.array([(shingles * a).min() for a in self._multipliers], dtype=np.uint64)
        value_B = np.zeros(BANDS, dtype=np.uint64)
        for row in minima.reshape(BANDS, ROWS_PER_BAND).T:
            value_B = _mix(value_B + row)
        return value_B.tolist()


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Give |A and B| / |A or B| of two sorted arrays of distinct hashes."""
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (len(first) + len(second) - common)


def _mix(value: np.ndarray) -> np.ndarray:
    """Scramble 64-bit values (the finaliser of splitmix64, a bijection)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class _WordHashes:
    """64-bit hashes of words, the same in every process (unlike Python's `hash`)."""

    def __init__(self) -> None:
        self._hash_of_word: dict[str, int] = {}

    def of(self, text: str) -> np.ndarray:
        parts = [np.array(self._hash_words(words), dtype=np.uint64) for words in _words(text)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)

    def _hash_words(self, words: list[str]) -> list[int]:
        known = self._hash_of_word
        if len(known) > _REMEMBERED_WORDS:
            known.clear()
        for word in set(words).difference(known):
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8)
            known[word] = int.from_bytes(digest.digest(), "little")
        return [known[word] for word in words]


def _words(text: str) -> Iterator[list[str]]:
    """Yield the words in lists of bounded size, so that a huge text needs little memory."""
    start = 0
    while start < len(text):
        end = start + _PIECE_CHARACTERS
        match = _WORD_END.search(text, end) if end < len(text) else None
        end = match.start() if match else len(text)
        words = text[start:end].split()
        if words:
            yield words
        start = end
