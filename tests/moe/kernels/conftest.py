"""A process in which Triton kernels are interpreted. In pytest's own they stay real, to be compiled ahead of time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.moe.kernels.interpreter_jobs import run, start


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Call a function of `interpreter_jobs` where TRITON_INTERPRET=1 was set before triton was imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(start).result()
    with pool:
        yield lambda job, *args: pool.submit(run, job, *args).result()
