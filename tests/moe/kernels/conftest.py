"""A process in which Triton kernels are interpreted. In pytest's own they stay real, to be compiled ahead of time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.moe.kernels.interpreter_jobs import Case, errors_of_kernels, run, start


@pytest.fixture(scope="session")
def interpreter(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Call a function of `interpreter_jobs` where TRITON_INTERPRET=1 was set before triton was imported.

    The longest jobs are begun at once, in two processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=start)
        jobs = {each: pool.submit(run, errors_of_kernels, each) for each in cases(request.session.items)}

    def call(job: Callable[..., Any], *args: Any) -> Any:
        begun = jobs.get(args[0]) if job is errors_of_kernels else None
        return (begun or pool.submit(run, job, *args)).result()

    yield call
    pool.shutdown(cancel_futures=True)


def cases(tests: list[Any]) -> list[Case]:
    """What the collected tests will ask `errors_of_kernels` for."""
    given = [test.callspec.params.get("case") for test in tests if _compares_kernels(test)]
    return [case for case in given if isinstance(case, Case)]


def _compares_kernels(test: Any) -> bool:
    return hasattr(test, "callspec") and test.originalname.endswith("the_loop")
