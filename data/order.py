"""The order of training: sample index -> (domain, window), a pure function.

There is no state but the integer: any rank of any layout, before and after a
resume, finds the same sample under the same index. No table grows with the data
either, so a trillion tokens cost no more memory than a thousand: the windows are
shuffled by a keyed permutation that is computed one value at a time. Nothing
depends on a library's random generator, whose streams may change between
versions.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.errors import DataError

BLOCK_SAMPLES = 1024
_REMEMBERED_BLOCKS = 16
_ROUNDS = 6
_MASK_64 = (1 << 64) - 1


class Location(NamedTuple):
    """Where a sample is read: window `window` of domain `domain`."""

    domain: int
    window: int


class SampleOrder:
    """Mixes domains and shuffles their windows.

    Samples come in blocks of 1,024. Every block holds the same number of samples
    of each domain, apportioned to the weights (largest remainders), in an order
    keyed by (seed, block). The r-th sample of a domain is window
    P(r mod windows) of it, where P is a permutation keyed by (seed, domain,
    r // windows): each window is used once before any is used again, and each
    pass has its own order.

    Attributes:
        windows_per_domain: number of windows in each domain.
        block_counts: samples of each domain in a block; they sum to 1,024.
    """

    def __init__(self, windows_per_domain: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Plan the order.

        Args:
            windows_per_domain: windows of each domain; 0 only where the weight is 0.
            weights: how often each domain is drawn, up to a common factor.
            seed: an integer >= 0.

        Raises:
            DataError: weights, windows or seed are not as described.
        """
        _require_valid(windows_per_domain, weights, seed)
        self.windows_per_domain = tuple(int(windows) for windows in windows_per_domain)
        self.block_counts = apportion(BLOCK_SAMPLES, weights)
        self._seed = seed
        self._slot_domains = np.repeat(np.arange(len(weights)), self.block_counts)
        # A cache, not state: a batch reads one or two blocks many times. (A plain
        # dict, because lru_cache would keep the order from being pickled.)
        self._plans: dict[int, list[tuple[int, int]]] = {}

    def locate(self, index: int) -> Location:
        """Give domain and window of the sample `index` >= 0."""
        domain, rank = self._domain_and_rank(index)
        windows = self.windows_per_domain[domain]
        epoch, position = divmod(rank, windows)
        key = _key("window", self._seed, domain, epoch)
        return Location(domain, permute(position, windows, key))

    def epoch(self, index: int) -> tuple[int, int]:
        """Give (domain, full passes made over that domain before) of the sample `index`."""
        domain, rank = self._domain_and_rank(index)
        return domain, rank // self.windows_per_domain[domain]

    def _domain_and_rank(self, index: int) -> tuple[int, int]:
        """Give the domain of a sample, and how many samples before it have that domain."""
        if index < 0:
            raise DataError(f"the sample index is {index}; allowed are 0 and up")
        block, position = divmod(int(index), BLOCK_SAMPLES)
        if block not in self._plans:
            if len(self._plans) >= _REMEMBERED_BLOCKS:
                self._plans = {}
            self._plans[block] = self._plan_block(block)
        domain, rank_in_block = self._plans[block][position]
        return domain, block * self.block_counts[domain] + rank_in_block

    def _plan_block(self, block: int) -> list[tuple[int, int]]:
        """Give (domain, samples of it before in the block) for each position of a block."""
        position_keys = np.arange(BLOCK_SAMPLES, dtype=np.uint64)
        for round_key in _key("block", self._seed, block)[:2]:
            position_keys = _hash64_array(position_keys ^ np.uint64(round_key))
        domains = self._slot_domains[np.argsort(position_keys, kind="stable")].tolist()
        seen = [0] * len(self.block_counts)
        plan = []
        for domain in domains:
            plan.append((domain, seen[domain]))
            seen[domain] += 1
        return plan


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` into whole parts by weight (largest remainders).

    A positive weight gets at least 1, so that no domain vanishes.
    """
    weight_sum = math.fsum(weights)
    floor_part = sum(weight > 0 for weight in weights)
    if floor_part > total:
        raise DataError(f"{floor_part} domains have a weight above 0; allowed are at most {total}; merge some")
    quotas = [weight / weight_sum * total for weight in weights]
    counts = [max(int(quota), 1) if quota > 0 else 0 for quota in quotas]
    while sum(counts) != total:  # each turn moves the count that is furthest from its quota
        step = 1 if sum(counts) < total else -1
        allowed = [domain for domain, count in enumerate(counts) if weights[domain] > 0 and count + step >= 1]
        counts[max(allowed, key=lambda domain: step * (quotas[domain] - counts[domain]))] += step
    return tuple(counts)


def permute(value: int, size: int, key: tuple[int, ...]) -> int:
    """Give the image of `value` under a permutation of range(size), chosen by `key`.

    A Feistel network on a pair of digits (left < rows, right < columns): each
    round adds a keyed hash of one digit to the other, which can be undone, so it
    is a bijection of the rows * columns >= size cells. Cells outside the range
    are sent through again until they land in it (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains").
    """
    rows, columns = _grid(size)
    while True:
        left, right = divmod(value, columns)
        for round_key in key:
            left, right = right, (left + _hash64(right ^ round_key)) % rows
            rows, columns = columns, rows
        value = left * columns + right
        if value < size:
            return value


@functools.lru_cache(maxsize=1024)
def _grid(size: int) -> tuple[int, int]:
    rows = math.isqrt(size - 1) + 1
    return rows, -(-size // rows)


@functools.lru_cache(maxsize=1024)
def _key(*parts: int | str) -> tuple[int, ...]:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(int.from_bytes(digest[start : start + 8], "little") for start in range(0, 8 * _ROUNDS, 8))


def _hash64(value: int) -> int:
    value = (value * 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & _MASK_64
    return value ^ (value >> 32)


def _hash64_array(value: np.ndarray) -> np.ndarray:
    """`_hash64` of each uint64."""
    value = value * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return value ^ (value >> np.uint64(32))


def _require_valid(windows_per_domain: Sequence[int], weights: Sequence[float], seed: int) -> None:
    if len(windows_per_domain) != len(weights) or not weights:
        raise DataError(
            f"{len(windows_per_domain)} window counts and {len(weights)} weights; "
            "give one of each for every domain, and at least one domain"
        )
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not sum(weights) > 0:
        raise DataError(f"the weights are {list(weights)}; they must be finite, >= 0, and not all 0")
    for domain, (windows, weight) in enumerate(zip(windows_per_domain, weights, strict=True)):
        if windows < 0 or (windows == 0 and weight > 0):
            raise DataError(
                f"domain {domain} has {windows} windows and weight {weight}; a domain with a "
                "weight above 0 needs at least 1 window: give more text or a shorter sequence"
            )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"the seed is {seed!r}; allowed are integers >= 0")
