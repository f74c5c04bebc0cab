"""A run under lm-eval, EleutherAI's evaluation harness: an optional package.

    pip install 'lm-eval>=0.4.13'
    python -m eval.harness RUN --tasks choir_continuation
    python -m eval.harness RUN --tasks NAME --task-folder DIR [--limit N]

Tasks are the YAML files of `eval/tasks/harness/` and of --task-folder; lm-eval's own are not loaded, and nothing is
downloaded. Scores are those of `eval.score`: prompts begin with the end-of-text marker, as documents in training do,
routing is causal, and rows are as long as those of training. Prints a table and writes RUN/eval/harness.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.atomic import write_atomically
from eval.command import require_at_least, run_command, terminal
from eval.report_tables import Table, rich_table
from eval.scoreboard import finite
from eval.tasks.continuation import VARIANTS, continuation_questions, write_questions
from eval.tasks.tables import percent
from training.run import Run

TASK_FOLDER = Path(__file__).parent / "tasks" / "harness"
BUILT_IN = {("choir_continuation" if v == "domain" else f"choir_continuation_{v}"): v for v in VARIANTS}
MISSING = "eval.harness needs lm-eval: pip install 'lm-eval>=0.4.13' (or use python -m eval.score, which does not)"
# What makes lm-eval import and run Python that a YAML file names, or read files elsewhere.
CODE = re.compile(r"!function|!!python|^\s*-?\s*[\"']?class[\"']?\s*:|unsafe_code|trust_remote_code", re.MULTILINE)
ELSEWHERE = re.compile(r"^\s*[\"']?include[\"']?\s*:.*(/|\.\.)", re.MULTILINE)


def require_no_code(folder: Path) -> None:
    """Refuse a folder whose YAML files would have lm-eval import and run Python.

    Raises:
        ValueError: there is no such folder, or a file in it asks for code, or for files elsewhere.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one with the tasks' YAML files")
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".yml"):
            text = path.read_text(encoding="utf-8")
            if found := CODE.search(text) or ELSEWHERE.search(text):
                raise ValueError(
                    f"{path} has {found[0].strip()!r}, with which lm-eval runs code or reads files outside the folder; "
                    "read it, and give --trust-code if you trust it"
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.harness", description="Score a run with lm-eval.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--tasks", required=True, help=f"names, separated by commas, such as {', '.join(BUILT_IN)}")
    parser.add_argument("--task-folder", type=Path, help="a folder of your own with YAML tasks")
    parser.add_argument("--trust-code", action="store_true", help="let its YAML files name Python code to run")
    parser.add_argument("--limit", type=int, help="first so many questions of each task")
    options = parser.parse_args(arguments)
    require_at_least(1, limit=options.limit)
    if options.task_folder is not None and not options.trust_code:
        require_no_code(options.task_folder)
    try:
        from eval.tasks.lm_eval_model import HarnessModel, evaluate_tasks
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ModuleNotFoundError(MISSING, name=error.name) from None
    names = [name for name in options.tasks.split(",") if name]
    folders = [TASK_FOLDER] + ([] if options.task_folder is None else [options.task_folder])
    run = Run.open(options.run)
    corpus, checkpoint = run.corpus(), run.checkpoint()
    model = HarnessModel(run.model(checkpoint=checkpoint), corpus.tokenizer, run.config.training.sequence_length)
    out = run.folder / "eval"
    out.mkdir(exist_ok=True)
    data = {name: out / f"{name}.jsonl" for name in names if name in BUILT_IN}
    for name, path in data.items():
        write_questions(continuation_questions(corpus, BUILT_IN[name]), path)
    found = evaluate_tasks(model, names, folders, data, options.limit)
    report = {"run": run.folder.name, "step": checkpoint.step, "limit": options.limit, "results": found["results"]}
    with write_atomically(out / "harness.json") as file:
        file.write((json.dumps(finite(report), indent=1, default=str) + "\n").encode())
    console = terminal()
    console.print(rich_table(results_table(report)))
    console.print(f"wrote {out / 'harness.json'}", highlight=False, soft_wrap=True)


def results_table(report: dict[str, Any]) -> Table:
    """Every metric of every task, with lm-eval's standard errors."""
    rows = []
    for task, values in report["results"].items():
        for key, value in values.items():
            metric, _, how = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not how:
                continue
            error = values.get(f"{metric}_stderr,{how}")
            error = error if isinstance(error, int | float) else None
            rows.append((task, metric, percent((value, error)) if metric.startswith("acc") else f"{value:.4f}"))
    title = f"lm-eval, causal routing: {report['run']} at step {report['step']:,}"
    return Table(title, ("task", "metric", "value"), rows, text_columns=("metric",))


if __name__ == "__main__":
    run_command(main)
