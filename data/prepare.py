"""Make a corpus: `python -m data.prepare --output corpora/default --vocabulary-size 2048`.

Without `--input`, the built-in domains are read from installed packages (see
`sources`). With `--input NAME=FILE_OR_GLOB`, only those files are read.

A build happens in a temporary folder beside the output and is renamed when it
is complete, so an output folder is always whole. The same command again finds
the corpus and does nothing; other settings are refused without `--overwrite`.
"""

import argparse
import contextlib
import glob
import hashlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from data.build import TOKENIZER_SAMPLE_BYTES, DomainInput, build_corpus
from data.corpus import Corpus, read_description, require_domain_name
from data.documents import Document, ReadReport, read_documents, require_input_file
from data.errors import DataError
from data.sources import SOURCES
from data.tokenizer import require_vocabulary_size

PIPELINE_VERSION = 1
"""Raised when the same input would give other tokens, so that older corpora are rebuilt."""


def prepare(
    output: str | Path,
    vocabulary_size: int,
    inputs: dict[str, list[Path]] | None = None,
    *,
    domains: Sequence[str] | None = None,
    heldout_fraction: float = 0.02,
    max_megabytes_per_domain: float | None = None,
    seed: int = 0,
    text_key: str = "text",
    overwrite: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Build a corpus, or open it if it was built with the same settings.

    Args:
        output: the corpus folder.
        vocabulary_size: token ids to train; 257 or more. Little text may give fewer.
        inputs: domain name -> .txt, .jsonl or .jsonl.gz files; None reads the
            built-in domains.
        domains: which built-in domains; None is all of them.
        heldout_fraction: the part of each domain's bytes to hold out, 0 to 0.5.
        max_megabytes_per_domain: documents are taken in order up to this many
            million bytes, the last one cut; None takes all.
        seed: of the held-out choice.
        text_key: the key of the text in .jsonl lines.
        overwrite: replace a corpus that was built with other settings.
        log: takes lines about what is done.

    Returns:
        The open `Corpus`.

    Raises:
        DataError: a setting or an input cannot be used; or the output exists and
            is not this corpus.
    """
    output = Path(output).resolve()
    _require_settings(vocabulary_size, heldout_fraction, max_megabytes_per_domain, seed)
    domain_inputs = _built_in_inputs(domains) if inputs is None else _file_inputs(inputs, text_key)
    settings = {
        "pipeline_version": PIPELINE_VERSION,
        "vocabulary_size": vocabulary_size,
        "tokenizer_sample_bytes": TOKENIZER_SAMPLE_BYTES,
        "heldout_fraction": heldout_fraction,
        "max_megabytes_per_domain": max_megabytes_per_domain,
        "seed": seed,
        "text_key": None if inputs is None else text_key,
        "domains": {domain.name: domain.source for domain in domain_inputs},
    }
    existing = _existing_corpus(output, settings, overwrite)
    if existing is not None:
        log(f"already built: {output}")
        return existing
    with _building_folder(output) as folder:
        build_corpus(folder, domain_inputs, settings, log)
        _move_into_place(folder, output, overwrite)
    _require_same_settings(output, settings)
    return Corpus.open(output)


def _require_settings(vocabulary_size: int, heldout_fraction: float, megabytes: float | None, seed: int) -> None:
    require_vocabulary_size(vocabulary_size)
    if not 0 <= heldout_fraction <= 0.5:
        raise DataError(f"the held-out fraction is {heldout_fraction}; allowed are 0 to 0.5")
    if megabytes is not None and not megabytes >= 0.001:
        raise DataError(f"the most megabytes per domain are {megabytes}; allowed are 0.001 and up")
    if seed < 0:
        raise DataError(f"the seed is {seed}; allowed are integers >= 0")


def _built_in_inputs(domains: Sequence[str] | None) -> list[DomainInput]:
    chosen = list(SOURCES) if domains is None else list(dict.fromkeys(domains))
    for name in chosen:
        if name not in SOURCES:
            raise DataError(
                f'there is no built-in domain "{name}"; there are {", ".join(SOURCES)} '
                "(for files of your own use --input)"
            )
    return [DomainInput(name, SOURCES[name].description(), SOURCES[name].documents) for name in chosen]


def _file_inputs(inputs: dict[str, list[Path]], text_key: str) -> list[DomainInput]:
    if not inputs:
        raise DataError("there are no inputs; give at least one domain with files")
    domain_inputs = []
    for name, paths in inputs.items():
        require_domain_name(name)
        paths = [Path(path) for path in paths]
        if not paths:
            raise DataError(f'the domain "{name}" has no input files; give at least one')
        for path in paths:
            require_input_file(path)

        def documents(report: ReadReport, name: str = name, paths: list[Path] = paths) -> Iterator[Document]:
            for path in paths:
                yield from read_documents(path, name, report, text_key)

        # Content, not place or time: the same files elsewhere are the same corpus.
        files = [{"file": path.name, "sha256": _file_sha256(path)} for path in paths]
        source = {"content": "files of the user", "licence": "not stated", "files": files}
        domain_inputs.append(DomainInput(name, source, documents))
    return domain_inputs


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _existing_corpus(output: Path, settings: dict[str, Any], overwrite: bool) -> Corpus | None:
    """Give the corpus at `output` if it is the one asked for; None if there is room to build."""
    if output.is_file():
        raise DataError(f"{output} is a file; choose another --output")
    if not output.exists() or not any(output.iterdir()):
        return None
    if not (output / "corpus.json").is_file():
        raise DataError(f"{output} exists and is not a corpus; it is left alone, choose another --output")
    try:
        _require_same_settings(output, settings)
        return Corpus.open(output)
    except DataError as error:
        if overwrite:
            return None
        raise DataError(f"{error}; choose another --output, or --overwrite to replace it") from error


def _require_same_settings(output: Path, settings: dict[str, Any]) -> None:
    differences = _differences(read_description(output).get("settings"), settings)
    if differences:
        raise DataError(f"{output} was built with other settings: {'; '.join(differences)}")


def _differences(existing: object, wanted: object, name: str = "") -> list[str]:
    """Name each setting that differs, with both values."""
    if isinstance(existing, dict) and isinstance(wanted, dict):
        keys = list(dict.fromkeys([*existing, *wanted]))
        return [
            difference
            for key in keys
            for difference in _differences(existing.get(key), wanted.get(key), f"{name}.{key}" if name else str(key))
        ]
    if isinstance(existing, list) and isinstance(wanted, list) and len(existing) == len(wanted):
        return _differences(dict(enumerate(existing)), dict(enumerate(wanted)), name)
    if existing == wanted:
        return []
    return [f"{name} is {_short(existing)}, asked for {_short(wanted)}"]


def _short(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict | list):
        return f"({len(value)} entries)"
    return str(value)[:16]


@contextlib.contextmanager
def _building_folder(output: Path) -> Iterator[Path]:
    """Make a temporary folder beside `output`, removed again if it was not renamed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.building-{socket.gethostname()}-"
    for left in output.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_running(left.name.removeprefix(prefix)):  # its build was killed
            shutil.rmtree(left, ignore_errors=True)
    folder = output.parent / f"{prefix}{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: str) -> bool:
    if os.name != "posix" or not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _move_into_place(folder: Path, output: Path, overwrite: bool) -> None:
    replaced = None
    if overwrite and output.exists():
        replaced = folder.with_name(f"{folder.name}-replaced")
        os.rename(output, replaced)
    try:
        os.rename(folder, output)
    except OSError:
        if replaced is not None:
            os.rename(replaced, output)
            raise
        if not (output / "corpus.json").is_file():
            raise
        # Another build of it was first; the caller checks that it is the same corpus.
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def expand_inputs(arguments: Sequence[str]) -> dict[str, list[Path]]:
    """Turn NAME=FILE_OR_GLOB arguments into files by domain, sorted within each.

    Raises:
        DataError: an argument has no "=", or nothing matches.
    """
    inputs: dict[str, list[Path]] = {}
    for argument in arguments:
        name, equals, pattern = argument.partition("=")
        if not equals or not name or not pattern:
            raise DataError(f'--input is "{argument}"; give NAME=FILE_OR_GLOB')
        # A file whose own name has glob characters in it is taken literally.
        matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
        if not matches:
            raise DataError(f'--input {name}: no file matches "{pattern}"')
        inputs.setdefault(name, []).extend(Path(match) for match in sorted(matches))
    return inputs


def print_summary(corpus: Corpus) -> None:
    """Print a table of the corpus's domains."""
    # Only the command needs rich; `prepare` is also called by programs.
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("domain")
    for heading in (
        "documents",
        "MB",
        "tokens",
        "bytes/\ntoken",
        "held-out\ntokens",
        "near-dup.\nremoved",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    sums = [0] * 5
    for name, entry in corpus.description["domains"].items():
        train, heldout = entry["train"], entry["heldout"]
        numbers = [
            entry["documents"],
            train["bytes"] + heldout["bytes"],
            train["tokens"] + heldout["tokens"],
            heldout["tokens"],
            entry["duplicates_removed"],
        ]
        sums = [total + number for total, number in zip(sums, numbers, strict=True)]
        table.add_row(name, *_cells(numbers))
    table.add_section()
    table.add_row("all", *_cells(sums))
    console = Console()
    console.print(f"{corpus.folder}", soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    console.print(
        f"vocabulary {corpus.vocabulary_size:,}, sha256 {corpus.sha256}",
        soft_wrap=True,
        highlight=False,
    )


def _cells(numbers: list[int]) -> list[str]:
    documents, size, tokens, heldout_tokens, duplicates = numbers
    return [
        f"{documents:,}",
        f"{size / 1e6:,.2f}",
        f"{tokens:,}",
        f"{size / tokens:.2f}",
        f"{heldout_tokens:,}",
        f"{duplicates:,}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data.prepare",
        description="Make a corpus of token files from installed packages or files of your own.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--output", required=True, metavar="FOLDER", help="the corpus folder")
    add("--vocabulary-size", type=int, required=True, metavar="N", help="257 or more")
    add("--input", action="append", default=[], metavar="NAME=FILE_OR_GLOB",
        help=".txt, .jsonl or .jsonl.gz files of the domain NAME; repeatable; "
        "without it the built-in domains are read")  # fmt: skip
    add("--domains", nargs="+", metavar="NAME", help=f"built-in domains: {', '.join(SOURCES)}")
    add("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl lines (text)")
    add("--heldout-fraction", type=float, default=0.02, metavar="X",
        help="part of each domain's bytes to hold out (0.02)")  # fmt: skip
    add("--max-megabytes-per-domain", type=float, metavar="N", help="take no more text than this")
    add("--seed", type=int, default=0, metavar="N", help="of the held-out choice (0)")
    add("--overwrite", action="store_true", help="replace a corpus built with other settings")
    return parser


def _interrupt(signal_number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; give its exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # so that a stopped build cleans up
    try:
        if options.input and options.domains:
            raise DataError("--input and --domains exclude each other; give one of them")
        corpus = prepare(
            options.output,
            options.vocabulary_size,
            expand_inputs(options.input) or None,
            domains=options.domains,
            heldout_fraction=options.heldout_fraction,
            max_megabytes_per_domain=options.max_megabytes_per_domain,
            seed=options.seed,
            text_key=options.text_key,
            overwrite=options.overwrite,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print_summary(corpus)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
