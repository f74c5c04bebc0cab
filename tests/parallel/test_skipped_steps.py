"""A gradient that is not finite on one process: no process takes the step (known failure C08).

The rule: such a step's data and its place in the schedule are used up; weights, moments and routers stay. After
`training.bad_steps` of them in a row the run ends.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from data.prepare import prepare
from parallel.shards import local_gradient
from tests.parallel.engines import batch_of, build, plain, share
from tests.parallel.layouts import Pieces, assemble, make_config, parts_of
from tests.parallel.pool import Pool
from tests.training.conftest import TINY
from training.config import Config
from training.optimizer import build_optimizer, learning_rate
from training.step import NonFiniteGradient, train_step

Pools = Callable[[int], Pool]
ROOT = Path(__file__).parents[2]
STEPS, BAD = 5, 2  # counted from 0: the third step
EXPERT, DENSE = "blocks.1.feed_forward.experts.w2_EDF", "blocks.0.attention.output.weight"


class Seen(NamedTuple):
    """What one process has after each step, and what the step said.

    Attributes:
        weights: this process' parts.
        state: the routers' buffers.
        counts: steps that AdamW counts, of all parameters.
        loss: None where the step was left out.
        rate: learning rate of the optimizer.
    """

    weights: dict[str, Pieces]
    state: dict[str, np.ndarray]
    counts: set[float]
    loss: float | None
    rate: float


def steps_with_a_bad_one(config: Config, world: int, where: str, value: float, rank: int) -> list[Seen]:
    """Train; after backward of the bad step put a value into one gradient of one process."""
    engine = build(config, world)
    optimizer = build_optimizer(engine, config.training)
    finish, seen = engine.finish_gradients, []

    def spoil() -> float:
        if engine.mesh.rank == rank:
            (held,) = [h for h in engine.held if h.name == where]
            local_gradient(held.parameter).view(-1)[0] = value
        return finish()

    for step in range(STEPS):
        engine.finish_gradients = spoil if step == BAD else finish  # type: ignore[method-assign]
        loss: float | None = None
        batch = share(engine, batch_of((6, 2, 5, 1), 6, step))
        if step == BAD:
            with pytest.raises(NonFiniteGradient, match="step 3: the gradient norm is (inf|nan)"):
                train_step(engine, optimizer, batch, config, step, 0)
            assert all(h.parameter.grad is None for h in engine.held)
        else:
            loss = train_step(engine, optimizer, batch, config, step, 0).loss
        counts = {entry["step"].item() for entry in optimizer.state.values()}
        state = {name: b.numpy().copy() for model in engine.models for name, b in model.named_buffers()}
        rates = {group["lr"] for group in optimizer.param_groups}
        seen.append(Seen(parts_of(engine, lambda p: p), state, counts, loss, rates.pop()))
        assert not rates
    return seen


@pytest.mark.parametrize(
    ("where", "value"),
    [(EXPERT, float("inf")), (DENSE, float("nan"))],
    ids=["inf in an expert", "nan in a dense layer"],
)
@pytest.mark.parametrize(
    "parallel", [{}, {"expert": 2}, {"zero": 3}, {"tensor": 2}], ids=["dp2", "ep2", "zero3", "tp2"]
)
def test_one_gradient_that_is_not_finite_keeps_all_processes_from_the_step(
    pool: Pools, parallel: dict[str, int], where: str, value: float
) -> None:
    """C08: on the second of two processes at the third step. The fourth is the one of a process that skipped it too."""
    config = make_config(
        model={"layers": 2},
        moe={"router": "quantile", "group_sequences": 1},  # whose cutoffs are state
        parallel=parallel,
        training={"steps": STEPS, "batch_sequences": 4, "sequence_length": 6},
    )
    shapes = {h.name: tuple(h.parameter.shape) for h in build(plain(config)).held}
    alone = steps_with_a_bad_one(plain(config), 1, where, value, 0)
    steps = list(zip(*pool(2).run(steps_with_a_bad_one, config, 2, where, value, 1), strict=True))
    # Copies of a weight on two processes are compared here, bit for bit.
    weights = [assemble([seen.weights for seen in both], shapes) for both in steps]
    for step, (both, one) in enumerate(zip(steps, alone, strict=True)):
        for seen in both:
            assert one.loss is None or seen.loss == pytest.approx(one.loss, rel=1e-4)
            assert seen.counts == {float(step + (step < BAD))}
            assert seen.rate == learning_rate(config.training, step - (step == BAD))
            for name, values in seen.state.items():
                assert np.array_equal(values, both[0].state[name]), name
                assert step != BAD or np.array_equal(values, steps[step - 1][0].state[name]), name
        for name, whole in weights[step].items() if step else ():
            assert np.array_equal(whole, weights[step - 1][name]) == (step == BAD), (step, name)


# Spoils a gradient of the second process in the third step, and in all from the sixth on.
SCRIPT = """
import sys
import train
from parallel.engine import Engine
from parallel.shards import local_gradient

finish, step = Engine.finish_gradients, 0

def spoil(engine):
    global step
    step += 1
    if engine.mesh.rank == 1 and (step == 3 or step > 5):
        local_gradient(engine.held[-1].parameter).view(-1)[0] = float("nan")
    return finish(engine)

Engine.finish_gradients = spoil
status = train.main(sys.argv[1:])
print("ended with", status, flush=True)  # torchrun may stop the second process before it ends by itself
sys.exit(status)
"""


def test_a_run_logs_steps_that_it_leaves_out_once_and_ends_after_three_in_a_row(
    tmp_path: Path,
) -> None:
    """C08: `training.bad_steps` is 3. The exit status is not 0, and one process says why."""
    words = random.Random(0).choices([f"{n * n % 89}" for n in range(60)], k=6000)
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(words[n : n + 60]) for n in range(0, 6000, 60)))
    corpus = prepare(tmp_path / "corpus", 300, {"text": [tmp_path / "text.txt"]})
    (tmp_path / "spoilt.py").write_text(SCRIPT)
    (tmp_path / "tiny.toml").write_text(TINY)
    flags = ["--run.folder", str(tmp_path / "runs"), "--data.corpus", str(corpus.folder), "--eval.every", "0"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "spoilt.py")]
    done = subprocess.run(
        [*launcher, str(tmp_path / "tiny.toml"), *flags, "--log.no-tensorboard", "--training.schedule", "cosine"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0 and set(re.findall(r"ended with (\d+)", said)) == {"1"}, said
    text = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9)), said
    assert [line["step"] for line in lines if "skipped" in line] == [3, 6, 7, 8]
    assert lines[2]["skipped"].startswith("step 3: the gradient norm is nan")
    assert "error: step 8: the gradient norm is nan" in said
    assert said.count("(3 steps in a row: training.bad_steps)") == 1
    # The rate goes by the step, whether steps were left out or not: three of warm-up, then a cosine of 17.
    rates = [line["learning_rate"] for line in lines if "skipped" not in line]
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.003 * 0.5 * (1 + np.cos(np.pi / 17))])
    assert not torch.tensor([line["gradient_norm"] for line in lines if "skipped" not in line]).isnan().any()
