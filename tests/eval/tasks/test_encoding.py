"""Borders between context and continuation, and what is done with rows that are too long."""

from __future__ import annotations

import pytest

from data.tokenizer import Tokenizer, train_tokenizer
from eval.tasks.encoding import Pair, encode_pair, pieces

TEXT = "the cat sat on the mat; call(x);\n    return (a)\n\nthe dog ran to the cat.\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([TEXT] * 50, 330, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


PAIRS = [("the cat", " sat on"), ("", "the"), ("the cat ", "sat"), ("a \n", " b"), ("  ", "x"), ("the c", "at sat")]


@pytest.mark.parametrize(("context", "continuation"), PAIRS)
def test_both_parts_together_are_the_whole_text_behind_one_marker(
    tokenizer: Tokenizer, context: str, continuation: str
) -> None:
    pair = encode_pair(tokenizer, context, continuation)
    assert pair.context[0] == tokenizer.end_of_text
    assert tokenizer.end_of_text not in pair.context[1:] + pair.continuation
    assert tokenizer.decode(pair.context[1:] + pair.continuation) == context + continuation
    assert tokenizer.decode(pair.context[1:]) == context.rstrip()


def test_space_at_the_end_of_a_context_is_moved_to_the_continuation(tokenizer: Tokenizer) -> None:
    assert encode_pair(tokenizer, "the cat ", "sat") == encode_pair(tokenizer, "the cat", " sat")
    # As they are, "the cat " would end with a token that training never saw before "sat".
    assert tokenizer.encode("the cat ")[-1] != encode_pair(tokenizer, "the cat ", "sat").context[-1]


def test_a_token_across_the_border_has_both_parts_encoded_apart(tokenizer: Tokenizer) -> None:
    """lm-eval's split would lose "at" here: the whole has as many ids as the context, or others."""
    whole, context = tokenizer.encode("the cat"), tokenizer.encode("the c")
    assert whole[: len(context)] != context
    pair = encode_pair(tokenizer, "the c", "at")
    assert pair == Pair([tokenizer.end_of_text, *context], tokenizer.encode("at"), True)
    assert not encode_pair(tokenizer, "the", " cat").merged


def test_an_empty_continuation_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="nothing to score"):
        encode_pair(tokenizer, "the", "")


@pytest.mark.parametrize("context", [1, 2, 7, 30])
@pytest.mark.parametrize("continuation", [1, 3, 8, 9, 16, 25])
def test_every_id_is_predicted_once_from_what_precedes_it(context: int, continuation: int) -> None:
    whole = list(range(context + continuation))
    found = pieces(whole[:context], whole[context:], 8)
    assert [label for piece in found for label in piece.labels] == whole[context:]
    for piece in found:
        assert len(piece.inputs) <= 8
        # The inputs are the ids right before the last label, in order, and reach back before the first one.
        assert piece.inputs == list(range(piece.inputs[0], piece.labels[-1]))
        assert piece.inputs[0] < piece.labels[0]
        # No room is left where there is more context.
        assert len(piece.inputs) == 8 or piece.inputs[0] == 0


def test_a_row_that_fits_keeps_everything_and_one_that_does_not_loses_its_beginning() -> None:
    assert pieces([0, 1, 2], [3, 4], 4) == [([0, 1, 2, 3], [3, 4])]
    assert pieces([0, 1, 2], [3, 4], 3) == [([1, 2, 3], [3, 4])]
    assert pieces([0, 1], [2, 3, 4, 5, 6], 3) == [([1, 2, 3], [2, 3, 4]), ([3, 4, 5], [5, 6])]


def test_the_pieces_of_a_long_text_are_lm_evals_rolling_windows() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for length in (1, 5, 8, 24, 40):
        expected = map(utils.make_disjoint_window, utils.get_rolling_token_windows(list(range(1, length + 1)), 0, 8, 1))
        found = pieces([0], list(range(1, length + 1)), 8)
        # Ours are inputs and labels; theirs are context and labels, without overlap.
        assert [([*p.inputs], p.labels) for p in found] == [
            ((before + after)[:-1], after) for before, after in expected
        ]
