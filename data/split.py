"""Which text is held out, domain by domain.

The choice is by document and depends only on the texts and the seed, not on
their order or names: documents are ranked by a keyed hash of their text.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from data.errors import DataError

MINIMUM_BYTES = 8192  # aim for some thousand held-out tokens, even in a small domain ...
MAXIMUM_FRACTION = 0.1  # ... but for no more than a tenth of it because of that
MINIMUM_CUT_BYTES = 64


@dataclass(frozen=True)
class HeldOut:
    """The held-out part of a domain.

    Attributes:
        documents: indices of the documents that are held out whole.
        cut_document: index of the one document whose tail is held out, or None.
        cut_bytes: about how many bytes its tail has.
    """

    documents: frozenset[int]
    cut_document: int | None = None
    cut_bytes: int = 0


def rank_key(text: str, seed: int) -> bytes:
    """Give the key by which the documents of a domain are ranked."""
    key = f"held-out {seed}".encode()
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16, key=key).digest()


def choose_held_out(domain: str, keys: Sequence[bytes], sizes: Sequence[int], fraction: float) -> HeldOut:
    """Choose what a domain holds out: about `fraction` of its bytes.

    Documents are taken by rank until the target is met; one that would more
    than double the target is passed over. When none fits (a domain of a few
    long documents, such as one book), the tail of the first by rank is held
    out; when that is too short to cut, the smallest document is.

    Args:
        domain: its name, for the message.
        keys: the rank key of each document.
        sizes: the UTF-8 bytes of each document.
        fraction: the part to hold out, in [0, 0.5]; 0 holds out nothing.

    Raises:
        DataError: there is only one document, and it is too short to cut.
    """
    if fraction == 0:
        return HeldOut(frozenset())
    total = sum(sizes)
    target = max(fraction * total, min(MINIMUM_BYTES, MAXIMUM_FRACTION * total))
    by_rank = sorted(range(len(keys)), key=lambda document: (keys[document], document))
    chosen, held = set(), 0
    for document in by_rank:
        if held >= target:
            break
        if held + sizes[document] <= 2 * target:
            chosen.add(document)
            held += sizes[document]
    if chosen and len(chosen) < len(sizes):
        return HeldOut(frozenset(chosen))
    if target >= MINIMUM_CUT_BYTES:
        return HeldOut(frozenset(), cut_document=by_rank[0], cut_bytes=round(target))
    if len(sizes) > 1:
        smallest = min(by_rank, key=lambda document: sizes[document])
        return HeldOut(frozenset({smallest}))
    raise DataError(
        f'the domain "{domain}" has 1 document of {total} bytes, too short to hold out a part; '
        "give more text, or --heldout-fraction 0 for a corpus without a held-out split"
    )


def cut_text(text: str, tail_bytes: int) -> tuple[str, str]:
    """Cut `text` into a head and a tail of about `tail_bytes`, after a line end if one is near."""
    tail_characters = max(1, round(len(text) * tail_bytes / len(text.encode("utf-8"))))
    position = len(text) - tail_characters
    for separator in ("\n", " "):
        found = text.rfind(separator, position - tail_characters // 2, position)
        if found > 0:
            position = found + 1
            break
    return text[:position], text[position:]
