"""How the commands of this room end: with their result, or with one line that says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
