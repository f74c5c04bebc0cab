"""Text to a corpus folder: gather, deduplicate, split, train the tokenizer, encode.

Every stage streams. The kept documents wait in one spool file, so memory holds
one document, the MinHash signatures, and the tokenizer's sample, not the corpus.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data.corpus import FORMAT_VERSION, SPLITS, Corpus, corpus_sha256, write_description
from data.deduplicate import Deduplicator
from data.documents import Document, ReadReport
from data.errors import DataError
from data.split import HeldOut, choose_held_out, cut_text, rank_key
from data.token_file import TokenHeader, write_token_file
from data.tokenizer import Tokenizer, train_tokenizer

TOKENIZER_SAMPLE_BYTES = 20_000_000
"""The tokenizer is trained on at most this much training text, shared equally by
the domains (a small one gives all it has), so that a long corpus costs no more
and a large domain does not take the whole vocabulary."""


@dataclass(frozen=True)
class DomainInput:
    """A domain before it is read.

    Attributes:
        name: of the domain.
        source: what corpus.json says about where it comes from.
        documents: reads it, counting what it skips in the report.
    """

    name: str
    source: dict[str, Any]
    documents: Callable[[ReadReport], Iterator[Document]]


@dataclass
class GatheredDomain:
    """A domain after reading: its documents wait in the spool."""

    name: str
    source: dict[str, Any]
    report: ReadReport = field(default_factory=ReadReport)
    duplicates_removed: int = 0
    spool_keys: list[int] = field(default_factory=list)
    rank_keys: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # UTF-8 bytes
    held_out: HeldOut = field(default_factory=lambda: HeldOut(frozenset()))

    def texts(self, spool: "Spool", split: str) -> Iterator[str]:
        """Yield the texts of one split, in the order in which they were read."""
        for document in range(len(self.spool_keys)):
            text = self.text(spool, split, document)
            if text is not None:
                yield text

    def text(self, spool: "Spool", split: str, document: int) -> str | None:
        """Give a document's text in a split, or None if it has none there."""
        if document == self.held_out.cut_document:
            text = spool.read(self.spool_keys[document])
            return cut_text(text, self.held_out.cut_bytes)[SPLITS.index(split)]
        if (document in self.held_out.documents) != (split == "heldout"):
            return None
        return spool.read(self.spool_keys[document])


class Spool:
    """Texts in a temporary file, by number."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._ends = [0]

    def append(self, text: str) -> int:
        """Store `text` and give its number."""
        self._file.seek(self._ends[-1])
        self._ends.append(self._ends[-1] + self._file.write(text.encode("utf-8")))
        return self.next_key - 1

    @property
    def next_key(self) -> int:
        """The number that the next text will get."""
        return len(self._ends) - 1

    def read(self, key: int) -> str:
        """Give a text back."""
        self._file.seek(self._ends[key])
        return self._file.read(self._ends[key + 1] - self._ends[key]).decode("utf-8")


def build_corpus(
    folder: Path,
    inputs: Sequence[DomainInput],
    settings: dict[str, Any],
    log: Callable[[str], None],
) -> None:
    """Write a complete corpus into the existing, empty `folder`.

    Args:
        folder: where to; the caller renames it when this returns.
        inputs: the domains.
        settings: recorded in corpus.json; read here are vocabulary_size,
            heldout_fraction, max_megabytes_per_domain and seed.
        log: takes one line for each stage.

    Raises:
        DataError: an input cannot be used, or a domain has no documents.
    """
    spool_path = folder / "spool.partial"
    with open(spool_path, "w+b") as file:
        spool = Spool(file)
        deduplicator = Deduplicator()
        domains = []
        for domain_input in inputs:
            domain = _gather(domain_input, settings, spool, deduplicator)
            log(_gathered_line(domain))
            domains.append(domain)
        log(f"training a tokenizer of {settings['vocabulary_size']:,} ids")
        tokenizer = train_tokenizer(
            _tokenizer_sample(domains, spool),
            settings["vocabulary_size"],
            folder / "tokenizer.json",
        )
        if tokenizer.vocabulary_size < settings["vocabulary_size"]:
            log(
                f"the text holds merges for {tokenizer.vocabulary_size:,} ids only, "
                f"fewer than the {settings['vocabulary_size']:,} asked for"
            )
        log("encoding")
        headers = {
            (split, domain.name): _encode(folder, split, domain, spool, tokenizer)
            for split in SPLITS
            for domain in domains
        }
    spool_path.unlink()
    write_description(folder, _description(domains, tokenizer, headers, settings))
    Corpus.open(folder)  # what cannot be opened is not handed over


def _gather(
    domain_input: DomainInput,
    settings: dict[str, Any],
    spool: Spool,
    deduplicator: Deduplicator,
) -> GatheredDomain:
    domain = GatheredDomain(domain_input.name, domain_input.source)
    megabytes = settings["max_megabytes_per_domain"]
    room = None if megabytes is None else round(megabytes * 1e6)
    for document in domain_input.documents(domain.report):
        text = document.text
        if room is not None:
            text = _at_most(text, room)
        if deduplicator.find_earlier_or_add(text, spool.next_key, spool.read) is not None:
            domain.duplicates_removed += 1
            continue
        size = len(text.encode("utf-8"))
        domain.spool_keys.append(spool.append(text))
        domain.rank_keys.append(rank_key(text, settings["seed"]))
        domain.sizes.append(size)
        if room is not None:
            room -= size
            if len(text) < len(document.text) or room < 4:  # a character has up to 4 bytes
                break
    if not domain.sizes:
        raise DataError(f'no tokens written: the domain "{domain.name}" {_emptiness(domain)}')
    domain.held_out = choose_held_out(domain.name, domain.rank_keys, domain.sizes, settings["heldout_fraction"])
    return domain


def _at_most(text: str, size: int) -> str:
    """Cut `text` to `size` UTF-8 bytes, between characters."""
    data = text.encode("utf-8")
    return text if len(data) <= size else data[:size].decode("utf-8", errors="ignore")


def _gathered_line(domain: GatheredDomain) -> str:
    report = domain.report
    line = (
        f"{domain.name}: {len(domain.sizes):,} documents, {sum(domain.sizes) / 1e6:.1f} MB; "
        f"skipped {report.blank_documents:,} blank, {report.error_lines:,} error lines, "
        f"{domain.duplicates_removed:,} near-duplicates"
    )
    if report.replaced_surrogates:
        line += f"; {report.replaced_surrogates:,} lone surrogates became U+FFFD"
    for message in report.messages:
        line += f"\n  skipped {message}"
    unnamed = report.error_lines - len(report.messages)
    return line + (f"\n  and {unnamed:,} more error lines" if unnamed else "")


def _emptiness(domain: GatheredDomain) -> str:
    report = domain.report
    reason = (
        f"has no documents left ({report.blank_documents} blank, {report.error_lines} error "
        f"lines, {domain.duplicates_removed} near-duplicates of earlier ones)"
    )
    return reason + (f"; first error: {report.messages[0]}" if report.messages else "")


def _tokenizer_sample(domains: Sequence[GatheredDomain], spool: Spool) -> Iterator[str]:
    """Yield training texts for the tokenizer, by rank, up to each domain's share."""
    training_bytes = {
        domain.name: sum(domain.sizes)
        - sum(domain.sizes[document] for document in domain.held_out.documents)
        - domain.held_out.cut_bytes
        for domain in domains
    }
    shares = _equal_shares(training_bytes, TOKENIZER_SAMPLE_BYTES)
    for domain in domains:
        room = shares[domain.name]
        for document in sorted(range(len(domain.sizes)), key=domain.rank_keys.__getitem__):
            text = domain.text(spool, "train", document)
            if text is None:
                continue
            yield _at_most(text, room)
            room -= domain.sizes[document]
            if room <= 0:
                break


def _equal_shares(sizes: dict[str, int], total: int) -> dict[str, int]:
    """Divide `total` equally; what a small domain leaves goes to the others."""
    shares = {}
    for position, name in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        shares[name] = min(sizes[name], total // (len(sizes) - position))
        total -= shares[name]
    return shares


def _encode(folder: Path, split: str, domain: GatheredDomain, spool: Spool, tokenizer: Tokenizer) -> TokenHeader:
    path = folder / split / f"{domain.name}.bin"
    path.parent.mkdir(exist_ok=True)
    with write_token_file(path, tokenizer.vocabulary_size, tokenizer.end_of_text, tokenizer.sha256) as writer:
        for text in domain.texts(spool, split):
            writer.add(tokenizer.encode_array(text), text_bytes=len(text.encode("utf-8")))
    return writer.header


def _description(
    domains: Sequence[GatheredDomain],
    tokenizer: Tokenizer,
    headers: dict[tuple[str, str], TokenHeader],
    settings: dict[str, Any],
) -> dict[str, Any]:
    entries = {}
    for domain in domains:
        # A document that is cut is in both splits, so theirs can sum to one more.
        entry: dict[str, Any] = {"source": domain.source, "documents": len(domain.sizes)}
        for split in SPLITS:
            header = headers[split, domain.name]
            entry[split] = {
                "documents": header.documents,
                "tokens": header.tokens,
                "bytes": header.text_bytes,
            }
        entry["duplicates_removed"] = domain.duplicates_removed
        entry["blank_documents"] = domain.report.blank_documents
        entry["error_lines"] = domain.report.error_lines
        entry["replaced_surrogates"] = domain.report.replaced_surrogates
        entries[domain.name] = entry
    return {
        "format_version": FORMAT_VERSION,
        "sha256": corpus_sha256(tokenizer.sha256, headers),
        "vocabulary_size": tokenizer.vocabulary_size,
        "tokenizer_sha256": tokenizer.sha256,
        "settings": settings,
        "domains": entries,
    }
