"""A corpus: a folder of token files that knows what it was made from.

corpus.json            domains, sources, versions, licences, settings, checksums
tokenizer.json         the tokenizer of all token files
train/DOMAIN.bin       token files (see `token_file`), with .index.npy and .json
heldout/DOMAIN.bin     documents that training never sees
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.atomic import write_atomically
from data.errors import DataError
from data.token_file import TokenFile, TokenHeader
from data.tokenizer import Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "heldout")
# A model may have so few unused ids (its vocabulary rounded up to a multiple of this), and no more.
VOCABULARY_PADDING = 128

_DOMAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Corpus:
    """An open corpus; make one with `Corpus.open`.

    Attributes:
        folder: where it lies.
        domains: names of the domains; the position in this list is a domain's number.
        tokenizer: the `Tokenizer`.
        vocabulary_size: number of token ids.
        sha256: of the tokenizer and all token files, in hex. Two runs with equal
            values read the same tokens.
        description: the content of corpus.json.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        files: dict[tuple[str, str], TokenFile],
        description: dict,
    ) -> None:
        self.folder = folder
        self.domains = list(description["domains"])
        self.tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocabulary_size
        self.sha256 = description["sha256"]
        self.description = description
        self._files = files

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Open a corpus and check that its files belong together.

        Sizes, indices, headers, the tokenizer and the sum of the checksums are
        compared; the ids themselves are not read (see `verify`).

        Raises:
            DataError: there is no corpus, or it is damaged; says what was found.
        """
        folder = Path(folder)
        description = read_description(folder)
        try:
            domains = list(description["domains"])
            expected_tokenizer, expected_sum = (
                description["tokenizer_sha256"],
                description["sha256"],
            )
            version = description["format_version"]
            if not isinstance(description["domains"], dict):
                raise KeyError("domains (an object)")
        except (KeyError, TypeError) as error:
            raise DataError(f"{folder / 'corpus.json'}: the key {error} is missing") from error
        if version != FORMAT_VERSION:
            raise DataError(
                f"{folder}: corpus format {version}, this code reads {FORMAT_VERSION}; "
                "build it again with data.prepare --overwrite"
            )
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        _require_same_tokenizer(folder / "tokenizer.json", tokenizer.sha256, expected_tokenizer)
        files = {}
        for domain in domains:
            require_domain_name(domain)
            for split in SPLITS:
                file = TokenFile(folder / split / f"{domain}.bin")
                _require_same_tokenizer(file.path, file.header.tokenizer_sha256, expected_tokenizer)
                files[split, domain] = file
        found_sum = corpus_sha256(tokenizer.sha256, {key: file.header for key, file in files.items()})
        if found_sum != expected_sum:
            raise DataError(
                f"{folder}: expected the corpus with sha256 {expected_sum[:12]}, found "
                f"{found_sum[:12]}; a token file was replaced, build the corpus again"
            )
        return cls(folder, tokenizer, files, description)

    def file(self, split: str, domain: str) -> TokenFile:
        """Give the token file of a domain in a split.

        Raises:
            DataError: there is no such split or domain; names those there are.
        """
        if (split, domain) not in self._files:
            raise DataError(
                f'{self.folder}: no split "{split}" of a domain "{domain}"; '
                f"splits: {', '.join(SPLITS)}; domains: {', '.join(self.domains)}"
            )
        return self._files[split, domain]

    def tokens(self, split: str, domain: str) -> np.ndarray:
        """Give all ids of a domain in a split: a read-only memory map (N,), markers included."""
        return self.file(split, domain).token_N

    def document_starts(self, split: str, domain: str) -> np.ndarray:
        """Give where each document starts in `tokens`: int64 (M,)."""
        return self.file(split, domain).start_M

    def documents(self, split: str, domain: str) -> Iterator[bytes]:
        """Give the text of each document of a domain in a split, exactly."""
        file = self.file(split, domain)
        return (self.tokenizer.decode_bytes(file.document(number)) for number in range(len(file.start_M)))

    def text_bytes(self, split: str, domain: str) -> int:
        """Give the UTF-8 bytes of a domain's documents in a split."""
        return self.file(split, domain).header.text_bytes

    def require_model_vocabulary(self, model_vocabulary_size: int) -> None:
        """Refuse a model that is not for this vocabulary: too small, or larger by more than padding.

        Raises:
            DataError: names the largest id, both sizes and the remedy.
        """
        if 0 <= model_vocabulary_size - self.vocabulary_size < VOCABULARY_PADDING:
            return
        largest = max(file.header.maximum_id for file in self._files.values())
        raise DataError(
            f"the model's vocabulary size is {model_vocabulary_size}, but the corpus {self.folder} "
            f"has {self.vocabulary_size} (largest id that occurs: {largest}); set the model's "
            f"vocabulary size to {self.vocabulary_size} (or up to {VOCABULARY_PADDING - 1} more, as "
            f"padding), or choose another corpus"
        )

    def require_tokenizer(self, sha256: str) -> None:
        """Refuse a model or checkpoint that was trained with another tokenizer.

        Raises:
            DataError: the tokenizer's sha256 differs, even when its size is the same.
        """
        _require_same_tokenizer(self.folder / "tokenizer.json", self.tokenizer.sha256, sha256)

    def verify(self) -> None:
        """Read every token file and compare its checksum.

        Raises:
            DataError: names the file that is not as it was written.
        """
        for file in self._files.values():
            file.verify()


def require_domain_name(domain: str) -> None:
    """Raise a `DataError` unless `domain` can be a file name everywhere."""
    if not _DOMAIN_NAME.fullmatch(domain):
        raise DataError(
            f'the domain name "{domain}" is not usable; allowed are up to 64 letters, digits, '
            '"_" and "-", not starting with "_" or "-"'
        )


def read_description(folder: Path) -> dict:
    """Read corpus.json.

    Raises:
        DataError: there is none, or it is not JSON.
    """
    path = folder / "corpus.json"
    try:
        description = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not a corpus (no corpus.json); make one: python -m data.prepare --output {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(description, dict):
        raise DataError(f"{path}: expected a JSON object")
    return description


def write_description(folder: Path, description: dict) -> None:
    """Write corpus.json."""
    with write_atomically(folder / "corpus.json") as file:
        file.write(json.dumps(description, indent=1, ensure_ascii=False).encode("utf-8"))


def corpus_sha256(tokenizer_sha256: str, headers: dict[tuple[str, str], TokenHeader]) -> str:
    """Give the checksum of a whole corpus from those of its parts."""
    digest = hashlib.sha256(tokenizer_sha256.encode())
    for (split, domain), header in sorted(headers.items()):
        line = f"{split}/{domain} {header.tokens} {header.data_sha256} {header.index_sha256}\n"
        digest.update(line.encode())
    return digest.hexdigest()


def _require_same_tokenizer(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{path}: expected the tokenizer with sha256 {expected[:12]}, found {found[:12]}; "
            "ids of one tokenizer mean other text in another, use the corpus that belongs to it"
        )
