"""Sampling keeps what it says and depends on nothing but the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eval.sampling import Sampler, filtered_probabilities

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()


def probabilities(*limits: float | int | None, temperature: float = 1.0) -> list[float]:
    return filtered_probabilities(LOGITS, temperature, *limits).tolist()  # type: ignore[arg-type]


def test_limits_cut_the_improbable_and_renormalise() -> None:
    assert probabilities() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert probabilities(2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(None, 0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(None, 0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert probabilities(None, 1e-9) == pytest.approx([1, 0, 0, 0])  # at least one stays
    assert probabilities(99, 1.0) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    # Top-k comes first: of the two kept the first alone reaches 0.5.
    assert probabilities(2, 0.5) == pytest.approx([1, 0, 0, 0])


def test_temperature_sharpens_and_ties_go_to_the_lowest_id() -> None:
    assert probabilities(temperature=0.5) == pytest.approx(np.array([16, 9, 4, 1]) / 30)
    assert filtered_probabilities(torch.zeros(5).double(), 1.0, 2).tolist() == [0.5, 0.5, 0, 0, 0]
    assert filtered_probabilities(torch.tensor([1e300, 0.0], dtype=torch.float64), 1e-10).tolist() == [1, 0]


def test_frequencies_match_the_probabilities() -> None:
    sampler = Sampler([[1]], [0], temperature=1.0, top_k=3)
    drawn = [sampler.draw(LOGITS[None], [True])[0] for _ in range(4000)]
    shares = np.bincount(np.array(drawn, dtype=int), minlength=4) / 4000
    assert shares == pytest.approx(np.array([4, 3, 2, 0]) / 9, abs=0.03)
    assert shares[3] == 0


def test_a_row_draws_the_same_in_any_company() -> None:
    logits_BV = LOGITS.expand(3, -1)

    def draws(prompts: list[list[int]], row: int, wanted: list[bool]) -> list[int | None]:
        sampler = Sampler(prompts, [7] * len(prompts), temperature=1.0)
        return [sampler.draw(logits_BV[: len(prompts)], wanted)[row] for _ in range(20)]

    alone = draws([[5, 6]], 0, [True])
    assert draws([[1], [2], [5, 6]], 2, [True, True, True]) == alone
    assert draws([[5, 6], [9]], 0, [True, False]) == alone
    assert draws([[5, 7]], 0, [True]) != alone
    assert len(set(alone)) > 1


def test_rows_that_are_not_wanted_give_none() -> None:
    assert Sampler([[1], [2]], [0, 0]).draw(LOGITS.expand(2, -1), [False, True]) == [None, 0]


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="temperature is -1"):
        Sampler([[1]], [0], temperature=-1)
    with pytest.raises(ValueError, match="top_k is 0"):
        Sampler([[1]], [0], top_k=0)
    with pytest.raises(ValueError, match="top_p is 1.5"):
        Sampler([[1]], [0], top_p=1.5)
    with pytest.raises(ValueError, match="not numbers"):
        Sampler([[1]], [0]).draw(torch.full((1, 4), torch.nan), [True])
