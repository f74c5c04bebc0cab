"""What the commands of this room share: how they check numbers, print, and end with a line that says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from training.checkpoint import CheckpointError
from training.run import RunError


def run_command(main: Callable[[], None], error_status: int = 1) -> None:
    """Run a command; an expected error becomes one line on stderr and the exit status for errors.

    What counts as expected is what our own code raises for people: a `ValueError` (configurations and data have
    subclasses of it), a run or checkpoint that cannot be read, a missing file, a missing optional package. Anything
    else is a defect and keeps its traceback.
    """
    try:
        main()
    except (ValueError, OSError, ModuleNotFoundError, RunError, CheckpointError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error_status)
    except KeyboardInterrupt:
        sys.exit(130)


def terminal(width: int = 120) -> Console:
    """The console of a command. A pipe has no width, and 80 columns would cut the tables: it gets this one."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def require_at_least(least: int, **values: int | None) -> None:
    """Refuse a flag below what is allowed, by its name with underscores; one that was not given passes.

    Raises:
        ValueError: names the flag.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed are {least} and above")
