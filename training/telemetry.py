"""What a run tells while it trains: metrics.jsonl, TensorBoard, routing records and the line on the screen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from data.atomic import write_atomically
from training.run import Run, read_json_lines


class RunLog:
    """Writes a run's records; on resume, drops those of steps after the checkpoint.

    Args:
        run: whose folder is written.
        first_step: steps already done.
        writes: false in all processes but one, which then write nothing.
    """

    def __init__(self, run: Run, first_step: int, writes: bool = True) -> None:
        self._tensorboard = None
        if not writes:
            self._metrics, self._routing = _nowhere(), _nowhere()
            return
        (run.folder / "routing").mkdir(exist_ok=True)
        self._metrics = _reopen(run.folder / "metrics.jsonl", first_step)
        self._routing = _reopen(run.folder / "routing" / "steps.jsonl", first_step)
        if run.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            self._tensorboard = SummaryWriter(str(run.folder / "tb"), purge_step=first_step)

    def metrics(self, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl; "step" counts finished steps."""
        self._metrics.write(json.dumps(values) + "\n")
        self._metrics.flush()

    def routing(self, values: dict[str, Any]) -> None:
        """One line of routing/steps.jsonl."""
        self._routing.write(json.dumps(values) + "\n")
        self._routing.flush()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Points in TensorBoard."""
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exception: object) -> None:
        """Flush and close all files, also after an error."""
        self._metrics.close()
        self._routing.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _nowhere() -> Any:
    """A file that keeps nothing."""
    return Path(os.devnull).open("w", encoding="utf-8")


def _reopen(path: Path, first_step: int) -> Any:
    """Open a JSON-lines file for appending, without the records of steps after `first_step`."""
    kept = [line for line in read_json_lines(path) if line["step"] <= first_step]
    with write_atomically(path) as file:
        file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
    return path.open("a", encoding="utf-8")


class _StepColumn(ProgressColumn):
    """step 120/400."""

    def render(self, task: Task) -> Text:
        return Text(f"step {int(task.completed)}/{int(task.total or 0)}")


def progress_line(console: Console) -> Progress:
    """The live line: step, what `Progress.update(status=...)` says, and the time left."""
    return Progress(
        _StepColumn(table_column=Column(no_wrap=True)),
        BarColumn(bar_width=10),
        TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
        console=console,
        refresh_per_second=4,
    )


def status_text(values: dict[str, Any]) -> str:
    """The numbers of the progress line."""
    if "skipped" in values:
        return "left out: the gradient is not finite"
    name = "loss" if "loss" in values else "noncausal"
    loss = values.get("loss", values.get("noncausal_loss"))
    bits = values.get("bits_per_byte", values.get("noncausal_bits_per_byte"))
    parts = [f"{name} {loss:.3f}", f"{bits:.3f} bits/byte", f"{values['tokens_per_second']:,.0f} tokens/s"]
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    if "max_violation" in values:
        parts.append(f"MaxVio {values['max_violation']:.2f}")
    return "  ".join(parts)
