"""A checkpoint's tensors on disk: safetensors in one file, or in several with an index. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eval.interchange.served import InterchangeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A file is put together in memory before it is written.
FILE_BYTES = 2**30
# fp32 holds the values of all of these exactly.
EXACT_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def write_tensors(folder: Path, tensors: Sequence[tuple[str, Tensor]], file_bytes: int = FILE_BYTES) -> None:
    """Write tensors as transformers does: model.safetensors, or numbered files and an index.

    Args:
        folder: exists.
        tensors: names and values; views of one storage are written apart.
        file_bytes: a file is closed before it passes this size; a single larger tensor has a file of its own.
    """
    files: list[list[tuple[str, Tensor]]] = [[]]
    filled = 0
    for name, tensor in tensors:
        if files[-1] and filled + tensor.nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append((name, tensor))
        filled += tensor.nbytes
    names = [SINGLE] if len(files) == 1 else [f"model-{n:05}-of-{len(files):05}.safetensors" for n in _count(files)]
    for file_name, content in zip(names, files, strict=True):
        whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in content}
        path = folder / file_name
        path.touch()
        mode = path.stat().st_mode
        save_file(whole, path, metadata={"format": "pt"})
        path.chmod(mode)  # save_file makes files that others may not read
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for _, tensor in tensors)},
            "weight_map": {
                name: file_name for file_name, content in zip(names, files, strict=True) for name, _ in content
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _count(files: Sequence[object]) -> range:
    return range(1, len(files) + 1)


def tensor_places(folder: Path) -> dict[str, Path]:
    """The file of each tensor.

    Raises:
        InterchangeError: there are no safetensors, an index names what is not there, or a file is damaged.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            places = {str(name): folder / str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InterchangeError(f"{index}: not an index of safetensors files ({error})") from None
        for path in dict.fromkeys(places.values()):
            if path.parent != folder or path.suffix != ".safetensors" or not path.is_file():
                raise InterchangeError(f"{index} names {path.name}, which is no safetensors file of {folder}")
    elif (folder / SINGLE).is_file():
        places = dict.fromkeys(_names_in(folder / SINGLE), folder / SINGLE)
    else:
        pickles = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = (
            f"{pickles[0]} is a pickle, which can run code when it is read and is never opened here: convert it with "
            "transformers' save_pretrained"
            if pickles
            else "give the folder of a transformers checkpoint"
        )
        raise InterchangeError(f"{folder}: no {SINGLE} and no {INDEX}; {hint}")
    for path in dict.fromkeys(places.values()):
        held = set(_names_in(path))
        missing = [name for name, place in places.items() if place == path and name not in held]
        if missing:
            raise InterchangeError(f"{path}: {missing[0]} is not in it; the checkpoint is incomplete")
    return places


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InterchangeError(f"{path}: not a safetensors file ({error})") from None


def read_tensors(places: Mapping[str, Path], take: Callable[[str, Tensor], None]) -> None:
    """Hand over every tensor, one at a time, as fp32.

    Raises:
        InterchangeError: a tensor's type has values that fp32 has not.
    """
    for path in dict.fromkeys(places.values()):
        with safe_open(path, "pt") as file:
            for name in [name for name, place in places.items() if place == path]:
                tensor = file.get_tensor(name)
                if tensor.dtype not in EXACT_IN_FP32:
                    raise InterchangeError(
                        f"{path}: {name} is {tensor.dtype}; allowed are fp32, bf16 and fp16 (a quantised checkpoint "
                        "must be converted first)"
                    )
                take(name, tensor.float())
