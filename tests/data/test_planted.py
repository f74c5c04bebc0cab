"""Planted mixtures: reproducible, unequal, and solved by one linear map for each cluster."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.planted import SEGMENT_TOKENS, PlantedMixture

SIZES = {"clusters": 5, "vocabulary": 700, "width": 24}
KINDS = ("id", "context")


def counts(row_T: torch.Tensor, column_T: torch.Tensor) -> np.ndarray:
    """How often each pair of values occurs."""
    table = np.zeros((int(row_T.max()) + 1, int(column_T.max()) + 1))
    np.add.at(table, (row_T.flatten().numpy(), column_T.flatten().numpy()), 1)
    return table


def chi_squared_per_degree(table: np.ndarray) -> float:
    """About 1 where rows and columns are independent."""
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum() / np.prod(np.subtract(table.shape, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seeds_say_everything(kind: str) -> None:
    first, again, other = (PlantedMixture(**SIZES, kind=kind, seed=seed).sample(7, 3, 11) for seed in (4, 4, 5))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(first.x_BSD, other.x_BSD)
    mixture = PlantedMixture(**SIZES, kind=kind, seed=4)
    mixture.sample(8, 2, 6)  # what was drawn before does not matter
    assert torch.equal(mixture.sample(7, 3, 11).target_BSD, first.target_BSD)
    assert not torch.equal(mixture.sample(8, 3, 11).token_BS, first.token_BS)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_types(kind: str) -> None:
    batch = PlantedMixture(**SIZES, kind=kind, seed=0).sample(0, 3, 11)
    assert batch.token_BS.shape == batch.cluster_BS.shape == (3, 11)
    assert batch.x_BSD.shape == batch.target_BSD.shape == (3, 11, 24)
    assert batch.token_BS.dtype == batch.cluster_BS.dtype == torch.int64
    assert batch.x_BSD.dtype == batch.target_BSD.dtype == torch.float32
    assert 0 <= int(batch.token_BS.min()) <= int(batch.token_BS.max()) < 700


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_have_the_unequal_shares_that_are_stated(kind: str) -> None:
    mixture = PlantedMixture(**SIZES, kind=kind, seed=1)
    assert sorted(mixture.share_M) == pytest.approx([5 / 35, 6 / 35, 7 / 35, 8 / 35, 9 / 35])
    cluster_BS = mixture.sample(0, 200, 100).cluster_BS
    found_M = torch.bincount(cluster_BS.flatten(), minlength=5).numpy() / cluster_BS.numel()
    assert found_M == pytest.approx(mixture.share_M, abs=0.025)


@pytest.mark.parametrize("kind", KINDS)
def test_within_a_cluster_one_linear_map_of_the_input_is_exact_and_for_all_it_is_poor(kind: str) -> None:
    batch = PlantedMixture(**SIZES, kind=kind, seed=2).sample(0, 40, 50)
    x_TD, y_TD, cluster_T = batch.x_BSD.flatten(0, 1), batch.target_BSD.flatten(0, 1), batch.cluster_BS.flatten()

    def share_unexplained(keep_T: torch.Tensor) -> float:
        inputs = torch.nn.functional.pad(x_TD[keep_T], (0, 1), value=1.0).double()
        targets = y_TD[keep_T].double()
        residual = targets - inputs @ torch.linalg.lstsq(inputs, targets).solution
        return float(residual.square().sum() / targets.square().sum())

    for cluster in range(5):
        assert share_unexplained(cluster_T == cluster) < 1e-10
    assert share_unexplained(torch.ones_like(cluster_T, dtype=torch.bool)) > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_router_can_tell_the_clusters(kind: str) -> None:
    mixture = PlantedMixture(clusters=8, vocabulary=2000, width=32, kind=kind, seed=3)
    batch = mixture.sample(0, 40, 100)
    mark_MD = torch.from_numpy(mixture.mark_MD).float()
    logits_TM = batch.x_BSD.flatten(0, 1) @ mark_MD.T - mark_MD.square().sum(1) / 2
    assert (logits_TM.argmax(1) == batch.cluster_BS.flatten()).float().mean() > 0.98


def test_by_id_the_cluster_is_a_function_of_the_id() -> None:
    mixture = PlantedMixture(**SIZES, kind="id", seed=1)
    batch = mixture.sample(0, 20, 100)
    assert np.array_equal(mixture.cluster_V[batch.token_BS.numpy()], batch.cluster_BS.numpy())
    assert (counts(batch.token_BS, batch.cluster_BS) > 0).sum(1).max() == 1


def test_by_id_neighbouring_tokens_are_independent() -> None:
    cluster_BS = PlantedMixture(**SIZES, kind="id", seed=1).sample(0, 60, 100).cluster_BS
    assert chi_squared_per_degree(counts(cluster_BS[:, :-1], cluster_BS[:, 1:])) < 2


def test_by_context_the_id_says_nothing_of_the_cluster() -> None:
    batch = PlantedMixture(**SIZES, kind="context", seed=1).sample(0, 100, 100)
    assert chi_squared_per_degree(counts(batch.token_BS, batch.cluster_BS)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_remainder_of_the_id_is_no_router(kind: str) -> None:
    """Neither kind is solved, wholly or partly, by id mod M: of 4,096 ids, only chance ties one to a cluster."""
    mixture = PlantedMixture(clusters=5, vocabulary=4096, width=24, kind=kind, seed=1)
    batch = mixture.sample(0, 100, 100)
    table = counts(batch.token_BS % 5, batch.cluster_BS)
    conditional = table / table.sum(1, keepdims=True)
    assert np.abs(conditional - mixture.share_M).max() < 0.05


def test_by_context_clusters_come_in_segments_of_the_stated_mean_length() -> None:
    mixture = PlantedMixture(**SIZES, kind="context", seed=1)
    cluster_BS = mixture.sample(0, 200, 100).cluster_BS
    stays = float((cluster_BS[:, 1:] == cluster_BS[:, :-1]).float().mean())
    repeats = float((mixture.share_M**2).sum())  # a new segment may be of the same cluster
    assert stays == pytest.approx(1 - (1 - repeats) / SEGMENT_TOKENS, abs=0.01)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "word"}, r"kind = 'word': must be one of \['id', 'context'\]"),
        ({"clusters": 0}, "clusters = 0"),
        ({"width": 0}, "width = 0"),
        ({"vocabulary": 4}, "vocabulary = 4"),
        ({"seed": -1}, "seed = -1: must be 0 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PlantedMixture(**{**SIZES, "kind": "id", "seed": 0, **changed})
