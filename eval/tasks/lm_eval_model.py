"""A model of this project as lm-eval sees one. Needs lm-eval; `eval.harness` says so where it is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before lm-eval imports `datasets`, which reads them once: nothing is looked up or downloaded.
for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(variable, "1")

import yaml  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from data.tokenizer import Tokenizer  # noqa: E402
from eval.generate import generate  # noqa: E402
from eval.tasks.encoding import Pair, encode_pair  # noqa: E402
from eval.tasks.loglikelihood import model_scorer  # noqa: E402
from moe.model import Transformer  # noqa: E402

BOOTSTRAPS = 1000  # for standard errors without a closed form; those of means have one
NEW_TOKENS = 64  # where a generation task names no number


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
        kept: dict[str, Any] = {name: settings.pop(name) for name in ("top_k", "top_p") if name in settings}
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
        options: dict[str, Any] = (
            {"temperature": 1.0 if temperature is None else float(temperature), **kept} if sample else {}
        )
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
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"there is no task {name}; there are {', '.join(manager.all_tasks)}")
    tasks: list[Any] = []
    for name in names:
        if name not in data:
            tasks.append(name)
            continue
        # A dictionary is a whole configuration to lm-eval, not changes to a named one.
        configuration = yaml.safe_load(Path(manager.task_index[name].yaml_path).read_text(encoding="utf-8"))
        tasks.append(configuration | {"dataset_kwargs": {"data_files": {"test": str(data[name])}}})
    found = simple_evaluate(
        model, tasks=tasks, limit=limit, task_manager=manager, bootstrap_iters=BOOTSTRAPS, cache_requests=False
    )
    assert found is not None
    return found
