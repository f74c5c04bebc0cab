"""The prepare command: whole corpora or none, errors of one line, nothing done twice."""

import os
import signal
from pathlib import Path

import pytest

from data import build
from data import prepare as prepare_module
from data.corpus import Corpus
from data.errors import DataError
from data.prepare import expand_inputs, prepare
from data.tokenizer import train_tokenizer


@pytest.fixture
def inputs(write_jsonl, make_text):
    """One domain of 30 documents."""
    return {"d": [write_jsonl("d.jsonl", [make_text(seed, 10) for seed in range(30)])]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_same_input_gives_the_same_corpus(inputs, tmp_path):
    first = prepare(tmp_path / "a", 300, inputs)
    second = prepare(tmp_path / "b", 300, inputs)
    assert first.sha256 == second.sha256
    assert prepare(tmp_path / "c", 300, inputs, seed=1).sha256 != first.sha256


def test_an_existing_corpus_is_recognised_and_not_touched(inputs, tmp_path):
    lines: list[str] = []
    first = prepare(tmp_path / "a", 300, inputs)
    time_before = (tmp_path / "a/corpus.json").stat().st_mtime_ns
    again = prepare(tmp_path / "a", 300, inputs, log=lines.append)
    assert again.sha256 == first.sha256
    assert lines == [f"already built: {tmp_path / 'a'}"]
    assert (tmp_path / "a/corpus.json").stat().st_mtime_ns == time_before


def test_other_settings_are_named_and_need_overwrite(inputs, tmp_path, write_jsonl, make_text):
    prepare(tmp_path / "a", 300, inputs)
    with pytest.raises(DataError, match="vocabulary_size is 300, asked for 280.*--overwrite"):
        prepare(tmp_path / "a", 280, inputs)
    with pytest.raises(DataError, match="seed is 0, asked for 7"):
        prepare(tmp_path / "a", 300, inputs, seed=7)
    write_jsonl("d.jsonl", [make_text(seed, 10) for seed in range(31)])
    with pytest.raises(DataError, match="domains.d.files.0.sha256 is"):
        prepare(tmp_path / "a", 300, inputs)
    assert prepare(tmp_path / "a", 280, inputs, overwrite=True).vocabulary_size == 280
    assert names(tmp_path) == ["a", "d.jsonl"]


def test_a_folder_that_is_not_a_corpus_is_never_replaced(inputs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="is not a corpus; it is left alone"):
            prepare(tmp_path / "mine", 300, inputs, overwrite=overwrite)
    assert names(tmp_path / "mine") == ["thesis.tex"]
    with pytest.raises(DataError, match="is a file"):
        prepare(tmp_path / "mine/thesis.tex", 300, inputs)


def test_a_damaged_corpus_is_reported_and_can_be_replaced(inputs, tmp_path):
    corpus = prepare(tmp_path / "a", 300, inputs)
    with open(tmp_path / "a/train/d.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match=r"expected .* found .*--overwrite to replace"):
        prepare(tmp_path / "a", 300, inputs)
    assert prepare(tmp_path / "a", 300, inputs, overwrite=True).sha256 == corpus.sha256


@pytest.mark.parametrize("other_seed", [0, 1])
def test_of_two_builds_at_once_the_first_to_finish_stays(inputs, tmp_path, monkeypatch, other_seed):
    real_build = prepare_module.build_corpus
    other = prepare(tmp_path / "other", 300, inputs, seed=other_seed)

    def build_while_another_finishes(*arguments):
        real_build(*arguments)
        os.rename(tmp_path / "other", tmp_path / "a")

    monkeypatch.setattr(prepare_module, "build_corpus", build_while_another_finishes)
    if other_seed == 0:
        assert prepare(tmp_path / "a", 300, inputs, seed=0).sha256 == other.sha256
    else:
        with pytest.raises(DataError, match="seed is 1, asked for 0"):
            prepare(tmp_path / "a", 300, inputs, seed=0)
    assert names(tmp_path) == ["a", "d.jsonl"]


def test_near_duplicates_are_removed_before_the_split(tmp_path, write_jsonl, make_text):
    texts = [make_text(seed, 10) for seed in range(20)]
    copies = [text + "One more line at the end.\n" for text in texts]
    first = write_jsonl("d.jsonl", texts + copies)
    second = write_jsonl("e.jsonl", [*copies, make_text(99, 10), make_text(98, 10)])
    corpus = prepare(tmp_path / "a", 300, {"d": [first], "e": [second]})
    entries = corpus.description["domains"]
    assert (entries["d"]["documents"], entries["d"]["duplicates_removed"]) == (20, 20)
    # Across domains too: what is held out in one must not be trained on in another.
    assert (entries["e"]["documents"], entries["e"]["duplicates_removed"]) == (2, 20)


def test_text_is_kept_to_the_byte(tmp_path, write_jsonl, make_text):
    texts = [f"{make_text(seed, 5)}\r\nüñí <|endoftext|> {seed}" for seed in range(12)]
    corpus = prepare(tmp_path / "a", 300, {"d": [write_jsonl("d.jsonl", texts)]})
    found = []
    for split in ("train", "heldout"):
        file = corpus.file(split, "d")
        found += [corpus.tokenizer.decode(file.document(number)) for number in range(len(file.start_M))]
    texts = [text.replace("\r\n", "\n") for text in texts]
    assert sorted(found) == sorted(texts)
    text_bytes = sum(corpus.text_bytes(split, "d") for split in ("train", "heldout"))
    assert text_bytes == sum(len(text.encode()) for text in texts)


def test_the_tokenizer_is_trained_on_equal_bounded_shares_of_training_text(
    tmp_path, write_jsonl, make_text, monkeypatch
):
    seen: list[str] = []

    def train_and_remember(texts, *arguments):
        seen.extend(texts)
        return train_tokenizer(seen, *arguments)

    monkeypatch.setattr(build, "TOKENIZER_SAMPLE_BYTES", 6000)
    monkeypatch.setattr(build, "train_tokenizer", train_and_remember)
    small = write_jsonl("small.jsonl", [f"small {make_text(seed, 4)}" for seed in range(5)])
    large = write_jsonl("large.jsonl", [f"large {make_text(seed, 20)}" for seed in range(10, 60)])
    corpus = prepare(tmp_path / "a", 300, {"small": [small], "large": [large]})
    assert sum(map(len, seen)) == 6000
    small_bytes = sum(len(text) for text in seen if text.startswith("small"))
    assert small_bytes == corpus.text_bytes("train", "small") < 3000  # gives all it has
    heldout = corpus.file("heldout", "large")
    for number in range(len(heldout.start_M)):
        assert corpus.tokenizer.decode(heldout.document(number)) not in seen


def test_a_limit_takes_the_first_megabytes(inputs, tmp_path):
    corpus = prepare(tmp_path / "a", 300, inputs, max_megabytes_per_domain=0.003)
    total = sum(corpus.text_bytes(split, "d") for split in ("train", "heldout"))
    assert 2900 <= total <= 3000


def test_nothing_is_held_out_when_the_fraction_is_0(inputs, tmp_path):
    corpus = prepare(tmp_path / "a", 300, inputs, heldout_fraction=0)
    assert len(corpus.tokens("heldout", "d")) == 0


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"vocabulary_size": 10}, "vocabulary size is 10"),
        ({"heldout_fraction": 0.9}, "fraction is 0.9; allowed are 0 to 0.5"),
        ({"heldout_fraction": float("nan")}, "fraction is nan"),
        ({"max_megabytes_per_domain": 0}, "allowed are 0.001"),
        ({"seed": -1}, "seed is -1"),
        ({"inputs": {"../up": [Path("x.txt")]}}, 'domain name "../up"'),
        ({"inputs": {"d": []}}, "no input files"),
        ({"inputs": {}}, "there are no inputs"),
        ({"inputs": None, "domains": ["nope"]}, "no built-in domain"),
    ],
)
def test_settings_out_of_range_are_refused(inputs, tmp_path, arguments, reason):
    call = {"vocabulary_size": 300, "inputs": inputs} | arguments
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path / "a", **call)
    assert names(tmp_path) == ["d.jsonl"]


def test_globs_are_expanded_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "odd[1].txt"):
        (tmp_path / name).write_text("x")
    found = expand_inputs([f"d={tmp_path}/*.txt", f"e={tmp_path}/odd[1].txt"])
    assert [path.name for path in found["d"]] == ["a.txt", "b.txt", "odd[1].txt"]
    assert [path.name for path in found["e"]] == ["odd[1].txt"]
    for argument in ("no-equals", "=x", "d=", f"d={tmp_path}/*.none"):
        with pytest.raises(DataError):
            expand_inputs([argument])


def test_F01_the_command_reports_what_it_skipped(run_prepare, tmp_path):
    (tmp_path / "d.jsonl").write_text(
        '{"text": ""}\n{"text": "a"}\n{"text": "   "}\n{"content": "b"}\n{"text": "c"}\n{"text": ""}\n'
    )
    done = run_prepare("--output", tmp_path / "out", "--vocabulary-size", 300, "--input", f"d={tmp_path}/d.jsonl")
    assert done.returncode == 0, done.stderr
    assert "2 documents" in done.stderr and "3 blank, 1 error lines" in done.stderr
    assert 'd.jsonl, line 4: no key "text"' in done.stderr
    assert "bytes/" in done.stdout
    assert Corpus.open(tmp_path / "out").domains == ["d"]


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("d.jsonl", b'{"text": ""}\n{"text": " "}\n', "no tokens written"),
        ("d.jsonl", b'{"body": "x"}\n', 'no tokens written.*no key "text" (its keys: "body")'),
        ("d.txt", b"", "is an empty file"),
        ("d.txt", b"ab\0cd", "NUL byte"),
        ("d.txt", "text".encode("utf-16"), "iconv"),
        ("d.txt", b"x", "too short to hold out"),
    ],
)
def test_F01_unusable_input_is_one_line_and_leaves_nothing(run_prepare, tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    done = run_prepare("--output", tmp_path / "out", "--vocabulary-size", 300, "--input", f"d={tmp_path / name}")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr
    for part in reason.split(".*"):
        assert part in errors[0]
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_F02_an_interrupted_build_leaves_no_corpus(start_python, tmp_path, inputs, signal_number):
    program = """
import sys, time
from data import build, prepare
real_train = build.train_tokenizer
def slow_train(*arguments):
    print("training", flush=True)
    time.sleep(60)
build.train_tokenizer = slow_train
sys.exit(prepare.main(sys.argv[1:]))
"""
    arguments = ["--output", tmp_path / "out", "--vocabulary-size", 300, "--input"]
    process = start_python(program, *arguments, f"d={inputs['d'][0]}")
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal_number)
    process.wait()
    assert not (tmp_path / "out").exists()
    if signal_number == signal.SIGTERM:
        assert process.returncode == 130
        assert names(tmp_path) == ["d.jsonl"]
    # The next build clears away what a killed one left.
    prepare(tmp_path / "out", 300, inputs)
    assert names(tmp_path) == ["d.jsonl", "out"]


def test_read_only_parents_are_one_line(run_prepare, tmp_path, inputs):
    if os.name != "posix" or os.geteuid() == 0:
        (tmp_path / "file").write_text("x")  # root may write anywhere: use a file as the parent
        parent = tmp_path / "file"
    else:
        parent = tmp_path / "closed"
        parent.mkdir(mode=0o500)
    done = run_prepare("--output", parent / "out", "--vocabulary-size", 300,
                       "--input", f"d={inputs['d'][0]}")  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
