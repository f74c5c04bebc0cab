"""The same questions give the same scores here and under lm-eval."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import Tokenizer, train_tokenizer
from eval.harness import main, require_no_code, results_table
from eval.tasks.encoding import Pair, encode_pair
from eval.tasks.loglikelihood import model_scorer
from eval.tasks.metrics import answer, mean_and_error
from eval.tasks.requests import Question
from moe.model import Transformer
from tests.eval.small_models import small_model
from training.run import Run

WORDS = ("the", "cat", "sat", "on", "mat;", "a", "dog", "(ran)", "é", "to\n")
LENGTH = 48
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: continuations
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: acc_bytes}}, {{metric: acc_mutual_info}}]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return train_tokenizer([" ".join(WORDS)] * 30, 290, path)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    return small_model("expert_choice", vocabulary_size=tokenizer.vocabulary_size)


def questions(count: int) -> list[Question]:
    """2 to 5 continuations of unequal lengths, contexts of 0 to 80 words: some too long, some that end in spaces."""
    generator = random.Random(4)
    made = []
    for number in range(count):
        context = " ".join(generator.choices(WORDS, k=generator.choice((0, 1, 5, 12, 80)))) + generator.choice(
            ("", " ")
        )
        choices = tuple(
            generator.choice((" ", "")) + " ".join(generator.choices(WORDS, k=generator.randint(1, 6)))
            for _ in range(generator.randint(2, 5))
        )
        if number % 10 == 9:  # the border is within a token
            context, choices = "the cat sat on the ca", ("t sat", "t", " the cat")
        made.append(Question(str(number), (context,) * len(choices), choices, generator.randrange(len(choices))))
    return made


def test_scores_equal_those_of_lm_eval(tokenizer: Tokenizer, model: Transformer, tmp_path: Path) -> None:
    """60 questions: log-likelihoods to 1e-5, metrics and standard errors exactly."""
    pytest.importorskip("lm_eval")
    from eval.tasks.lm_eval_model import HarnessModel, evaluate_tasks

    asked = questions(60)
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question.to_json()) + "\n" for question in asked))
    (tmp_path / "task.yaml").write_text(TASK.format(name="sums", data=data))
    found = evaluate_tasks(HarnessModel(model, tokenizer, LENGTH), ["sums"], [tmp_path], {})
    ours = answer(asked, tokenizer, model_scorer(model, LENGTH, tokenizer.token_bytes_V, rows=5))
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ours) == 60
    assert any(a.scored[0].lost for a in ours) and any(a.merged for a in ours)
    for sample, own in zip(samples, ours, strict=True):
        theirs = [response[0][0] for response in sample["resps"]]
        assert theirs == pytest.approx([-s.nats for s in own.scored + own.alone], abs=1e-5)
    for metric in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info"):
        mean, error = mean_and_error([a.correct(metric) for a in ours])
        assert 0 < mean < 1
        results = found["results"]["sums"]
        assert (results[f"{metric},none"], results[f"{metric}_stderr,none"]) == (mean, error)


def test_lm_evals_own_way_of_encoding_a_pair_is_ours_where_no_token_crosses_the_border(
    tokenizer: Tokenizer, model: Transformer
) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import TemplateLM

    from eval.tasks.lm_eval_model import HarnessModel

    adapter, compared = HarnessModel(model, tokenizer, LENGTH), 0
    for question in questions(60):
        for context, continuation in zip(question.contexts, question.continuations, strict=True):
            pair = encode_pair(tokenizer, context, continuation)
            if context.strip() and not pair.merged:
                theirs = TemplateLM._encode_pair(adapter, context, continuation)
                assert ([tokenizer.end_of_text, *theirs[0]], theirs[1]) == (pair.context, pair.continuation)
                compared += 1
    assert compared > 60


class Asked:
    """A request as lm-eval makes them."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def test_rolling_likelihood_and_generation(tokenizer: Tokenizer, model: Transformer) -> None:
    pytest.importorskip("lm_eval")
    from eval.tasks.lm_eval_model import HarnessModel

    adapter = HarnessModel(model, tokenizer, LENGTH)
    text = "the cat sat on a mat; a dog " * 20
    short, nothing, long = adapter.loglikelihood_rolling([Asked("the cat"), Asked(""), Asked(text)])
    assert short == pytest.approx(adapter.loglikelihood([Asked("", "the cat")], disable_tqdm=True)[0][0], abs=1e-5)
    assert nothing == 0.0
    ids = [tokenizer.end_of_text, *tokenizer.encode(text)]
    scorer = model_scorer(model, LENGTH, tokenizer.token_bytes_V)
    assert long == pytest.approx(-scorer([Pair(ids[:1], ids[1:])])[0].nats, abs=1e-4)

    whole, again, cut = adapter.generate_until(
        [
            Asked("the cat", {"max_gen_toks": 12}),
            Asked("the cat", {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0, "until": []}),
            Asked("the cat" * 99, {"max_gen_toks": 12}),
        ]
    )
    assert whole == again and whole and isinstance(cut, str)
    stop = whole[len(whole) // 2]
    (stopped,) = adapter.generate_until([Asked("the cat", {"max_gen_toks": 12, "until": ["never", stop]})])
    assert stopped == whole[: whole.index(stop)]
    with pytest.raises(ValueError, match="settings num_beams are not supported"):
        adapter.generate_until([Asked("a", {"num_beams": 4})])
    with pytest.raises(ValueError, match="max_gen_toks is 48; allowed are 1 to 47"):
        adapter.generate_until([Asked("a", {"max_gen_toks": 48})])


CODE = {
    "!function": "doc_to_text: !function utils.text",
    "class": "task: x\nclass: !function task.Task",
    "python object": "doc_to_text: !!python/name:os.system",
    "include elsewhere": "include: ../other.yaml",
}


@pytest.mark.parametrize("case", CODE)
def test_a_task_folder_that_runs_code_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "task.yaml").write_text(f"task: x\n{CODE[case]}\n")
    with pytest.raises(ValueError, match="give --trust-code if you trust it"):
        require_no_code(tmp_path)


def test_a_plain_task_folder_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK.format(name="x", data="/somewhere/x.jsonl") + "include: base.yaml\n")
    (tmp_path / "notes.md").write_text("!function\n")
    require_no_code(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        require_no_code(tmp_path / "missing")


def test_without_lm_eval_the_command_says_what_to_install(small_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "eval.tasks.lm_eval_model", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install 'lm-eval>=0.4.13'"):
        main([str(small_run.folder), "--tasks", "choir_continuation"])


def test_the_table_has_every_metric_with_its_error() -> None:
    values = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.05, "bits_per_byte,none": 1.5, "sample_len": 9}
    values["bits_per_byte_stderr,none"] = "N/A"
    table = results_table({"run": "r", "step": 3, "results": {"x": values}})
    assert table.rows == [("x", "acc", "25.0 ± 5.0%"), ("x", "bits_per_byte", "1.5000")]
