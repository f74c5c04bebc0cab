"""Every test starts from a random state of its own, and runs on as many threads as OMP_NUM_THREADS asks for."""

from __future__ import annotations

import os
import random
import zlib

import hypothesis
import pytest
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# The same examples on every machine, no deadline (CI shares its cores) and no folder of saved failures.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seed Python's and PyTorch's generators from the test's own name, so that the order of tests changes nothing."""
    seed = zlib.crc32(request.node.nodeid.split("/")[-1].encode())
    random.seed(seed)
    torch.manual_seed(seed)
