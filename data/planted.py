"""Planted mixtures: synthetic regression whose best routing is known, so that a router is scored in seconds.

Each token has a hidden cluster, and each cluster has a linear map of its own: experts do best with one expert for each
cluster, and one map for all does badly. A token's input carries its cluster's mark, so that a linear router can tell.
The two kinds differ in where the cluster comes from:

- "id": a fixed random function of the token's id, as with words of one class. A table of ids would be a perfect
  router; id mod E is at chance, because the function is random.
- "context": a property of a segment of the sequence, as with a passage about one thing. Ids are independent of it,
  so that every function of the id is at chance.

Clusters have unequal shares: with equal ones, wrong normalisations can cancel.

Shape suffixes: M clusters, B batch, S sequence, V vocabulary, D width.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError

Kind = Literal["id", "context"]
SEGMENT_TOKENS = 8  # mean length of a segment of kind "context"
_WORLD, _SAMPLE = 0, 1  # keep the two uses of a seed apart


class PlantedBatch(NamedTuple):
    """Sequences of a planted mixture.

    Attributes:
        token_BS: int64 ids, uniform.
        x_BSD: fp32 inputs: the id's vector plus the cluster's mark.
        target_BSD: fp32 targets: the cluster's map of the id's vector; each coordinate has variance 1 or so.
        cluster_BS: int64 hidden clusters.
    """

    token_BS: Tensor
    x_BSD: Tensor
    target_BSD: Tensor
    cluster_BS: Tensor


class PlantedMixture:
    """A world of clusters, and batches drawn from it: a pure function of the seeds.

    Attributes:
        share_M: float64 probability of each cluster, from 1 / 1.5M to 2 / 1.5M or so, in random order.
        vector_VD: vector of each id, normal with variance 1.
        mark_MD: mark of each cluster, normal with variance 1.
        map_MDD: map of each cluster, (output, input), normal with variance 1 / D.
        cluster_V: the cluster of each id (used by kind "id").
    """

    def __init__(self, clusters: int, vocabulary: int, width: int, kind: Kind, seed: int) -> None:
        """Draw a world.

        Args:
            clusters: M.
            vocabulary: V. Many times M * D, or experts learn single ids by heart and any routing does.
            width: D. Above 20 or so, or marks are too alike for a linear router to tell clusters apart.
            kind: where a token's cluster comes from.
            seed: an integer >= 0.

        Raises:
            DataError: naming the argument that is out of range.
        """
        if kind not in get_args(Kind):
            raise DataError(f"kind = {kind!r}: must be one of {list(get_args(Kind))}")
        if min(clusters, width) < 1 or vocabulary < clusters:
            raise DataError(
                f"clusters = {clusters}, width = {width}, vocabulary = {vocabulary}: clusters and width must be at "
                "least 1, and each cluster needs an id"
            )
        if seed < 0:
            raise DataError(f"seed = {seed}: must be 0 or more")
        self.kind, self.seed = kind, seed
        generator = np.random.default_rng([seed, _WORLD])
        size_M = generator.permutation(np.arange(clusters, 2 * clusters))
        self.share_M = size_M / size_M.sum()
        self.vector_VD = generator.standard_normal((vocabulary, width))
        self.mark_MD = generator.standard_normal((clusters, width))
        self.map_MDD = generator.standard_normal((clusters, width, width)) / np.sqrt(width)
        # Each cluster gets its share of the ids to the nearest id; which ids is random.
        quantile_V = (np.arange(vocabulary) + 0.5) / vocabulary
        self.cluster_V = generator.permutation(np.searchsorted(self.share_M.cumsum()[:-1], quantile_V))

    def sample(self, seed: int, rows: int, length: int) -> PlantedBatch:
        """Draw `rows` sequences of `length` tokens; the same seed draws the same ones.

        Args:
            seed: an integer >= 0, for instance the step's number.
            rows: B.
            length: S.
        """
        generator = np.random.default_rng([self.seed, _SAMPLE, seed])
        token_BS = generator.integers(len(self.vector_VD), size=(rows, length))
        cluster_BS = self.cluster_V[token_BS] if self.kind == "id" else self._segments(generator, rows, length)
        vector_BSD = self.vector_VD[token_BS]
        target_BSD = np.empty_like(vector_BSD)
        for cluster, map_DD in enumerate(self.map_MDD):
            target_BSD[cluster_BS == cluster] = vector_BSD[cluster_BS == cluster] @ map_DD.T
        return PlantedBatch(
            torch.from_numpy(token_BS),
            torch.from_numpy(vector_BSD + self.mark_MD[cluster_BS]).float(),
            torch.from_numpy(target_BSD).float(),
            torch.from_numpy(cluster_BS),
        )

    def _segments(self, generator: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """int64 (B, S): one cluster a segment; segments end at random, after `SEGMENT_TOKENS` tokens on average."""
        drawn_BS = generator.choice(len(self.share_M), size=(rows, length), p=self.share_M)
        starts_BS = generator.random((rows, length)) < 1 / SEGMENT_TOKENS
        starts_BS[:, 0] = True
        start_BS = np.maximum.accumulate(np.where(starts_BS, np.arange(length), 0), axis=1)
        return np.take_along_axis(drawn_BS, start_BS, axis=1)
