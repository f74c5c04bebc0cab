"""Noise is a function of (seed, step, layer, purpose, token): the same under any layout, and noise all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from moe import noise
from moe.routing import RoutingContext

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def drawn(
    batch: int = 3, length: int = 5, layer: int = 2, purpose: str = "jitter", numbers: int = 4, **more: Any
) -> Tensor:
    context = RoutingContext(batch, length, **{"seed": 7, "step": 11, **more})
    return noise.uniform(context, layer, purpose, numbers, CPU)


def splitmix64(state: int) -> int:
    """The published generator's output after one step from `state`, in Python's unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_plain_generator_is_the_published_one() -> None:
    """Its first three outputs for the seed 1234567."""
    states = [(1234567 + step * 0x9E3779B97F4A7C15) & MASK for step in range(3)]
    assert [splitmix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("first_token", [0, 1000, 2**40])
def test_every_number_is_the_plain_generators(first_token: int) -> None:
    """Scrambled by seed, step, layer, purpose, token and number in turn; 23 bits of it, in the middle of their step."""
    key = 0
    for part in (7, 11, 2, noise.PURPOSES["jitter"]):
        key = splitmix64((key + part) & MASK)
    expected = [
        [(splitmix64((splitmix64((key + first_token + t) & MASK) + n) & MASK) // 2**41 + 0.5) / 2**23 for n in range(4)]
        for t in range(15)
    ]
    assert drawn(first_token=first_token).tolist() == expected


def test_known_values() -> None:
    """A change of these changes every run that draws noise."""
    assert drawn(1, 2, numbers=3).tolist() == [
        [0.5939182639122009, 0.0762518048286438, 0.7255735993385315],
        [0.956975519657135, 0.9347401261329651, 0.7275983691215515],
    ]


def test_no_number_is_zero_or_one() -> None:
    """All 64 bits 0 or all 1: half a step from either end, so the normal's quantiles are finite: 5.3 at most."""
    ends = noise._unit(torch.tensor([0, -1]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert torch.special.ndtri(ends).abs().max().item() == pytest.approx(5.29, abs=0.02)


def test_a_million_uniform_numbers_are_uniform() -> None:
    """Mean 1/2, variance 1/12 and each of 16 bins' share within five standard errors."""
    values = drawn(100, 100, numbers=100).double()
    count = values.numel()
    assert values.min() > 0 and values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / count) ** 0.5)
    assert values.var().item() == pytest.approx(1 / 12, abs=5 * (1 / 180 / count) ** 0.5)
    shares = torch.histc(values, 16, 0, 1) / count
    assert (shares - 1 / 16).abs().max() < 5 * (1 / 16 * 15 / 16 / count) ** 0.5


def test_a_million_normal_numbers_are_normal() -> None:
    """Mean 0, variance 1, fourth moment 3, and 2.275 % beyond two deviations, within five standard errors."""
    values = noise.normal(RoutingContext(100, 100), 0, "jitter", 100, CPU).double()
    count = values.numel()
    assert values.mean().item() == pytest.approx(0, abs=5 * count**-0.5)
    assert values.var().item() == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
    assert values.pow(4).mean().item() == pytest.approx(3, abs=5 * (96 / count) ** 0.5)
    assert (values > 2).double().mean().item() == pytest.approx(0.02275, abs=5 * (0.0222 / count) ** 0.5)


def test_neighbours_are_unrelated() -> None:
    """Correlation with the next token's, the next number and the next step's: 0 within five standard errors."""
    values = drawn(100, 100, numbers=4)
    others = [values.roll(1, 0), values.roll(1, 1), drawn(100, 100, numbers=4, step=12)]
    for other in others:
        assert torch.corrcoef(torch.stack((values.flatten(), other.flatten())))[0, 1].abs() < 5 * 40000**-0.5


@pytest.mark.parametrize("part", ["seed", "step", "layer"])
def test_counting_a_part_up_gives_random_numbers_too(part: str) -> None:
    """The first number of 1,000 seeds, steps or layers in turn: mean, variance and correlation with the next."""
    values = torch.cat([drawn(1, 1, numbers=1, **{part: value}) for value in range(1000)]).flatten()
    assert values.mean().item() == pytest.approx(0.5, abs=5 * (1 / 12 / 1000) ** 0.5)
    assert values.var().item() == pytest.approx(1 / 12, abs=5 * (1 / 180 / 1000) ** 0.5)
    assert torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1].abs() < 5 * 1000**-0.5


@pytest.mark.parametrize(
    "change",
    [{"seed": 8}, {"step": 12}, {"layer": 3}, {"purpose": "noisy top-k"}, {"seed": 11, "step": 7}, {"first_token": 15}],
    ids=str,
)
def test_another_seed_step_layer_purpose_or_place_gives_other_numbers(change: dict[str, Any]) -> None:
    assert drawn().ne(drawn(**change)).all()


@pytest.mark.parametrize("cuts", [[6], [1] * 6, [2, 4], [5, 1]], ids=str)
def test_the_cut_into_micro_batches_changes_no_number(cuts: list[int]) -> None:
    """Six sequences of five tokens: each micro-batch says where in the step its first token is."""
    rows, first = [], 0
    for batch in cuts:
        rows.append(drawn(batch, 5, first_token=first * 5))
        first += batch
    assert torch.cat(rows).equal(drawn(6, 5))


def test_a_token_does_not_see_how_many_tokens_or_numbers_share_its_pass() -> None:
    assert drawn(9, 7)[:15].equal(drawn())
    assert drawn(numbers=9)[:, :4].equal(drawn())


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, -(2**63)])
def test_any_seed_of_64_bits_works(seed: int) -> None:
    values = drawn(40, 50, seed=seed)
    assert values.mean().item() == pytest.approx(0.5, abs=0.02) and values.unique().numel() > 7900


def test_noise_compiles_without_a_graph_break_and_not_anew_for_every_step() -> None:
    """One graph for the first step and one for all others, with the same bits."""
    torch._dynamo.reset()
    backend = CompileCounter()
    compiled = torch.compile(drawn, fullgraph=True, backend=backend)
    for step in range(5):
        more = {"step": step, "first_token": 15 * step}
        assert compiled(**more).equal(drawn(**more))
    assert backend.frame_count <= 2
