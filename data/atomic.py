"""Files that appear complete or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    if os.name == "nt" and path.is_dir():  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, final: Path) -> None:
    """Give the finished file `temporary` its final name, replacing what was there."""
    os.replace(temporary, final)
    sync(final.parent)


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` and rename it to `path` on success.

    The temporary name is in the same folder because a rename is atomic only
    within one file system. An exception removes the temporary file; a kill
    leaves it, but never a file named `path`.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, allow_nan: bool = True) -> None:
    """Write a value as JSON, complete or not at all, and its folder where there is none.

    Args:
        path: of the file.
        value: plain data.
        allow_nan: whether nan and infinity may be in it, as names that JSON has not.

    Raises:
        ValueError: they may not, and one is.
    """
    content = json.dumps(value, indent=1, allow_nan=allow_nan) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as file:
        file.write(content.encode())
