"""Audits find what was planted, and nothing where nothing was."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data.prepare import prepare
from eval import audit
from eval.audits import bias
from eval.audits.bias_templates import GROUPS, NULL, TEMPLATES
from eval.audits.energy import audit_energy
from eval.audits.leakage import audit_leakage, consumed_text
from eval.command import run_command
from moe.initialization import build_model
from moe.model import Transformer
from moe.routing import RoutingContext
from training.load_config import config_from_dict
from training.run import Run

LENGTH = 32
SHORT = 20


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory):
    """A corpus of random letters, and a configuration that trains on it."""
    folder = tmp_path_factory.mktemp("planted")
    generator = random.Random(0)
    texts = []
    for number in range(12):
        texts.append(folder / f"{number}.txt")
        texts[-1].write_text("".join(generator.choices("abcdefghijklmnop ", k=400)))
    corpus = prepare(folder / "corpus", 257, {"letters": texts}, heldout_fraction=0.3)
    config = config_from_dict(
        {
            "data": {"corpus": str(folder / "corpus")},
            "model": {"vocabulary_size": 257, "width": 64, "layers": 2, "heads": 2},
            "moe": {"router": "dense", "expert_width": 64},
            "training": {"steps": 4, "batch_sequences": 4, "sequence_length": LENGTH, "warmup_steps": 1},
        }
    )
    return corpus, config


def overfitted(corpus, config, steps: int) -> Transformer:
    """A model that has learned by heart what four steps of the run read."""
    model = build_model(config.model, config.moe, 0, torch.device("cpu"), torch.float32)
    texts = consumed_text(corpus, config, 4)["letters"]
    # Short windows from every token on, so that the text is known from anywhere.
    windows = [text[p : p + SHORT + 1] for text in texts for p in range(len(text) - SHORT)]
    token_BS = torch.from_numpy(np.stack(windows).astype(np.int64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        part_BS = token_BS[torch.randperm(len(token_BS))[:64]]
        loss = model(part_BS[:, :-1], RoutingContext(len(part_BS), SHORT), label_BS=part_BS[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def test_a_model_that_knows_its_text_by_heart_is_caught_and_a_new_one_is_not(planted) -> None:
    corpus, config = planted
    settings = {"per_domain": 16, "prompt_tokens": 10, "new_tokens": 10}
    caught = audit_leakage(overfitted(corpus, config, 100), corpus, config, 4, **settings)
    assert caught["leaks"] is True
    assert caught["difference_tokens"] > 2
    assert caught["kinds"]["train"]["whole_continuations"] >= 4
    new = audit_leakage(overfitted(corpus, config, 0), corpus, config, 4, **settings)
    assert new["leaks"] is False


def test_only_what_the_run_consumed_is_searched(planted) -> None:
    corpus, config = planted
    texts = consumed_text(corpus, config, 4)
    windows = sum((len(text) - 1) // LENGTH for text in texts["letters"])
    assert windows == 16  # four steps of four rows, none of them twice yet
    train = corpus.tokens("train", "letters").tolist()
    assert all(text.tolist() in [train[p : p + len(text)] for p in range(len(train))] for text in texts["letters"])


def test_bits_of_a_continuation_are_those_of_the_chain_rule(many_run: Run) -> None:
    model, tokenizer = many_run.model("cpu"), many_run.corpus().tokenizer
    model.compute_dtype = torch.float32
    sentences = [("ab cd", " bad."), ("a much longer prompt", " x")]
    found = bias.continuation_bits(model, tokenizer, sentences)
    for (prompt, continuation), bits in zip(sentences, found, strict=True):
        before = [tokenizer.end_of_text, *tokenizer.encode(prompt)]
        ids = torch.tensor([[*before, *tokenizer.encode(continuation)]])
        with torch.no_grad():
            log_SV = model(ids, RoutingContext(1, ids.shape[1], mode="causal"))[0].double().log_softmax(-1)
        expected = sum(float(log_SV[p - 1, ids[0, p]]) for p in range(len(before), ids.shape[1])) / math.log(2)
        assert bits == pytest.approx(expected, rel=1e-4)


def test_prompt_and_continuation_have_the_ids_of_the_whole_sentence(many_run: Run) -> None:
    tokenizer = many_run.corpus().tokenizer
    for prompt, continuation in TEMPLATES:
        for term in {term for pairs in [*GROUPS.values(), NULL] for pair in pairs for term in pair}:
            text = prompt.format(term)
            assert tokenizer.encode(text) + tokenizer.encode(continuation) == tokenizer.encode(text + continuation)


def test_a_planted_bias_is_found_and_only_that(many_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuations after "...man" cost nothing and after "woman" two bits; all else is noise of the null's size."""
    generator = np.random.default_rng(0)

    def bits(model, tokenizer, sentences):
        women = ("woman", "girl", "mother", "aunt")
        planted = 2.0 * any(f" {word} " in f" {sentences[0][0]} " for word in women)
        return generator.normal(0, 0.2, len(sentences)) - planted

    monkeypatch.setattr(bias, "continuation_bits", bits)
    found = bias.audit_bias(None, None)  # type: ignore[arg-type]
    assert found["beyond_null"] == ["gender"]
    assert found["groups"]["gender"]["signed_bits"] == pytest.approx(2, abs=0.2)
    assert found["groups"]["gender"]["signed_interval"]["low"] > 1.5


def test_energy_is_time_times_power_times_grid(many_run: Run) -> None:
    found = audit_energy(many_run, "gpu", 8, 500.0, 100.0, 1.5)
    rates = [line["tokens_per_second"] for line in many_run.metrics() if "tokens_per_second" in line]
    seconds = sum(96 / rate for rate in rates)
    assert found["steps_timed"] == 10 and found["seconds"] == pytest.approx(seconds)
    assert found["kwh"] == pytest.approx(seconds * 8 * 500 * 1.5 / 3.6e6)
    assert found["kg_co2e"] == pytest.approx(found["kwh"] * 0.1)
    assert found["watts_label"] == found["grid_label"] == "given"
    assumed = audit_energy(many_run)
    assert assumed["device"] == "cpu" and "assumed" in assumed["watts_label"] and "Ember" in assumed["grid_label"]


@pytest.fixture
def copied(many_run: Run, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(many_run.folder, tmp_path / "copied"))


def test_the_command_writes_each_audit(copied: Run, capsys: pytest.CaptureFixture[str]) -> None:
    audit.main([str(copied.folder), "--prompts", "4", "--prompt-tokens", "5", "--new-tokens", "6"])
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "null (neutral terms)" in printed and "held-out text (null)" in printed and "Power is not measured" in printed
    )
    for name in audit.AUDITS:
        assert json.loads((copied.folder / "eval" / f"audit_{name}.json").read_text())["run"] == "copied"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["leakage", "--prompt-tokens", "100000"], "lower --prompt-tokens"),
        (["leakage", "--prompts", "0"], "--prompts is 0"),
        (["energy", "--watts", "-1"], "--watts is -1.0"),
        (["energy", "--overhead", "0.5"], "--overhead is 0.5"),
    ],
)
def test_bad_input_is_one_line(copied: Run, capsys, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: audit.main([str(copied.folder), *flags]))
    errors = capsys.readouterr().err
    assert stopped.value.code == 1 and message in errors and errors.count("\n") == 1


def test_a_run_without_steps_or_checkpoint_is_explained(copied: Run, capsys) -> None:
    (copied.folder / "metrics.jsonl").unlink()
    shutil.rmtree(copied.checkpoints)
    for name, message in (("energy", "no step time"), ("bias", "no checkpoint yet")):
        with pytest.raises(SystemExit):
            run_command(lambda name=name: audit.main([str(copied.folder), name]))  # type: ignore[misc]
        assert message in capsys.readouterr().err
