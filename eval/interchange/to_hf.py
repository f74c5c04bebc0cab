"""A run as a checkpoint of transformers."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.interchange.families import CHOIR, CHOIR_NAMES, FAMILIES, choir_values, choose_family, require_fit
from eval.interchange.folders import complete_folder
from eval.interchange.names import Names, pieces
from eval.interchange.served import InterchangeError, served
from eval.interchange.tensor_files import FILE_BYTES, write_tensors
from eval.interchange.tokenizer import write_tokenizer
from moe.model import Transformer
from training.config import Config
from training.run import Run

SOURCES = ("configuration_choir.py", "modeling_choir.py")
# State of training, which serves nothing: what balances load, learned noise, and predictors.
TRAINING_STATE = (".updates", ".load_E", ".noise_ED", ".bias_E", ".l1_weight", ".predictor.weight_ED")
# Largest difference of a logit, over the largest logit, that rounding can explain.
TOLERANCE = 1e-4
CHECK_ROWS, CHECK_LENGTH = 2, 33


def export(
    run: Run,
    output: Path,
    family: str | None = None,
    tokenizer: bool = True,
    check: bool = True,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    log: Callable[[str], None] = lambda line: None,
) -> str:
    """Write a run's newest checkpoint, in fp32.

    Args:
        run: with at least one checkpoint.
        output: folder to make; complete or absent, whatever happens.
        family: of `EXPORTABLE`; None chooses it by the run's configuration.
        tokenizer: write the corpus' tokenizer too; False needs no corpus.
        check: read the folder back with transformers and compare logits; takes the model's memory again.
        overwrite: replace an earlier export.
        file_bytes: largest file of weights.
        log: takes lines about what is done.

    Returns:
        The family.

    Raises:
        InterchangeError: the run cannot be expressed, the output is taken, or what was written does not compute the
            same.
        ModuleNotFoundError: transformers is missing; says what to install.
    """
    transformers = require_transformers()
    config = run.config
    if family is None:
        family = choose_family(config)
    require_fit(config, family)
    _require_room(output, overwrite)
    corpus = run.corpus() if tokenizer else None
    checkpoint = run.checkpoint()
    log(f"loading step {checkpoint.step} (of {config.training.steps}) of {run.folder}")
    model = run.model("cpu", checkpoint)
    with complete_folder(output) as folder, _quiet(transformers):
        # Never a pad_token_id: transformers would keep that row of the embedding from learning.
        end = None if corpus is None else corpus.tokenizer.end_of_text
        values = _values(config, family) | {"bos_token_id": end, "eos_token_id": end}
        _config_class(transformers, family)(**values).save_pretrained(folder)
        vocabulary_size = config.model.vocabulary_size if corpus is None else corpus.vocabulary_size
        generation = _generation_values(config, end, vocabulary_size)
        transformers.GenerationConfig(**generation).save_pretrained(folder)
        if family == CHOIR:
            for name in SOURCES:
                shutil.copyfile(Path(__file__).with_name(name), folder / name)
        log(f"writing {family} weights")
        write_tensors(folder, tensors_of(model, config, family), file_bytes)
        if corpus is not None:
            write_tokenizer(corpus.folder / "tokenizer.json", folder)
        if check:
            difference, largest = compare_logits(model, _load(transformers, folder, family))
            log(f"read back with transformers: logits differ by at most {difference:.1e} (largest logit {largest:.1f})")
            if not difference <= TOLERANCE * max(1.0, largest):
                raise InterchangeError(
                    f"transformers computes other logits from what was written: they differ by {difference:.2e}; "
                    "nothing was kept (--no-check keeps it)"
                )
    return family


def require_transformers() -> Any:
    """The package transformers.

    Raises:
        ModuleNotFoundError: it is missing; says what to install.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "interchange needs the package transformers: pip install -c constraints.txt transformers"
        ) from None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars, and its remarks on files that are only half written yet."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def tensors_of(model: Transformer, config: Config, family: str) -> list[tuple[str, Tensor]]:
    """Names and values of a checkpoint's tensors: views of the model's."""
    state = model.state_dict()
    names = _names(config, family)
    written = [(piece, state[piece.here][piece.part]) for piece in pieces(config.model, config.moe, names)]
    left = set(state) - {piece.here for piece, _ in written}
    unknown = sorted(name for name in left if not name.endswith((*TRAINING_STATE, ".cutoff_E")))
    if unknown:
        raise AssertionError(f"no place in a {family} checkpoint is defined for {unknown[0]}")
    return [(piece.there, values) for piece, values in written]


@torch.no_grad()
def compare_logits(model: Transformer, other: Any) -> tuple[float, float]:
    """(largest difference of a logit, largest logit) on random tokens, both models in fp32."""
    generator = torch.Generator().manual_seed(0)
    token_BS = torch.randint(model.config.vocabulary_size, (CHECK_ROWS, CHECK_LENGTH), generator=generator)
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        ours_BSV = model(token_BS)
    finally:
        model.compute_dtype = dtype
    theirs_BSV = other(token_BS).logits
    return float((ours_BSV - theirs_BSV).abs().max()), float(ours_BSV.abs().max())


def _values(config: Config, family: str) -> dict[str, Any]:
    if family == CHOIR:
        return choir_values(config)
    return FAMILIES[family].values(config) | {"architectures": [FAMILIES[family].model_class]}


def _names(config: Config, family: str) -> Names:
    if family != CHOIR:
        return FAMILIES[family].names
    return CHOIR_NAMES if served(config.moe).selection == "threshold" else Names(router=CHOIR_NAMES.router)


def _config_class(transformers: Any, family: str) -> Any:
    if family == CHOIR:
        return importlib.import_module("eval.interchange.configuration_choir").ChoirConfig
    return getattr(transformers, FAMILIES[family].config_class)


def _load(transformers: Any, folder: Path, family: str) -> Any:
    if family == CHOIR:
        model_class = importlib.import_module("eval.interchange.modeling_choir").ChoirForCausalLM
    else:
        model_class = getattr(transformers, FAMILIES[family].model_class)
    # The plain loop over experts: transformers' default refuses widths whose rows are not whole 16 bytes.
    model, report = model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    if problems := {key: sorted(map(str, names)) for key, names in report.items() if names}:
        raise InterchangeError(f"transformers does not read the weights back: {problems}")
    return model.eval()


def _generation_values(config: Config, end_of_text: int | None, vocabulary_size: int) -> dict[str, Any]:
    """Where generation stops, and which ids have no text: the model's vocabulary may be padded."""
    values: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
    unused = list(range(vocabulary_size, config.model.vocabulary_size))
    return values | ({"suppress_tokens": unused} if unused else {})


def _require_room(output: Path, overwrite: bool) -> None:
    """Refuse to write over anything but an earlier export, and over that unless asked to."""
    if not output.exists():
        return
    if not output.is_dir():
        raise InterchangeError(f"{output} is a file; choose another --output")
    if not overwrite:
        raise InterchangeError(f"{output} exists; choose another --output, or --overwrite to replace it")
    path = output / "config.json"
    try:
        is_checkpoint = "model_type" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        is_checkpoint = False
    if not is_checkpoint:
        raise InterchangeError(
            f"{output} exists and is not a checkpoint of transformers; it is left alone, choose another --output"
        )
