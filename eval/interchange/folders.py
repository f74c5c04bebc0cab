"""Folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from data.atomic import sync


@contextlib.contextmanager
def complete_folder(output: Path) -> Iterator[Path]:
    """Make a temporary folder beside `output`, and give it that name on success.

    What is at `output` is replaced then; who calls this has decided that it may be. An exception leaves it as it was.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.parent / f".{output.name}.{os.getpid()}.partial"
    replaced = output.parent / f".{output.name}.{os.getpid()}.replaced"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        if output.exists():
            os.rename(output, replaced)
        try:
            os.rename(temporary, output)
        except OSError:
            if replaced.exists():
                os.rename(replaced, output)
            raise
        sync(output.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
