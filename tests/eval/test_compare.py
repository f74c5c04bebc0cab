"""Two runs on one text: worse only where documents agree that it is."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.prepare import prepare
from eval import compare
from eval.command import run_command
from eval.compare import TOTAL, differences, require_same_documents
from eval.likelihood import Likelihood, Scores
from training.run import Run, RunError


def scores(bits: dict[str, list[float]]) -> Scores:
    """Documents of 100 bytes and so many bits a byte."""
    made = Scores()
    for name, values in bits.items():
        documents = {n: Likelihood(v * 100 * math.log(2), 40, 100) for n, v in enumerate(values)}
        made.documents[name] = documents
        made.domains[name] = sum(documents.values(), Likelihood())
    return made


def test_what_all_documents_share_cancels() -> None:
    """Documents differ by bits, the runs by a hundredth: the paired interval sees it, an unpaired one could not."""
    generator = np.random.default_rng(0)
    base = generator.uniform(1, 5, 12)
    a = scores({"x": list(base)})
    b = scores({"x": list(base + 0.01 + 0.001 * generator.standard_normal(12))})
    found = differences(a, b)
    row = found["rows"]["x"]
    assert row["difference"] == pytest.approx(0.01, abs=0.001)
    assert 0.005 < row["interval"]["low"] < row["difference"] < row["interval"]["high"] < 0.015
    assert found["worse"] == ["x", TOTAL]
    assert differences(a, b, margin=0.02)["worse"] == []
    assert differences(b, a)["rows"]["x"]["verdict"] == "better"


def test_runs_that_differ_by_chance_are_rarely_called_worse() -> None:
    """Six domains and their total, 120 times: a family-wise level of 2.5%."""
    generator = np.random.default_rng(1)
    called = 0
    for _ in range(120):
        base = {f"d{n}": generator.uniform(1, 3, 10) for n in range(6)}
        a = scores({name: list(v) for name, v in base.items()})
        b = scores({name: list(v + 0.1 * generator.standard_normal(10)) for name, v in base.items()})
        called += bool(differences_quick(a, b)["worse"])
    assert called <= 8  # 6.7%: three standard errors above 2.5%


def differences_quick(a: Scores, b: Scores) -> dict:
    draws, compare.RatioBootstrap.__init__.__defaults__ = compare.RatioBootstrap.__init__.__defaults__, (0, 300)
    try:
        return differences(a, b)
    finally:
        compare.RatioBootstrap.__init__.__defaults__ = draws


def test_one_worse_domain_is_found_beside_better_ones() -> None:
    a = scores({"bad": [2.0] * 8, "good": [2.0] * 8})
    spread = np.linspace(-0.01, 0.01, 8)
    b = scores({"bad": list(2.2 + spread), "good": list(1.5 + spread)})
    found = differences(a, b)
    assert found["worse"] == ["bad"]
    assert found["rows"][TOTAL]["difference"] == pytest.approx(-0.15)


def test_a_domain_of_one_document_is_not_judged_alone() -> None:
    found = differences(scores({"one": [2.0], "x": [2.0] * 6}), scores({"one": [9.0], "x": [2.0] * 6}))
    assert found["rows"]["one"]["verdict"] == "not judged"
    assert "1 document" in found["rows"]["one"]["interval"]["reason"]
    assert found["worse"] == []


def test_other_text_is_refused() -> None:
    a = scores({"x": [2.0] * 6})
    with pytest.raises(ValueError, match="other text"):
        differences(a, scores({"x": [2.0] * 5}))
    with pytest.raises(ValueError, match="other domains"):
        differences(a, scores({"y": [2.0] * 6}))


def status(*arguments: object) -> int:
    try:
        run_command(lambda: compare.main([str(a) for a in arguments]), compare.EXIT_BAD_INPUT)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.fixture
def copied(many_run: Run, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(many_run.folder, tmp_path / "copied"))


def test_a_run_is_not_worse_than_itself(many_run: Run, copied: Run, capsys) -> None:
    assert status(many_run.folder, copied.folder, "--fail-if-worse-by", 0) == 0
    saved = json.loads((copied.folder / "eval" / "compare.json").read_text())
    assert saved["worse"] == [] and saved["rows"][TOTAL]["difference"] == 0
    assert "B is not shown to be worse" in capsys.readouterr().out


def test_a_worse_run_fails_beyond_its_margin_only(many_run: Run, copied: Run, monkeypatch, tmp_path, capsys) -> None:
    """The second run scored gets 0.5 bits a byte more."""
    real, calls = compare.evaluate, []

    def worse(*arguments, **named):
        found = real(*arguments, **named)
        calls.append(1)
        if len(calls) % 2 == 0:
            for name, documents in found.documents.items():
                found.documents[name] = {n: p + Likelihood(0.5 * math.log(2) * p.bytes) for n, p in documents.items()}
                found.domains[name] += Likelihood(0.5 * math.log(2) * found.domains[name].bytes)
        return found

    monkeypatch.setattr(compare, "evaluate", worse)
    output = tmp_path / "new" / "out.json"
    common = (many_run.folder, copied.folder, "--tokens", 300, "--output", output)
    assert status(*common) == 0  # no margin was given
    assert json.loads(output.read_text())["worse"] == ["low", "high", TOTAL]
    assert status(*common, "--fail-if-worse-by", 0.1) == 4
    assert status(*common, "--fail-if-worse-by", 0.6) == 0
    assert not (copied.folder / "eval").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--fail-if-worse-by", "-1"], "allowed are 0 and above"),
        (["--fail-if-worse-by", "nan"], "allowed are 0 and above"),
        (["--tokens", "0"], "--tokens is 0"),
    ],
)
def test_bad_numbers_exit_with_2(many_run: Run, capsys, flags: list[str], message: str) -> None:
    assert status(many_run.folder, many_run.folder, *flags) == 2
    assert message in capsys.readouterr().err


def test_bad_runs_exit_with_2(many_run: Run, small_run: Run, copied: Run, capsys) -> None:
    assert status(many_run.folder, "nowhere") == 2
    assert status(many_run.folder, small_run.folder) == 2
    assert "not the same bytes" in capsys.readouterr().err
    shutil.rmtree(copied.checkpoints)
    assert status(many_run.folder, copied.folder) == 2
    assert "no checkpoint yet" in capsys.readouterr().err


def test_exit_statuses_are_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    assert "Exit status: 0" in capsys.readouterr().out


def test_other_tokenizers_of_the_same_documents_are_allowed(tmp_path: Path) -> None:
    texts = []
    for number in range(20):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_text(f"document {number}: " + "some words of text, " * (number + 3) + "\n")
    one, two = (prepare(tmp_path / f"c{v}", v, {"x": texts}, heldout_fraction=0.3) for v in (270, 290))
    assert one.sha256 != two.sha256
    require_same_documents(one, two)
    other = prepare(tmp_path / "other", 270, {"x": texts}, heldout_fraction=0.1)
    with pytest.raises(RunError, match="not the same bytes"):
        require_same_documents(one, other)
