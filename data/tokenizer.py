"""Byte-level BPE: trained by `tokenizers`, run by `tiktoken`.

The trained vocabulary is one file, tokenizer.json, in the format of the
`tokenizers` library, so other tools can read it. Encoding builds a
`tiktoken.Encoding` from that file: the ids are the same, and it is about seven
times faster.

Ids: 0 is the end-of-text marker, 1 to 256 are the single bytes (in the order of
the byte-level alphabet), and the merges follow.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers

from data.atomic import write_atomically
from data.errors import DataError

END_OF_TEXT = "<|endoftext|>"
MINIMUM_VOCABULARY = 257  # 256 bytes and the marker
MAXIMUM_VOCABULARY = 1 << 20  # beyond any tokenizer in use; the trainer sets memory aside for all of it

# Words with their leading space or sign, digits by threes, punctuation, line ends, spaces.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tiktoken aborts on a run of about a million spaces (its regex engine runs out of
# stack), so a longer text is encoded in parts.
ENCODE_CHARACTERS = 1 << 16

# Left out of training: a near-endless "word" (a data blob) teaches nothing and makes it slow.
_LONG_RUN = re.compile(r"\w{257,}|[^\w\s]{257,}|\s{257,}")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, path: Path) -> "Tokenizer":
    """Train a tokenizer, save it as `path`, and load it.

    The same texts in the same order give the same file. Few or short texts may
    hold fewer merges than asked for; the result's `vocabulary_size` says what
    there is. Runs of over 256 letters, signs or spaces are not learned from.

    Raises:
        DataError: the vocabulary is smaller than 257.
    """
    require_vocabulary_size(vocabulary_size)
    pre_tokenizers = tokenizers.pre_tokenizers
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = (part for text in texts for part in bounded_parts(_LONG_RUN.sub(" ", text)))
    model.train_from_iterator(parts, trainer)
    with write_atomically(path) as file:
        file.write(model.to_str().encode("utf-8"))
    return Tokenizer.load(path)


def require_vocabulary_size(vocabulary_size: int) -> None:
    """Raise a `DataError` unless a byte-level vocabulary can have this size."""
    if not MINIMUM_VOCABULARY <= vocabulary_size <= MAXIMUM_VOCABULARY:
        raise DataError(
            f"the vocabulary size is {vocabulary_size}; allowed are {MINIMUM_VOCABULARY} "
            f"(256 bytes and {END_OF_TEXT}) to {MAXIMUM_VOCABULARY:,}"
        )


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocabulary_size: number of ids, the marker included.
        end_of_text: id of the marker that starts each document.
        token_bytes_V: np.int32 (V,), the UTF-8 bytes that each id stands for; 0
            for the marker. For bits per byte.
        sha256: of the tokenizer.json file, in hex.
    """

    vocabulary_size: int
    end_of_text: int
    token_bytes_V: np.ndarray
    sha256: str

    def __init__(self, encoding: tiktoken.Encoding, end_of_text: int, sha256: str) -> None:
        self._encoding = encoding
        self.end_of_text = end_of_text
        self.sha256 = sha256
        self.vocabulary_size = encoding.n_vocab
        self.token_bytes_V = np.zeros(self.vocabulary_size, dtype=np.int32)
        for token in range(self.vocabulary_size):
            if token != end_of_text:
                self.token_bytes_V[token] = len(encoding.decode_single_token_bytes(token))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Build the encoder from a tokenizer.json file.

        Raises:
            DataError: the file is missing, is not JSON, or is another kind of tokenizer.
        """
        try:
            data = Path(path).read_bytes()
            content = json.loads(data)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a readable tokenizer.json ({error})") from error
        try:
            pattern, ranks, special = _read_byte_level_bpe(content)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(
                f"{path}: not a byte-level BPE with a split pattern (at {error}); "
                "use a tokenizer.json made by data.prepare"
            ) from error
        size = len(ranks) + len(special)
        if END_OF_TEXT not in special or sorted([*ranks.values(), *special.values()]) != list(range(size)):
            raise DataError(f"{path}: the ids must be 0 to {size - 1}, each once, with {END_OF_TEXT} among them")
        if not all(bytes([byte]) in ranks for byte in range(256)):
            raise DataError(f"{path}: some single bytes have no id, so not every text has ids")
        try:
            encoding = tiktoken.Encoding("choir", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except ValueError as error:
            raise DataError(f"{path}: tiktoken refuses the split pattern ({error})") from error
        return cls(encoding, special[END_OF_TEXT], hashlib.sha256(data).hexdigest())

    def encode(self, text: str) -> list[int]:
        """Encode `text`; the letters "<|endoftext|>" in it are ordinary text.

        A text over 65,536 characters is encoded in parts. These are cut after a
        line end, where tokens end anyway; only in a longer stretch without one
        may the ids differ from those of the whole text. `decode` gives the text
        back in any case. A lone surrogate becomes U+FFFD.
        """
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """Encode like `encode`, to uint32 (N,): a twelfth of the memory of a list of ints."""
        parts = [np.array(self._encoding.encode_ordinary(part), dtype=np.uint32) for part in bounded_parts(text)]
        return np.concatenate(parts)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode ids; bytes that are not UTF-8 (a cut character) become U+FFFD.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Decode ids to the exact bytes.

        Raises:
            DataError: an id is not in the vocabulary.
        """
        token_ids = [int(token) for token in token_ids]
        for token in token_ids:
            if not 0 <= token < self.vocabulary_size:
                raise DataError(f"the token id {token} is outside the vocabulary of {self.vocabulary_size}")
        return self._encoding.decode_bytes(token_ids)


def bounded_parts(text: str) -> Iterator[str]:
    """Cut `text` into parts of at most `ENCODE_CHARACTERS`, which join to it again.

    A line end before a character that is not a space always ends a token under
    `SPLIT_PATTERN`, so a cut there changes no id.
    """
    start = 0
    while len(text) - start > ENCODE_CHARACTERS:
        limit = start + ENCODE_CHARACTERS
        end = text.rfind("\n", start, limit) + 1
        while end > start and text[end].isspace():
            end = text.rfind("\n", start, end - 1) + 1
        if end <= start:
            end = limit
        yield text[start:end]
        start = end
    yield text[start:]


def _read_byte_level_bpe(content: dict) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """Give the split pattern, the rank of each byte string, and the special tokens."""
    split, byte_level = content["pre_tokenizer"]["pretokenizers"]
    pattern = split["pattern"]["Regex"]
    if (
        content["model"]["type"] != "BPE"
        or content["normalizer"] is not None
        or split["behavior"] != "Isolated"
        or split["invert"]
        or byte_level["type"] != "ByteLevel"
        or byte_level["add_prefix_space"]
        or byte_level["use_regex"]
    ):
        raise KeyError("pre_tokenizer, normalizer or model")
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    byte_of_character = _byte_of_character()
    ranks = {
        bytes(byte_of_character[character] for character in token): token_id
        for token, token_id in content["model"]["vocab"].items()
        if token not in special
    }
    return pattern, ranks, special


def _byte_of_character() -> dict[str, int]:
    """Invert GPT-2's byte-level alphabet, which shows each byte as a visible character."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = [chr(byte) for byte in visible] + [chr(256 + n) for n in range(len(hidden))]
    return dict(zip(characters, visible + hidden, strict=True))
