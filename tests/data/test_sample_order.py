"""The order is a pure function: repeatable, complete, and different in each pass (F09)."""

import itertools
import pickle
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.order import BLOCK_SAMPLES, SampleOrder, apportion, permute

KEYS = st.tuples(*[st.integers(0, 2**64 - 1)] * 6)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(size=st.integers(1, 400), key=KEYS)
def test_a_permutation_gives_each_value_once(size, key):
    assert sorted(permute(value, size, key) for value in range(size)) == list(range(size))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    windows=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    seed=st.integers(0, 2**70),
    data=st.data(),
)
def test_every_window_is_used_once_before_any_is_used_again(windows, seed, data):
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(windows), max_size=len(windows)))
    order = SampleOrder(windows, weights, seed)
    used: list[list[int]] = [[] for _ in windows]
    for index in range(3000):
        domain, window = order.locate(index)
        used[domain].append(window)
    for size, sequence in zip(windows, used, strict=True):
        for start in range(0, len(sequence), size):
            one_pass = sequence[start : start + size]
            assert len(set(one_pass)) == len(one_pass)
            assert all(0 <= window < size for window in one_pass)


def test_F09_passes_differ_and_each_is_repeatable():
    order, again = SampleOrder([22], [1.0], 5), SampleOrder([22], [1.0], 5)
    passes = [[order.locate(22 * epoch + k).window for k in range(22)] for epoch in range(3)]
    assert all(sorted(windows) == list(range(22)) for windows in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    # Any index, in any order of asking, gives the same sample.
    for index in reversed(range(66)):
        assert again.locate(index).window == passes[index // 22][index % 22]


def test_F09_other_seeds_give_other_orders():
    orders = [SampleOrder([500, 500], [1, 2], seed) for seed in (0, 1, 2**64)]
    sequences = [[order.locate(index) for index in range(100)] for order in orders]
    assert sequences[0] != sequences[1] != sequences[2] != sequences[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_F09_any_number_of_ranks_reads_the_same_samples(ranks):
    order = SampleOrder([40, 70], [1, 1], 0)
    expected = [order.locate(index) for index in range(240)]
    found = {}
    for rank in range(ranks):
        own = SampleOrder([40, 70], [1, 1], 0)  # each process plans for itself
        for step in range(20):
            for index in range(step * 12 + rank * 12 // ranks, step * 12 + (rank + 1) * 12 // ranks):
                found[index] = own.locate(index)
    assert [found[index] for index in range(240)] == expected


GOLDEN = [(0, 123), (0, 255), (1, 118), (0, 534), (0, 261)]


def test_the_order_never_changes_between_versions():
    """A golden value: another one would change the data of every run that is resumed."""
    order = SampleOrder([1000, 500], [2, 1], 1234)
    assert [tuple(order.locate(index)) for index in (0, 1, 2, 5000, 10**12)] == GOLDEN


def test_every_block_has_the_same_exact_mixture():
    order = SampleOrder([100, 200, 300], [0.5, 0.3, 0.2], 1)
    assert order.block_counts == (512, 307, 205)
    for block in range(3):
        samples = range(block * BLOCK_SAMPLES, (block + 1) * BLOCK_SAMPLES)
        counts = Counter(order.locate(index).domain for index in samples)
        assert tuple(counts[domain] for domain in range(3)) == order.block_counts


def test_domains_are_mixed_within_a_block():
    order = SampleOrder([100, 100], [1, 1], 1)
    for start in range(0, 1000, 100):
        ones = sum(order.locate(index).domain for index in range(start, start + 100))
        assert 25 <= ones <= 75


@settings(max_examples=100, derandomize=True, deadline=None)
@given(weights=st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any))
def test_counts_are_within_one_of_the_quota(weights):
    counts = apportion(1024, weights)
    assert sum(counts) == 1024
    raised = sum(0 < Fraction(1024 * w, sum(weights)) < 1 for w in weights)
    for count, weight in zip(counts, weights, strict=True):
        quota = Fraction(1024 * weight, sum(weights))
        assert (count == 0) == (weight == 0)
        assert quota - 1 - raised < count < max(quota, 1) + 1


def test_permuted_windows_look_random():
    """Fixed points, neighbours kept, and lag correlation are as rare as in a random order."""
    order = SampleOrder([5000], [1.0], 9)
    windows = [order.locate(index).window for index in range(5000)]
    assert sum(window == index for index, window in enumerate(windows)) < 10
    assert sum(b - a == 1 for a, b in itertools.pairwise(windows)) < 10
    mean = 4999 / 2
    covariance = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(windows))
    assert abs(covariance / sum((a - mean) ** 2 for a in windows)) < 0.06


def test_it_is_quick_and_can_be_sent_to_another_process():
    order = pickle.loads(pickle.dumps(SampleOrder([10**7, 10**9], [1, 3], 0)))
    order.locate(0)
    start = time.perf_counter()
    for index in range(20_000):
        order.locate(index)
    assert (time.perf_counter() - start) / 20_000 < 100e-6  # about 7 on an idle core


@pytest.mark.parametrize(
    "windows, weights, seed, reason",
    [
        ([1, 2], [1.0], 0, "2 window counts and 1 weights"),
        ([], [], 0, "at least one domain"),
        ([0], [1.0], 0, "domain 0 has 0 windows"),
        ([5], [-1.0], 0, "must be finite, >= 0"),
        ([5], [0.0], 0, "not all 0"),
        ([5], [float("nan")], 0, "must be finite"),
        ([5], [1.0], -1, "seed is -1"),
        ([5], [1.0], 0.5, "seed is 0.5"),
        ([5], [1.0], None, "seed is None"),
    ],
)
def test_errors_say_what_is_allowed(windows, weights, seed, reason):
    with pytest.raises(DataError, match=reason):
        SampleOrder(windows, weights, seed)


def test_a_negative_index_is_refused():
    with pytest.raises(DataError, match="index is -1"):
        SampleOrder([5], [1.0], 0).locate(-1)
