"""Checkpoints: safetensors and JSON only, complete or absent.

`checkpoints/step_N/` holds `model.safetensors` (parameters and router state), `optimizer.safetensors` (both moments)
and `checkpoint.json` (step, counters, sizes and sha256 of the others). It is written under a temporary name, flushed
to disk and renamed, so a crash at any moment leaves earlier checkpoints whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.atomic import commit, sync

FORMAT_VERSION = 1
MODEL_FILE, OPTIMIZER_FILE = FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file and the fault."""


@dataclass
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        folder: `.../checkpoints/step_N`.
        step: optimizer steps done.
        state: everything else that was saved, as JSON values.
    """

    folder: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(
    root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Write `root/step_N`; an existing one of that step is replaced.

    Args:
        root: the run's `checkpoints` folder.
        step: optimizer steps done.
        model: parameters and persistent buffers are saved under their names.
        optimizer: its state is saved under "parameter name/state name".
        state: JSON values.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step_{step}"
    temporary = root / f".step_{step}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_file({k: v.detach().contiguous().cpu() for k, v in model.state_dict().items()}, temporary / MODEL_FILE)
        save_file(_optimizer_tensors(model, optimizer), temporary / OPTIMIZER_FILE)
        manifest = {
            "format": FORMAT_VERSION,
            "step": step,
            "state": state,
            "files": {name: _fingerprint(temporary / name) for name in FILES},
        }
        (temporary / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        commit(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest_checkpoint(root: Path, files: Sequence[str] = FILES) -> Checkpoint | None:
    """The checkpoint with the highest step; None where there is none. `files` are those that get checked.

    Raises:
        CheckpointError: if it is damaged. Older ones are not taken in silence.
    """
    steps = [
        int(match[1])
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step_(\d+)", path.name))
    ]
    return open_checkpoint(root / f"step_{max(steps)}", files) if steps else None


def open_checkpoint(folder: Path, files: Sequence[str] = FILES) -> Checkpoint:
    """Check a checkpoint's manifest, and the sizes and checksums of `files`.

    Raises:
        CheckpointError: naming the file, what was expected and what is there.
    """
    hint = "remove the folder to fall back on an earlier one"
    try:
        manifest = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        step, state, recorded = int(manifest["step"]), dict(manifest["state"]), dict(manifest["files"])
        version = manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: damaged checkpoint: checkpoint.json is missing; {hint}") from None
    except (ValueError, KeyError, TypeError) as error:
        message = f"{folder}: damaged checkpoint: checkpoint.json cannot be read ({error}); {hint}"
        raise CheckpointError(message) from None
    if folder.name != f"step_{step}":
        raise CheckpointError(f"{folder}: damaged checkpoint: checkpoint.json says step {step}; {hint}")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder}: checkpoint format {version}; this version reads {FORMAT_VERSION}")
    for name in files:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: damaged checkpoint: the file is missing; {hint}")
        expected = recorded.get(name, {})
        if path.stat().st_size != expected.get("bytes"):
            raise CheckpointError(
                f"{path}: damaged checkpoint: {path.stat().st_size} bytes, expected {expected.get('bytes')}; {hint}"
            )
        if _fingerprint(path) != expected:
            raise CheckpointError(f"{path}: damaged checkpoint: the checksum does not match; {hint}")
    return Checkpoint(folder, step, state)


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fill parameters and buffers; every key must be there with its shape, and no other."""
    loaded = _read(checkpoint.folder / MODEL_FILE)
    _check_keys(checkpoint.folder / MODEL_FILE, model.state_dict(), loaded)
    model.load_state_dict(loaded)


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore both moments and step counts, bit for bit."""
    loaded = _read(checkpoint.folder / OPTIMIZER_FILE)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                name = f"{names[parameter]}/{key}"
                expected.add(name)
                if name not in loaded:
                    raise CheckpointError(f"{checkpoint.folder / OPTIMIZER_FILE}: {name} is missing")
                entries[key] = loaded[name].to(parameter.device)  # fused AdamW wants its step count there too
            optimizer.state[parameter] = entries
    if extra := sorted(set(loaded) - expected):
        raise CheckpointError(f"{checkpoint.folder / OPTIMIZER_FILE}: unexpected {', '.join(extra[:5])}")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error})") from None


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.detach().contiguous().cpu()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def _check_keys(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    faults = [f"missing {name}" for name in wanted if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in wanted]
    faults += [
        f"{name} has shape {tuple(found[name].shape)}, the model wants {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{path}: does not fit the model: {'; '.join(faults[:5])}{more}")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
