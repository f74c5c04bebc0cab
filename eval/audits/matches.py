"""Longest verbatim matches of short token sequences in a large token text: exact, without an index.

All queries' m-grams are numbered, for m = 1, 2, ...; positions of the text that still match some m-gram are kept. Most
positions drop out after a few tokens, so that a text is read once and extended where it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def longest_matches(queries: Sequence[Sequence[int]], texts: Iterable[np.ndarray]) -> list[tuple[int, int]]:
    """For each query, its longest run of tokens that occurs somewhere in the texts.

    Args:
        queries: token ids.
        texts: ids, one array a stretch; a match stays within one.

    Returns:
        (first token of the match in the query, its length) of each; (0, 0) where not even one token occurs.
    """
    levels = _levels(queries)
    # Length of the longest match of a text that begins at each query position, by (query, position).
    reached: list[set[int]] = [set() for _ in levels]  # classes that occur, by level
    for text_N in texts:
        _walk(np.asarray(text_N, dtype=np.int64), levels, reached)
    best = [(0, 0)] * len(queries)
    for level, (place_Q, class_Q, _) in enumerate(levels):
        for (query, position), found in zip(place_Q, class_Q.tolist(), strict=True):
            if found in reached[level] and level + 1 > best[query][1]:
                best[query] = (position, level + 1)
    return best


_Level = tuple[list[tuple[int, int]], np.ndarray, np.ndarray]


def _levels(queries: Sequence[Sequence[int]]) -> list[_Level]:
    """For m = 1, 2, ...: (query, position) and class of every m-gram, and sorted keys whose place is the class.

    A key is (class of the (m - 1)-gram before, last token) as one number.
    """
    levels: list[_Level] = []
    places = [(query, position) for query, tokens in enumerate(queries) for position in range(len(tokens))]
    class_Q = np.zeros(len(places), dtype=np.int64)
    length = 0
    while places:
        token_Q = np.array([queries[query][position + length] for query, position in places], dtype=np.int64)
        keys, new_Q = np.unique((class_Q << 32) | token_Q, return_inverse=True)
        levels.append((places, new_Q, keys))
        length += 1
        kept = [n for n, (query, position) in enumerate(places) if position + length < len(queries[query])]
        places, class_Q = [places[n] for n in kept], new_Q[kept]
    return levels


def _walk(text_N: np.ndarray, levels: list[_Level], reached: list[set[int]], chunk: int = 1 << 20) -> None:
    for first in range(0, len(text_N), chunk):
        start_P = np.arange(first, min(len(text_N), first + chunk))
        class_P = np.zeros(len(start_P), dtype=np.int64)
        for level, (_, _, keys) in enumerate(levels):
            inside = start_P + level < len(text_N)
            start_P, class_P = start_P[inside], class_P[inside]
            key_P = (class_P << 32) | text_N[start_P + level]
            class_P = np.minimum(np.searchsorted(keys, key_P), len(keys) - 1)
            matches = keys[class_P] == key_P
            start_P, class_P = start_P[matches], class_P[matches]
            if not len(start_P):
                break
            reached[level].update(np.unique(class_P).tolist())
