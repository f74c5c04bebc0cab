"""Multiple-choice tasks, scored under causal routing.

    python -m eval.score RUN                                        the tasks made from the run's held-out text
    python -m eval.score RUN --requests arc_easy/rc_0shot/requests.jsonl.gz --limit 500

Prints accuracies with standard errors, and writes RUN/eval/tasks.json. `eval.tasks.requests` says what a request file
holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.atomic import write_json
from eval.command import require_at_least, run_command, terminal
from eval.equivalent_perplexity import equivalents, heldout_sizes, load_tokenizer
from eval.likelihood import evaluate
from eval.report_tables import print_table
from eval.scoreboard import finite, fitted_baselines
from eval.tasks.continuation import QUESTIONS, VARIANTS, continuation_questions
from eval.tasks.loglikelihood import Scorer, model_scorer, ngram_scorer
from eval.tasks.metrics import Answer, answer, mean_and_error, paired, summary
from eval.tasks.requests import Question, Requests, digest
from eval.tasks.tables import accuracy_table, comparison_table
from training.run import Run, RunError

FORMAT_VERSION = 1
BUILT_IN = {("continuation" if variant == "domain" else f"continuation-{variant}"): variant for variant in VARIANTS}
COMPARED = ("acc", "acc_mutual_info")


@dataclass
class Task:
    """Questions with a name.

    Attributes:
        name: in tables and files.
        questions: at least one.
        source: where they are from, as plain data.
        left_out: lines of the file that repeat questions without context.
    """

    name: str
    questions: list[Question]
    source: dict[str, Any] = field(default_factory=dict)
    left_out: int = 0


def tasks_of_files(paths: Sequence[str | Path], limit: int | None = None) -> list[Task]:
    """The first `limit` questions of request files, or all.

    Raises:
        ValueError: a file cannot be used, or two have one name.
    """
    tasks: list[Task] = []
    for path in paths:
        requests = Requests(path)
        if requests.name in (task.name for task in tasks):
            raise ValueError(f"two of the request files are called {requests.name}: rename one of them")
        questions = list(itertools.islice(requests, limit))
        tasks.append(Task(requests.name, questions, {"file": str(path)}, requests.unconditional))
    return tasks


def built_in_tasks(
    run: Run, names: Sequence[str], limit: int | None = None, questions: int = QUESTIONS, seed: int = 0
) -> list[Task]:
    """Tasks made from the run's held-out text, by their names in `BUILT_IN`."""
    corpus = run.corpus()
    return [
        Task(
            name,
            continuation_questions(corpus, BUILT_IN[name], questions, seed)[:limit],
            {"made_from": corpus.sha256, "variant": BUILT_IN[name], "questions_per_domain": questions, "seed": seed},
        )
        for name in names
    ]


def compute(
    run: Run,
    tasks: Sequence[Task],
    limit: int | None = None,
    with_nulls: bool = False,
    against: Sequence[Run] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Score tasks with a run's newest checkpoint.

    Args:
        run: with a checkpoint.
        tasks: at least one.
        limit: what their questions were limited to, to be told.
        with_nulls: also score with unigram and bigram.
        against: runs that have been scored on the same questions.
        progress: told what is being done.

    Returns:
        Plain data, as in tasks.json.

    Raises:
        RunError: another run has no score on the same questions.
    """
    # Looked up before anything long is computed.
    others = [{other.folder.name: _correct(other, task) for other in against} for task in tasks]
    progress("loading the model")
    config, corpus, checkpoint = run.config, run.corpus(), run.checkpoint()
    tokenizer, length = corpus.tokenizer, config.training.sequence_length
    model = run.model(checkpoint=checkpoint)
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run": run.folder.name,
        "step": checkpoint.step,
        "corpus_sha256": corpus.sha256,
        "row_length": length,
        "limit": limit,
        "tasks": {},
    }
    nulls: dict[str, Scorer] = {}
    if with_nulls:
        progress("unigram and bigram of the training tokens")
        unigram, bigram = fitted_baselines(config, corpus, checkpoint.step)
        nulls = {
            name: ngram_scorer(b, tokenizer.token_bytes_V) for name, b in (("bigram", bigram), ("unigram", unigram))
        }
    for task, theirs in zip(tasks, others, strict=True):

        def count(done: int, of: int, name: str = task.name) -> None:
            progress(f"{name}: {done:,} of {of:,} rows")

        scorer = model_scorer(model, length, tokenizer.token_bytes_V, progress=count)
        answers = answer(task.questions, tokenizer, scorer)
        compared = {name: correct(answer(task.questions, tokenizer, null)) for name, null in nulls.items()}
        report["tasks"][task.name] = _task(task, answers, compared | theirs)
    return report


def correct(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """By metric, 1 or 0 of each question that has a choice."""
    return {metric: [found.correct(metric) for found in answers if found.has_choice] for metric in COMPARED}


def _task(task: Task, answers: list[Answer], compared: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    domains = dict.fromkeys(found.question.domain for found in answers if found.question.domain is not None)
    own = correct(answers)
    return {
        "source": task.source,
        "questions_sha256": digest(task.questions),
        "unconditional_lines_left_out": task.left_out,
        "all": summary(answers),
        "domains": {d: summary([found for found in answers if found.question.domain == d]) for d in domains},
        "compared": {
            name: {m: {"of_this": mean_and_error(theirs[m]), "model_less_this": paired(own[m], theirs[m])} for m in own}
            for name, theirs in compared.items()
            if own["acc"]
        },
        "correct": {metric: [int(value) for value in values] for metric, values in own.items()},
    }


def _correct(run: Run, task: Task) -> dict[str, list[float]]:
    """What another run got right in a task, from its tasks.json."""
    path = run.folder / "eval" / "tasks.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["tasks"][task.name]
        same = found["questions_sha256"] == digest(task.questions)
        values = {metric: [float(value) for value in found["correct"][metric]] for metric in COMPARED}
    except (OSError, ValueError, KeyError, TypeError):
        same, values = False, {}
    if not same:
        raise RunError(f"{path}: no score on the same questions of {task.name}; score {run.folder} on them first")
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.score", description="Score a run on multiple-choice tasks.")
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--requests", nargs="+", default=[], metavar="FILE", help="questions: .jsonl or .jsonl.gz")
    parser.add_argument(
        "--tasks", nargs="+", choices=BUILT_IN, help="made from held-out text (default: both, where no file is given)"
    )
    parser.add_argument("--questions", type=int, default=QUESTIONS, help=f"of these a domain (default {QUESTIONS})")
    parser.add_argument("--seed", type=int, default=0, help="of these (default 0)")
    parser.add_argument("--limit", type=int, help="first so many questions of each task")
    parser.add_argument("--nulls", action="store_true", help="also score by unigram and bigram of the training tokens")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="runs scored on the same questions")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json: held-out perplexity in its terms")
    parser.add_argument("--tokens", type=int, help="for that: held-out tokens a domain (default: as the run's report)")
    options = parser.parse_args(arguments)
    require_at_least(1, limit=options.limit, tokens=options.tokens)
    console = terminal(150)
    run, against = Run.open(options.run), [Run.open(folder) for folder in options.against]
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    names = options.tasks or ([] if options.requests else list(BUILT_IN))
    with console.status("reading questions") as status:
        tasks = tasks_of_files(options.requests, options.limit)
        tasks += built_in_tasks(run, names, options.limit, options.questions, options.seed)
        report = compute(run, tasks, options.limit, options.nulls, against, status.update)
        tables = [accuracy_table(report), comparison_table(report)]
        if tokenizer is not None:
            status.update("held-out text")
            corpus, tokens = run.corpus(), options.tokens or run.config.eval.final_tokens
            scores = evaluate(run.model(), corpus, run.config, tokens)
            tables.append(equivalents(scores, heldout_sizes(tokenizer, corpus), Path(options.tokenizer).name))
        path = run.folder / "eval" / "tasks.json"
        write_json(path, finite(report))
    for table in tables:
        if table is not None:
            print_table(console, table)
            console.print()
    console.print(f"wrote {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
