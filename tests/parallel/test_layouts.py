"""Any layout gives the numbers of one process: losses, gradients, their norm, weights after three steps, telemetry.

Plain SGD in fp32: Adam would hide a constant factor on a gradient. (Known failures B01, B03, B04, B10, C03, C04, C05.)
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

from tests.parallel import cases
from tests.parallel.cases import MARGIN, Case
from tests.parallel.layouts import Part, differences, smallest_margin, train
from tests.parallel.table import BEGIN, END, README, Proven, all_cases, record, table, without_numbers

CASES = sorted(cases.every_case(), key=lambda case: case.world)  # one pool of processes after the other


@functools.cache
def reference(variant: str) -> Part:
    """The job in one process, for all cases that are to give its numbers."""
    case = next(case for case in [*CASES, cases.sixteen()] if case.variant == variant)
    return train(case.reference(), 1, case.seed, case.kind, case.starve)


@pytest.fixture(scope="module")
def prove(pool):
    """Compares a case with one process; leaves what was proven to `tests.parallel.table`."""
    proven: dict[str, Proven] = {}

    def compare(case: Case) -> None:
        parts = pool(case.world).run(train, case.config(), case.world, case.seed, case.kind, case.starve, timeout=90.0)
        seen: list[float] = []
        wrong = differences([reference(case.variant)], parts, seen=seen)
        assert not wrong, "\n".join([case.name, *wrong[:12], f"{len(wrong)} differences in all"])
        proven[case.key] = Proven(case.world, case.layout, max(seen))

    yield compare
    record(proven)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_layout_gives_the_numbers_of_one_process(case, prove):
    prove(case)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sixteen_processes_give_the_numbers_of_one(prove):
    prove(cases.sixteen())


def test_the_readme_tells_the_layouts_that_are_proven():
    """`python -m tests.parallel.table` writes it, from what the last run of this file has proven."""
    told = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert without_numbers(told) == without_numbers(table([Proven(c.world, c.layout, 0.0) for c in all_cases()]))


@pytest.mark.parametrize("variant", sorted({case.variant for case in CASES}))
def test_no_routing_decision_of_a_job_is_a_close_one(variant):
    case = next(case for case in CASES if case.variant == variant)
    assert smallest_margin(case.reference(), case.seed, case.kind, case.starve) > MARGIN


def test_a_wrong_scale_is_named_with_its_factor():
    good = reference(CASES[0].variant)
    bad = copy.deepcopy(good)
    ((start, gradient),) = bad.gradients[0]["blocks.2.feed_forward.experts.w2_EDF"]
    bad.gradients[0]["blocks.2.feed_forward.experts.w2_EDF"] = [(start, 2 * gradient)]
    bad.results[1].gradient_norm *= 0.5
    bad.records[2]["counts"][0][0] += 1
    wrong = "\n".join(differences([good], [bad]))
    assert "step 0: gradient of blocks.2.feed_forward.experts.w2_EDF 2.00x" in wrong
    assert "step 1, rank 0: gradient norm 0.500000x" in wrong
    assert "step 2, rank 0: telemetry counts" in wrong


def test_copies_that_differ_and_elements_that_nobody_has_are_found():
    good = reference(CASES[0].variant)
    other = copy.deepcopy(good)
    ((start, weight),) = other.weights["final_norm.weight"]
    other.weights["final_norm.weight"] = [(start, np.nextafter(weight, np.inf))]
    with pytest.raises(AssertionError, match=r"copies of final_norm\.weight differ"):
        differences([good], [good, other])
    other.weights["final_norm.weight"] = [(start, weight[:-1])]
    with pytest.raises(AssertionError, match=r"1 elements of final_norm\.weight are nowhere"):
        differences([good], [other])
