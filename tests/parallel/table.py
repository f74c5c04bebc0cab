"""The README's table of proven layouts, from the last run of `test_layouts.py`: `python -m tests.parallel.table`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.parallel import cases
from tests.parallel.cases import Case

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BEGIN, END = "<!-- proven layouts: begin -->", "<!-- proven layouts: end -->"
RECORD = ROOT / ".pytest_cache" / "proven_layouts.json"


class Proven(NamedTuple):
    """A case that passed: its number of processes, its layout, and the largest relative difference."""

    world: int
    layout: str
    worst: float


def all_cases() -> list[Case]:
    """Also the one with sixteen processes."""
    return [*cases.every_case(), cases.sixteen()]


def record(proven: dict[str, Proven]) -> None:
    """Keep what a run has proven, beside what earlier ones did."""
    RECORD.parent.mkdir(exist_ok=True)
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(known | proven))


def table(proven: list[Proven]) -> str:
    """Markdown, one row a number of processes."""
    rows = ["| processes | layouts | cases | largest difference |", "| --- | --- | --- | --- |"]
    for world in sorted({p.world for p in proven}):
        here = [p for p in proven if p.world == world]
        layouts = ", ".join(dict.fromkeys(p.layout.replace(", ", " with ") for p in here))
        rows.append(f"| {world} | {layouts} | {len(here)} | {max(p.worst for p in here):.0e} |")
    return "\n".join(rows)


def without_numbers(text: str) -> str:
    """What does not change from run to run."""
    return re.sub(r"\d+e-\d+|0e\+00", "", text).strip()


if __name__ == "__main__":
    known = {name: Proven(*values) for name, values in json.loads(RECORD.read_text()).items()}
    missing = [case.key for case in all_cases() if case.key not in known]
    if missing:
        raise SystemExit(
            f"not proven yet: {', '.join(missing[:5])}; run python -m pytest tests/parallel/test_layouts.py"
        )
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    shown = table([known[case.key] for case in all_cases()])
    README.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
