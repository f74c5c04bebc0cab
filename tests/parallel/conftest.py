"""Processes for the tests of parallel/: started once for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parallel.pool import Pool

KEPT = 2  # pools; files keep to one or two numbers of ranks, and idle processes hold memory


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Give the pool of so many ranks; those not asked for lately are closed."""
    pools: dict[int, Pool] = {}

    def get(world: int) -> Pool:
        pools[world] = pools.pop(world, None) or Pool(world)
        for idle in list(pools)[:-KEPT]:
            pools.pop(idle).close()
        return pools[world]

    yield get
    for each in pools.values():
        each.close()
