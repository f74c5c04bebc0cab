"""Checkpoints: safetensors and JSON only, complete or absent, written and read under any layout.

`checkpoints/step_N/` holds `model/` (parameters and router state), `optimizer/` (both moments) and `checkpoint.json`
(step, counters, sizes and sha256 of all files). The two folders are written and read by `torch.distributed.checkpoint`
as safetensors: every process writes the parts it holds, what many hold is written once, and every process reads the
parts it wants. The whole is written under a temporary name, flushed to disk and renamed, so a crash at any moment
leaves earlier checkpoints whole. Nothing is ever unpickled from a file.

In a job of several processes, all of them save and load together, in a folder that all see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from data.atomic import commit, sync
from parallel.shards import local_part

FORMAT_VERSION = 2
MODEL, OPTIMIZER = PARTS = ("model", "optimizer")
# A file is put together in memory before it is written.
FILE_BYTES = 256 * 2**20

Part = TypeVar("Part")
Whole = TypeVar("Whole")
Kind = tuple[tuple[int, ...], torch.dtype]  # shape and type of a tensor


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written; the message names the file and the fault.

    Attributes:
        shared: whether all processes of the job raise it.
    """

    shared = False


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
    root: Path, step: int, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> Path:
    """Write `root/step_N`; an existing one of that step is replaced.

    Args:
        root: the run's `checkpoints` folder.
        step: optimizer steps done.
        modules: what this process holds of the model. Parameters and persistent buffers are saved under their names,
            which are those of the whole model; what has the same name has the same values.
        optimizer: its state is saved under "parameter name/state name".
        state: JSON values; those of the first process are taken.

    Raises:
        CheckpointError, OSError: if it cannot be written; nothing is left of it then.
    """
    final = root / f"step_{step}"
    temporary = root / f".step_{step}.writing"
    try:
        _together(lambda: None, lambda _: _make_folders(temporary))
        tensors = {MODEL: _model_tensors(modules), OPTIMIZER: _optimizer_tensors(modules, optimizer)}
        for part in PARTS:
            _write(temporary / part, _first(tensors[part]))

        def publish(written: list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Kind]]]]) -> None:
            files = {name: fingerprint for here, _ in written for name, fingerprint in here.items()}
            for name, fingerprint in files.items():
                path = temporary / name
                if not path.is_file() or path.stat().st_size != fingerprint["bytes"]:
                    raise CheckpointError(
                        f"{path}: written, but not seen by process 0: all must share the run's folder"
                    )
            for part in PARTS:
                _check_keys(temporary / part, [kinds[part] for _, kinds in written])
            manifest = {"format": FORMAT_VERSION, "step": step, "state": state, "files": files}
            (temporary / "checkpoint.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for name in ("checkpoint.json", *PARTS, "."):  # the other files were flushed by those that wrote them
                sync(temporary / name)
            if final.exists():
                shutil.rmtree(final)
            commit(temporary, final)

        kinds = {part: _kinds(tensors[part]) for part in PARTS}
        _together(lambda: (_written_here(temporary), kinds), publish)
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest_checkpoint(root: Path, parts: Sequence[str] = PARTS) -> Checkpoint | None:
    """The checkpoint with the highest step; None where there is none. `parts` are those that get checked.

    One process reads everything here: in a job of several, let one of them ask for all.

    Raises:
        CheckpointError: if it is damaged. Older ones are not taken in silence.
    """
    steps = [
        int(match[1])
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step_(\d+)", path.name))
    ]
    return open_checkpoint(root / f"step_{max(steps)}", parts) if steps else None


def open_checkpoint(folder: Path, parts: Sequence[str] = PARTS) -> Checkpoint:
    """Check a checkpoint's manifest, and the sizes and checksums of all files of `parts`.

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
    for part in parts:
        names = [name for name in recorded if name.startswith(f"{part}/")]
        for name in names:
            path, expected = folder / name, recorded[name]
            if not path.is_file():
                raise CheckpointError(f"{path}: damaged checkpoint: the file is missing; {hint}")
            if path.stat().st_size != expected.get("bytes"):
                raise CheckpointError(
                    f"{path}: damaged checkpoint: {path.stat().st_size} bytes, expected {expected.get('bytes')}; {hint}"
                )
            if _fingerprint(path) != expected:
                raise CheckpointError(f"{path}: damaged checkpoint: the checksum does not match; {hint}")
        for path in _files(folder / part):  # all of them would be read
            if f"{part}/{path.name}" not in names:
                raise CheckpointError(f"{path}: damaged checkpoint: checkpoint.json does not know the file; {hint}")
    return Checkpoint(folder, step, state)


def load_model(checkpoint: Checkpoint, modules: Sequence[nn.Module]) -> None:
    """Fill parameters and buffers; every key of the whole model must be there with its shape, and no other."""
    _read(checkpoint.folder / MODEL, _model_tensors(modules))


def load_optimizer(checkpoint: Checkpoint, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Restore both moments of AdamW and its step counts, bit for bit."""
    optimizer.state.clear()
    if not _files(checkpoint.folder / OPTIMIZER):  # saved before the first step
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                # Fused AdamW wants its step count there too.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    _read(checkpoint.folder / OPTIMIZER, _optimizer_tensors(modules, optimizer))


def _model_tensors(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor]]:
    return [item for module in modules for item in module.state_dict().items()]


def _optimizer_tensors(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {p: name for module in modules for name, p in module.named_parameters()}
    return [
        (f"{names[parameter]}/{key}", value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    ]


def _first(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The first of each name: a tied embedding may be here twice."""
    first: dict[str, Tensor] = {}
    for name, tensor in tensors:
        first.setdefault(name, tensor)
    return first


def _kinds(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Kind]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the parts that this job's processes hold; a process' files are those that `_written_here` finds."""
    sizes = {name: local_part(tensor).nbytes for name, tensor in tensors.items()}
    file_of = _together(lambda: sizes, _share_out)
    if not file_of:
        return
    # One thread: an error in any other would be lost.
    writer = dcp.HuggingFaceStorageWriter(str(folder), file_of, thread_count=1, save_distributed=True)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _named_failures(f"{folder}: cannot be written"):
        dcp.save(contiguous, storage_writer=writer, no_dist=not _many())


def _share_out(sizes: list[dict[str, int]]) -> dict[str, int]:
    """The number of the file, from 1, that each process writes its part of a tensor to, so that none is too large."""
    most: dict[str, int] = {}
    for held in sizes:
        for name, size in held.items():
            most[name] = max(size, most.get(name, 0))
    file_of, number, filled = {}, 1, 0
    for name, size in most.items():
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        file_of[name], filled = number, filled + size
    return file_of


def _written_here(temporary: Path) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of what this process has written: the writer numbers shards by rank."""
    pattern = f"shard-{_rank() + 1:05}-*"
    return {f"{part}/{path.name}": _fingerprint(path) for part in PARTS for path in (temporary / part).glob(pattern)}


def _read(folder: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Fill tensors in place."""
    first = _first(tensors)
    _together(lambda: _kinds(tensors), lambda held: _check_keys(folder, held))
    with _named_failures(f"{folder}: cannot be read"):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(first), storage_reader=reader, no_dist=not _many())
    for name, tensor in tensors:
        if tensor is not first[name]:
            tensor.copy_(first[name])


def _check_keys(folder: Path, held: list[dict[str, Kind]]) -> None:
    """Compare what all processes want with what is stored.

    Raises:
        CheckpointError: listing what differs.
    """
    found = _stored(folder)
    wanted = dict.fromkeys((name, *kind) for kinds in held for name, kind in kinds.items())
    names = {name for name, _, _ in wanted}
    faults = [f"missing {name}" for name in dict.fromkeys(name for name, _, _ in wanted) if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in names]
    for name, shape, dtype in wanted:
        if (stored := found.get(name)) is None:
            continue
        there, whole = sum(math.prod(chunk.sizes) for chunk in stored.chunks), math.prod(stored.size)
        if tuple(stored.size) != shape:
            faults.append(f"{name} has shape {tuple(stored.size)}, the model wants {shape}")
        elif stored.properties.dtype != dtype:
            faults.append(f"{name} is {stored.properties.dtype}, the model wants {dtype}")
        elif there != whole:
            faults.append(f"{name} has {there} of its {whole} values")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(f"{folder}: does not fit the model: {'; '.join(faults[:5])}{more}")


def _stored(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes, types and pieces of what a folder holds."""
    paths = _files(folder)
    for path in paths:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a safetensors file ({error})") from None
    metadata: Metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata() if paths else Metadata({})
    return {n: kept for n, kept in metadata.state_dict_metadata.items() if isinstance(kept, TensorStorageMetadata)}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _make_folders(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    for part in PARTS:
        (temporary / part).mkdir(parents=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _many() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _many() else 0


def _together(here: Callable[[], Part], at_main: Callable[[list[Part]], Whole]) -> Whole:
    """What `at_main` makes, on the first process, of what `here` gives on each, by rank; for all.

    Raises:
        CheckpointError: on all, if either fails anywhere: none is left waiting. One process alone raises its own error.
    """
    if not _many():
        return at_main([here()])
    given: tuple[str | None, Any] = (None, None)
    try:
        given = (None, here())
    except Exception as error:
        given = (_told(_rank(), error), None)
    everyones: list[Any] | None = [None] * dist.get_world_size() if _rank() == 0 else None
    dist.gather_object(given, everyones)
    outcome: list[Any] = [None, None]
    if everyones is not None:
        outcome[0] = next((fault for fault, _ in everyones if fault is not None), None)
        try:
            outcome[1] = at_main([part for _, part in everyones]) if outcome[0] is None else None
        except Exception as error:
            outcome[0] = _told(0, error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise _shared(outcome[0])
    result: Whole = outcome[1]
    return result


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """Raise as CheckpointError, on all processes, what went wrong on any of them within a save or load of torch's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if not isinstance(error, Exception):  # Ctrl-C
            raise error from None
        raise _shared(f"{what}: {_told(rank, error)}") from error


def _told(rank: int, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"process {rank}: {type(error).__name__}: {error}" if _many() else f"{type(error).__name__}: {error}"


def _shared(message: str) -> CheckpointError:
    error = CheckpointError(message)
    error.shared = True
    return error
