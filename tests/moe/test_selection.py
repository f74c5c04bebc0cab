"""Selecting the largest: ties go to the lowest index, everywhere and always."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.routers.selection import largest_per_row, top_k_mask

# Few distinct values, so that nearly every example has ties; -inf is how padding looks.
VALUES = st.sampled_from([-torch.inf, -1.5, 0.0, 0.25, 0.25000003, 7.0])


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Rows of equal length and how many to keep."""
    length = draw(st.integers(1, 9))
    rows = draw(st.lists(st.lists(VALUES, min_size=length, max_size=length), min_size=1, max_size=5))
    return rows, draw(st.integers(1, length))


def best(row: list[float], count: int) -> list[int]:
    """What a person would pick, in rising order of index."""
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:count])


@given(tables())
def test_the_largest_are_kept_in_rising_order_and_ties_go_to_the_lowest_index(
    case: tuple[list[list[float]], int],
) -> None:
    """The indices, and the smallest value that was kept."""
    rows, count = case
    values_XN = torch.tensor(rows)
    index_XC, kth_X = largest_per_row(values_XN, count)
    assert index_XC.tolist() == [best(row, count) for row in rows]
    assert kth_X.equal(values_XN.gather(1, index_XC).amin(1))


@given(tables())
def test_top_k_takes_the_lowest_expert_of_equals(case: tuple[list[list[float]], int]) -> None:
    """A12: a documented tie rule, unlike `torch.topk`."""
    rows, k = case
    mask_TE = top_k_mask(torch.tensor(rows), k)
    assert [row.nonzero().flatten().tolist() for row in mask_TE] == [best(row, k) for row in rows]


def test_any_leading_shape_is_selected_row_by_row() -> None:
    """(2, 3, 7) gives the same as its six rows."""
    values_GEN = torch.randint(4, (2, 3, 7)).float()
    index_GEC, kth_GE = largest_per_row(values_GEN, 4)
    for g in range(2):
        for e in range(3):
            assert index_GEC[g, e].tolist() == best(values_GEN[g, e].tolist(), 4)
    assert kth_GE.shape == (2, 3)


@pytest.mark.parametrize("tokens", [1, 64, 5000])
def test_equal_rows_choose_the_same_experts_every_time(tokens: int) -> None:
    """A12: 8 equal experts, k = 2: always 0 and 1, in ten repeats and for any number of rows."""
    for _ in range(10):
        mask_TE = top_k_mask(torch.full((tokens, 8), 0.125), 2)
        assert mask_TE[:, :2].all() and not mask_TE[:, 2:].any()


def test_a_long_row_of_equals_keeps_its_beginning() -> None:
    """Length beyond any sort's small-case path."""
    index_XC, kth_X = largest_per_row(torch.full((2, 4099), 0.5), 1025)
    assert index_XC.equal(torch.arange(1025).expand(2, -1))
    assert kth_X.tolist() == [0.5, 0.5]


def test_a_row_of_nan_gives_indices_that_exist() -> None:
    """A diverged router must end in a NaN loss, not in a read outside the batch; its neighbours are unaffected."""
    values_XN = torch.tensor([[torch.nan] * 6, [3.0, torch.nan, 1.0, 2.0, 5.0, 4.0], [0.0, 5.0, 1.0, 4.0, 2.0, 3.0]])
    for _ in range(20):
        torch.full((3, 5), 2**40)  # memory that a later `empty` may get
        index_XC, _ = largest_per_row(values_XN, 4)
        assert ((index_XC >= 0) & (index_XC < 6)).all()
        assert index_XC[2].tolist() == [1, 3, 4, 5]
