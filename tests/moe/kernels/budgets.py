"""What each Triton kernel may need on each target: `python -m tests.moe.kernels.budgets` writes the table."""

from __future__ import annotations

import json
from pathlib import Path

import triton

from moe.kernels.triton.ahead_of_time import EVERY_KERNEL, measure

TABLE = Path(__file__).with_name("budgets.json")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def budgets() -> dict[str, dict[str, dict[str, int]]]:
    """By target and kernel; empty under another Triton than the one that the table was made with."""
    table = json.loads(TABLE.read_text())
    found: dict[str, dict[str, dict[str, int]]] = table["kernels"] if table["triton"] == triton.__version__ else {}
    return found


if __name__ == "__main__":
    table = {target: {kernel: measure(kernel, target) for kernel in EVERY_KERNEL} for target in TARGETS}
    TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")
