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
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from data.atomic import write_atomically
from data.tokenizer import Tokenizer
from eval.command import run_command
from eval.generate import generate
from eval.report import rich_table
from eval.report_tables import Table
from eval.scoreboard import finite
from eval.tasks.continuation import VARIANTS, continuation_questions, write_questions
from eval.tasks.encoding import Pair, encode_pair
from eval.tasks.loglikelihood import model_scorer
from eval.tasks.tables import percent
from moe.model import Transformer
from training.run import Run

TASK_FOLDER = Path(__file__).parent / "tasks" / "harness"
BUILT_IN = {("choir_continuation" if v == "domain" else f"choir_continuation_{v}"): v for v in VARIANTS}
NEW_TOKENS = 64  # where a generation task names no number
MISSING = "eval.harness needs lm-eval: pip install 'lm-eval>=0.4.13' (or use python -m eval.score, which does not)"
# What makes lm-eval import and run Python that a YAML file names, or read files elsewhere.
CODE = re.compile(r"!function|!!python|^\s*-?\s*[\"']?class[\"']?\s*:|unsafe_code|trust_remote_code", re.MULTILINE)
ELSEWHERE = re.compile(r"^\s*[\"']?include[\"']?\s*:.*(/|\.\.)", re.MULTILINE)

try:
    # Before lm-eval and datasets are imported, which read these once.
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(variable, "1")
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "lm_eval":
        raise
    raise ModuleNotFoundError(MISSING, name="lm_eval") from None


class HarnessModel(TemplateLM):
    """A model of this project as lm-eval sees one.

    Args:
        model: any router; routing is causal.
        tokenizer: of its corpus.
        length: inputs of a row at most: what the run was trained on.
        progress: told how many rows of how many are done.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        length: int,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        super().__init__()
        self.model, self.length, self._tokenizer = model, length, tokenizer
        self._score = model_scorer(model, length, tokenizer.token_bytes_V, progress=progress)

    @property
    def eot_token_id(self) -> int:
        """The marker; by lm-eval's default also the prefix of an empty context."""
        return self._tokenizer.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without a marker: `_encode_pair` sets it, so that it comes once."""
        return self._tokenizer.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = encode_pair(self._tokenizer, context, continuation)
        return pair.context, pair.continuation

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored = self._score([Pair(context, continuation) for _, context, continuation in requests])
        return [(-found.nats, found.greedy) for found in scored]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln P of whole texts behind a marker; a long one in windows, each id predicted once."""
        texts = [request.args[0] for request in requests]
        asked = [(place, self.tok_encode(text)) for place, text in enumerate(texts) if text]
        found = [0.0] * len(texts)  # of an empty text
        scored = self._score([Pair([self.eot_token_id], ids) for _, ids in asked])
        for (place, _), one in zip(asked, scored, strict=True):
            found[place] = -one.nats
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts, each cut before the first of its stop texts; greedy unless `do_sample` is true.

        Raises:
            ValueError: a generation setting is not supported, or asks for more than a row has room for.
        """
        return [self._continue(*request.args) for request in requests]

    def _continue(self, prompt: str, settings: dict[str, Any]) -> str:
        settings = dict(settings)
        stops, most = settings.pop("until", []), settings.pop("max_gen_toks", NEW_TOKENS)
        sample, temperature = settings.pop("do_sample", False), settings.pop("temperature", None)
        kept = {name: settings.pop(name) for name in ("top_k", "top_p") if name in settings}
        if settings:
            raise ValueError(
                f"the generation settings {', '.join(settings)} are not supported; supported are until, max_gen_toks, "
                "do_sample, temperature, top_k and top_p"
            )
        if not isinstance(most, int) or not 0 < most < self.length:
            raise ValueError(
                f"max_gen_toks is {most!r}; allowed are 1 to {self.length - 1}, as rows of training have "
                f"{self.length} tokens"
            )
        ids = [self.eot_token_id, *self.tok_encode(prompt)][-(self.length - most) :]
        options = {"temperature": 1.0 if temperature is None else float(temperature), **kept} if sample else {}
        (new,) = generate(
            self.model,
            [ids],
            most,
            **options,
            stop_token=self.eot_token_id,
            vocabulary_size=self._tokenizer.vocabulary_size,
        )
        text = self._tokenizer.decode(new)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0] if stop else text
        return text


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


def evaluate_tasks(
    model: HarnessModel, names: Sequence[str], folders: Sequence[Path], data: dict[str, Path], limit: int | None = None
) -> dict[str, Any]:
    """Run lm-eval, with the tasks of some folders only.

    Args:
        model: of a run.
        names: of tasks, groups or tags.
        folders: with YAML files.
        data: the file of questions of tasks that are to read another one than their YAML says.
        limit: first so many questions of each task.

    Returns:
        What lm-eval's `simple_evaluate` returns, samples included.

    Raises:
        ValueError: there is no task of a name.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"there is no task {name}; there are {', '.join(manager.all_tasks)}")
    tasks = [
        {"task": name, "dataset_kwargs": {"data_files": {"test": str(data[name])}}} if name in data else name
        for name in names
    ]
    found = simple_evaluate(
        model, tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=0, cache_requests=False
    )
    assert found is not None
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.harness", description="Score a run with lm-eval.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--tasks", required=True, help=f"names, separated by commas, such as {', '.join(BUILT_IN)}")
    parser.add_argument("--task-folder", type=Path, help="a folder of your own with YAML tasks")
    parser.add_argument("--trust-code", action="store_true", help="let its YAML files name Python code to run")
    parser.add_argument("--limit", type=int, help="first so many questions of each task")
    options = parser.parse_args(arguments)
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit is {options.limit}; allowed are 1 and above")
    if options.task_folder is not None and not options.trust_code:
        require_no_code(options.task_folder)
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
    console = Console() if sys.stdout.isatty() else Console(width=120)
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
