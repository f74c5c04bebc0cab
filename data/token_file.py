"""Token ids on disk: three files that belong together.

- `NAME.bin`: the ids, little-endian uint16 or uint32, nothing else
- `NAME.index.npy`: int64 (M,), where each of the M documents starts, in tokens
- `NAME.json`: the header, written last; without it there is no token file

The smallest type that holds the whole vocabulary is chosen and recorded; an id
never wraps around. Opening compares sizes, the index's checksum and the markers
with the header, so a file that was cut, extended, or paired with the index of
another one is refused at once, not after hours of training.

Each document is written as [marker, t1, ..., tn], where the marker is the
tokenizer's end-of-text id. It STARTS the document: it predicts t1, and the last
token of a document predicts the next marker. So every prediction is made from
its own document only.
"""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.atomic import write_atomically
from data.errors import DataError

FORMAT_VERSION = 1
UINT16_VOCABULARY = 1 << 16
CHECKED_MARKERS = 256  # of the documents, evenly spaced: opening stays quick

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Give the type for ids in [0, vocabulary_size): uint16 up to 65,536, else uint32."""
    if not 1 <= vocabulary_size <= 1 << 31:
        raise DataError(f"the vocabulary size is {vocabulary_size}; allowed are 1 to {1 << 31}")
    return _DTYPES["uint16" if vocabulary_size <= UINT16_VOCABULARY else "uint32"]


@dataclass(frozen=True)
class TokenHeader:
    """What NAME.json holds.

    Attributes:
        format_version: of these three files.
        dtype: "uint16" or "uint32".
        tokens: number of ids, markers included.
        documents: number of documents.
        text_bytes: UTF-8 bytes of the documents.
        maximum_id: the largest id that occurs (-1 if there are none).
        vocabulary_size: ids are in [0, vocabulary_size).
        end_of_text: the id that starts each document.
        tokenizer_sha256: the tokenizer that the ids come from.
        data_sha256, index_sha256: of NAME.bin and NAME.index.npy, in hex.
    """

    format_version: int
    dtype: str
    tokens: int
    documents: int
    text_bytes: int
    maximum_id: int
    vocabulary_size: int
    end_of_text: int
    tokenizer_sha256: str
    data_sha256: str
    index_sha256: str


class TokenFileWriter:
    """Writes one token file, a document at a time; see `write_token_file`.

    Attributes:
        header: the `TokenHeader`, set when the file is complete.
    """

    header: TokenHeader

    def __init__(self, file: BinaryIO, vocabulary_size: int, end_of_text: int) -> None:
        self._file = file
        self._dtype = token_dtype(vocabulary_size)
        self._vocabulary_size = vocabulary_size
        self._end_of_text = end_of_text
        self._starts: list[int] = []
        self._tokens = self._text_bytes = 0
        self._maximum_id = -1
        self._hash = hashlib.sha256()

    def add(self, token_ids: Iterable[int], text_bytes: int = 0) -> None:
        """Append one document; the marker is put before it.

        Args:
            token_ids: the document's ids, without a marker.
            text_bytes: the length of its text in UTF-8.

        Raises:
            DataError: an id is outside the vocabulary, or is the marker itself.
        """
        document_N = np.asarray(token_ids)
        high = -1
        if document_N.size:
            if document_N.ndim != 1 or document_N.dtype.kind not in "iu":
                raise DataError(
                    f"document {len(self._starts)} is an array of {document_N.dtype} with "
                    f"{document_N.ndim} dimensions; give a flat sequence of integers"
                )
            low, high = int(document_N.min()), int(document_N.max())
            if low < 0 or high >= self._vocabulary_size:
                raise DataError(
                    f"document {len(self._starts)} holds the token id {low if low < 0 else high}; "
                    f"allowed are 0 to {self._vocabulary_size - 1} "
                    f"(vocabulary size {self._vocabulary_size})"
                )
            if (document_N == self._end_of_text).any():
                raise DataError(
                    f"document {len(self._starts)} holds the end-of-text id {self._end_of_text}; "
                    "it is written before each document and must not be inside one"
                )
        data = np.concatenate([[self._end_of_text], document_N]).astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._starts.append(self._tokens)
        self._tokens += 1 + document_N.size
        self._text_bytes += text_bytes
        self._maximum_id = max(self._maximum_id, self._end_of_text, high)

    def finish(self, tokenizer_sha256: str) -> bytes:
        """Set the header and give the bytes of the index."""
        index = io.BytesIO()
        np.save(index, np.array(self._starts, dtype="<i8"), allow_pickle=False)
        self.header = TokenHeader(
            format_version=FORMAT_VERSION,
            dtype=self._dtype.name,
            tokens=self._tokens,
            documents=len(self._starts),
            text_bytes=self._text_bytes,
            maximum_id=self._maximum_id,
            vocabulary_size=self._vocabulary_size,
            end_of_text=self._end_of_text,
            tokenizer_sha256=tokenizer_sha256,
            data_sha256=self._hash.hexdigest(),
            index_sha256=hashlib.sha256(index.getvalue()).hexdigest(),
        )
        return index.getvalue()


@contextlib.contextmanager
def write_token_file(
    path: Path, vocabulary_size: int, end_of_text: int, tokenizer_sha256: str
) -> Iterator[TokenFileWriter]:
    """Write the token file `path` (NAME.bin) with its index and header.

    No file has its final name before the block ends without an error, and the
    header gets its name last.

    Raises:
        DataError: the end-of-text id is outside the vocabulary.
    """
    path = Path(path)
    if not 0 <= end_of_text < vocabulary_size:
        raise DataError(f"the end-of-text id is {end_of_text}; allowed are 0 to {vocabulary_size - 1}")
    # An old header must not vouch for new data.
    _header_path(path).unlink(missing_ok=True)
    with write_atomically(path) as file:
        writer = TokenFileWriter(file, vocabulary_size, end_of_text)
        yield writer
        index = writer.finish(tokenizer_sha256)
    with write_atomically(_index_path(path)) as file:
        file.write(index)
    with write_atomically(_header_path(path)) as file:
        file.write(json.dumps(asdict(writer.header), indent=1).encode())


class TokenFile:
    """An open token file.

    Attributes:
        path: of NAME.bin.
        header: the `TokenHeader`.
        token_N: read-only memory map of all ids, markers included.
        start_M: int64, where each document starts in `token_N`.
    """

    def __init__(self, path: Path) -> None:
        """Open and check sizes, the index and the markers.

        Raises:
            DataError: a file is missing, cut, extended or of another token file.
        """
        self.path = Path(path)
        self.header = _read_header(_header_path(self.path))
        dtype = _DTYPES[self.header.dtype]
        self._require_size(self.header.tokens * dtype.itemsize)
        self.start_M = self._read_index()
        if self.header.tokens:
            self.token_N: np.ndarray = np.memmap(self.path, dtype=dtype, mode="r")
        else:  # an empty file cannot be mapped
            self.token_N = np.zeros(0, dtype=dtype)
        self._require_markers()

    def document(self, number: int) -> np.ndarray:
        """Give the ids of one document, without its marker."""
        if not 0 <= number < len(self.start_M):
            raise DataError(
                f"{self.path}: document {number} of {len(self.start_M)}; allowed are 0 to {len(self.start_M) - 1}"
            )
        is_last = number + 1 == len(self.start_M)
        end = self.header.tokens if is_last else self.start_M[number + 1]
        return self.token_N[self.start_M[number] + 1 : end]

    def verify(self) -> None:
        """Read all ids and compare their checksum with the header's.

        Raises:
            DataError: the ids are not those that were written.
        """
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != self.header.data_sha256:
            raise DataError(
                f"{self.path}: sha256 is {digest.hexdigest()}, the header says "
                f"{self.header.data_sha256}; build the corpus again"
            )

    def _require_size(self, expected: int) -> None:
        if not self.path.is_file():
            raise DataError(f"{self.path} is missing; build the corpus again")
        actual = self.path.stat().st_size
        if actual != expected:
            change = "cut" if actual < expected else "extended"
            raise DataError(
                f"{self.path}: expected {expected:,} bytes ({self.header.tokens:,} tokens of "
                f"{self.header.dtype}), found {actual:,}; the file was {change} or belongs to "
                "another corpus, build it again"
            )

    def _read_index(self) -> np.ndarray:
        path = _index_path(self.path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        actual = hashlib.sha256(data).hexdigest()
        if actual != self.header.index_sha256:
            raise DataError(
                f"{path}: expected the index of {self.header.documents:,} documents with sha256 "
                f"{self.header.index_sha256[:12]}, found {actual[:12]}; the index was damaged or "
                "belongs to another corpus, build it again"
            )
        return np.load(io.BytesIO(data), allow_pickle=False)

    def _require_markers(self) -> None:
        count = min(CHECKED_MARKERS, len(self.start_M))
        for number in np.linspace(0, len(self.start_M) - 1, count).astype(np.int64):
            found = int(self.token_N[self.start_M[number]])
            if found != self.header.end_of_text:
                raise DataError(
                    f"{self.path}: expected the end-of-text id {self.header.end_of_text} at the "
                    f"start of document {number} (token {self.start_M[number]:,}), found {found}; "
                    "data and index belong to different corpora, build it again"
                )


def _read_header(path: Path) -> TokenHeader:
    try:
        content = json.loads(path.read_bytes())
        names = {field.name for field in fields(TokenHeader)}
        if set(content) != names:
            raise ValueError(f"keys {sorted(content)}, expected {sorted(names)}")
        header = TokenHeader(**content)
        for field in fields(TokenHeader):
            if type(content[field.name]) is not field.type:
                raise ValueError(f"{field.name} is {content[field.name]!r}")
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: the token file was not finished or not copied; build the corpus again"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: not a readable header ({error})") from error
    if header.format_version != FORMAT_VERSION or header.dtype not in _DTYPES:
        raise DataError(
            f"{path}: format {header.format_version} with {header.dtype}; this code reads format "
            f"{FORMAT_VERSION} with {' or '.join(_DTYPES)}"
        )
    return header


def _index_path(path: Path) -> Path:
    return path.with_suffix(".index.npy")


def _header_path(path: Path) -> Path:
    return path.with_suffix(".json")
