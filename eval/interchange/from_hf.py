"""A checkpoint of transformers as a run, at step 0: to analyse, to evaluate, and to train further."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from data.corpus import Corpus
from eval.interchange.families import CHOIR, FAMILIES, Family
from eval.interchange.folders import complete_folder
from eval.interchange.names import Piece, pieces
from eval.interchange.served import InterchangeError
from eval.interchange.tensor_files import read_tensors, tensor_places
from eval.interchange.to_hf import require_transformers
from eval.interchange.tokenizer import require_same_tokenizer
from moe.initialization import build_model
from moe.model import Transformer
from training.checkpoint import save_checkpoint
from training.config import Config
from training.load_config import config_to_toml, config_values, load_config
from training.optimizer import build_optimizer
from training.run import Run

# Sequences of further training, unless told otherwise: of the checkpoint's length, up to this many tokens.
LONGEST_SEQUENCE = 1024
# Flags for training may not change what the weights compute.
OF_THE_CHECKPOINT = (
    "moe.router",
    "moe.num_experts",
    "moe.experts_per_token",
    "moe.expert_width",
    "moe.shared_width",
    "moe.score",
    "moe.route_scale",
    "moe.renormalize",
)
# Tables that old checkpoints hold and every model computes for itself.
COMPUTED = (".rotary_emb.inv_freq",)


def import_checkpoint(
    source: Path,
    folder: Path,
    corpus: Path | None = None,
    flags: Sequence[str] = (),
    log: Callable[[str], None] = lambda line: None,
) -> Run:
    """Make a run folder whose checkpoint of step 0 holds the weights.

    Args:
        source: folder with config.json and safetensors.
        folder: the run's folder, which must not exist; complete or absent, whatever happens.
        corpus: a prepared corpus with the checkpoint's vocabulary; None leaves the run without text.
        flags: of train.py, for further training.
        log: takes lines about what is done.

    Raises:
        InterchangeError: the checkpoint, or something in it, is not for Choir; or the folder exists.
        ConfigError, SystemExit: a bad flag.
        ModuleNotFoundError: transformers is missing; says what to install.
    """
    transformers = require_transformers()
    if folder.exists():
        raise InterchangeError(f"{folder} exists; choose another --to-run, or remove the folder")
    family = _family(source)
    found = _read_config(transformers, family, source)
    config = _config(family, found, folder, corpus, flags)
    opened = None if corpus is None else Corpus.open(corpus)
    if opened is not None:
        opened.require_model_vocabulary(config.model.vocabulary_size)
        if not require_same_tokenizer(opened.folder / "tokenizer.json", source):
            log(f"{source} has no tokenizer.json: only the size of the vocabulary was compared with {corpus}")
    places = tensor_places(source)
    wanted = list(pieces(config.model, config.moe, family.names))
    _require_names(source, wanted, places, config)
    log(f"reading {len(wanted)} tensors of {family.name}")
    model = build_model(config.model, config.moe, config.run.seed)
    _fill(model, wanted, {name: path for name, path in places.items() if not name.endswith(COMPUTED)}, source)
    with complete_folder(folder) as temporary:
        run = Run(temporary, config)
        (temporary / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
        run.write_environment(opened)
        run.checkpoints.mkdir()
        save_checkpoint(run.checkpoints, 0, [model], build_optimizer(model, config.training), {"tokens": 0})
    return Run.open(folder)


def _family(source: Path) -> Family:
    path = source / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model_type = values["model_type"]
    except FileNotFoundError:
        raise InterchangeError(f"{source}: not a checkpoint of transformers (no config.json)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InterchangeError(f"{path}: not a configuration of transformers ({error!r})") from None
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    hint = "; continue the run that was exported instead" if model_type == CHOIR else ""
    raise InterchangeError(f"{path}: model_type = {model_type!r}: must be one of {', '.join(FAMILIES)}{hint}")


def _read_config(transformers: Any, family: Family, source: Path) -> Any:
    """By transformers itself, so that old spellings and missing keys mean what they mean there."""
    # A package that comes with transformers and checks types.
    refused = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        return getattr(transformers, family.config_class).from_pretrained(source, local_files_only=True)
    except (ValueError, TypeError, KeyError, refused) as error:
        raise InterchangeError(f"{source / 'config.json'}: transformers refuses it ({error})") from None


def _config(family: Family, found: Any, folder: Path, corpus: Path | None, flags: Sequence[str]) -> Config:
    """The run's configuration: the checkpoint's model, and flags for the rest."""
    sections = family.sections(found)
    sections["run"] = {"name": folder.name, "folder": str(folder.parent)}
    # Without a corpus: a place where one may be put later.
    sections["data"] = {"corpus": str(folder / "corpus" if corpus is None else corpus)}
    sections["training"] = {"sequence_length": min(found.max_position_embeddings, LONGEST_SEQUENCE)}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "config.toml"
        base.write_text(tomli_w.dumps(sections), encoding="utf-8")
        plain = load_config([str(base)])
        config = load_config([str(base), *flags], "eval.export")
    before, after = config_values(plain), config_values(config)
    fixed = [key for key in before if key.startswith(("model.", "run.name", "run.folder")) or key in OF_THE_CHECKPOINT]
    for key in [*fixed, "data.corpus"]:
        if before[key] != after[key]:
            hint = "give --corpus" if key == "data.corpus" else "it belongs to the checkpoint"
            raise InterchangeError(f"--{key} {after[key]}: {hint}; here it is {before[key]}")
    return config


def _require_names(source: Path, wanted: list[Piece], places: dict[str, Path], config: Config) -> None:
    """Every tensor must be there, and none may be left over: it would be a part of the model that is ignored."""
    names = {piece.there for piece in wanted}
    missing = [name for name in names if name not in places]
    extra = [name for name in places if name not in names and not name.endswith(COMPUTED)]
    if config.model.tie_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")  # compared with the embedding when it is read
    if not missing and not extra:
        return
    faults = [f"missing {name}" for name in sorted(missing)[:3]] + [f"unexpected {name}" for name in sorted(extra)[:3]]
    stacked = any(name.endswith("experts.gate_up_proj") for name in extra)
    hint = "; its experts are stacked: transformers' save_pretrained writes them apart" if stacked else ""
    raise InterchangeError(
        f"{source}: {len(missing)} tensors missing, {len(extra)} unexpected: {'; '.join(faults)}{hint}"
    )


@torch.no_grad()
def _fill(model: Transformer, wanted: list[Piece], places: dict[str, Path], source: Path) -> None:
    state = model.state_dict()
    piece_of = {piece.there: piece for piece in wanted}
    heads: list[Tensor] = []

    def take(name: str, values: Tensor) -> None:
        if name not in piece_of:  # the head of tied embeddings, which may come before the embedding
            heads.append(values)
            return
        part = state[piece_of[name].here][piece_of[name].part]
        if part.shape != values.shape:
            shapes = f"has shape {tuple(values.shape)}, its config.json wants {tuple(part.shape)}"
            raise InterchangeError(f"{source}: {name} {shapes}")
        part.copy_(values)

    read_tensors(places, take)
    if any(not torch.equal(head, state["embedding.weight"]) for head in heads):
        raise InterchangeError(f"{source}: tie_word_embeddings = true, but lm_head.weight is not the embedding")
