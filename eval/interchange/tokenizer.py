"""The corpus' tokenizer as transformers reads it, and whether two tokenizer.json files give the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.tokenizer import END_OF_TEXT, Tokenizer
from eval.interchange.served import InterchangeError

# Texts in which tokenizers usually part ways: they are encoded by both after every export.
ODD_TEXTS = (
    "",
    " ",
    "  two  spaces and a tab\t\n\n  indented\r\n",
    "Don't stop 12345 times, it's 3.14159!",
    "na\u00efve caf\u00e9 cafe\u0301 \ufb01ne \u4e2d\u6587 \u0442\u0435\u043a\u0441\u0442",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u0000\u200b\ufeff",
    f"a{END_OF_TEXT}b {END_OF_TEXT}",
    "def f(x):\n    return x ** 2  # square\n",
)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, and check that transformers reads the same ids from them.

    The end-of-text token is the beginning, the end and the padding of a text: documents of a corpus start with it. It
    is not added by itself, and its letters within a text are ordinary text, as everywhere in Choir.

    Args:
        source: the corpus' tokenizer.json.
        folder: the checkpoint, which already has its config.json.

    Raises:
        InterchangeError: the ids differ.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    written = PreTrainedTokenizerFast(
        tokenizer_file=str(source),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    written.save_pretrained(folder)
    ours, theirs = Tokenizer.load(source), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in ODD_TEXTS:
        expected, found = ours.encode(text), theirs(text)["input_ids"]
        if found != expected:
            raise InterchangeError(f"the exported tokenizer gives {found} for {text!r}, the corpus' gives {expected}")


def require_same_tokenizer(corpus: Path, checkpoint: Path) -> bool:
    """Refuse a corpus whose ids mean other text than the checkpoint's.

    Args:
        corpus: its tokenizer.json.
        checkpoint: folder of a transformers checkpoint.

    Returns:
        Whether there was a tokenizer.json to compare with.

    Raises:
        InterchangeError: they differ in how they cut text or in an id.
    """
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return False
    ours, theirs = _content(corpus), _content(path)
    for key in ours:
        if ours[key] != theirs[key]:
            raise InterchangeError(
                f"{path} differs from {corpus} in its {key}: ids of one tokenizer mean other text in another. A corpus "
                "can be used whose tokenizer the checkpoint was trained with; data.prepare trains a new one for each "
                "corpus and cannot take this one. Without --corpus the model can be opened and fed with token ids"
            )
    return True


def _content(path: Path) -> dict[str, Any]:
    """What decides ids."""
    try:
        content = json.loads(path.read_bytes())
        model = content["model"]
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        return {
            "normalizer": content.get("normalizer"),
            "pre_tokenizer": content.get("pre_tokenizer"),
            "vocabulary": model["vocab"],
            "merges": merges,
            "special tokens": {token["content"]: token["id"] for token in content["added_tokens"]},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InterchangeError(
            f"{path}: not a byte-level BPE tokenizer.json ({type(error).__name__}: {error})"
        ) from None
