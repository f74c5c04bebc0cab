"""`ablations/RESULTS.md`: one section an ablation, between markers, so that a rerun replaces exactly its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ablations.tables import markdown
from data.atomic import write_atomically
from moe.config import require

RESULTS = Path(__file__).with_name("RESULTS.md")


def markers(name: str) -> tuple[str, str]:
    """The lines that enclose a section."""
    return f"<!-- ablation {name}: begin -->", f"<!-- ablation {name}: end -->"


def record(summary: dict[str, Any], figure: bytes, path: Path = RESULTS) -> list[Path]:
    """Write an ablation's section and its figure (figures/NAME.png beside the file).

    Args:
        summary: from `summarise`.
        figure: PNG.
        path: of the Markdown file.

    Returns:
        The files.

    Raises:
        ConfigError: it is a smoke run, or incomplete.
    """
    name = summary["name"]
    require(not summary["quick"], f"{name}: a smoke run is no result and is not recorded; run it without --quick")
    require(not summary["missing"], f"{name}: not recorded, runs are missing: {'; '.join(summary['missing'])}")
    picture = path.parent / "figures" / f"{name}.png"
    picture.parent.mkdir(exist_ok=True)
    with write_atomically(picture) as file:
        file.write(figure)
    replace_section(path, name, markdown(summary, f"figures/{name}.png", level=2))
    return [path, picture]


def replace_section(path: Path, name: str, body: str) -> None:
    """Put `body` between the markers of `name`; at the end of the file where there are none yet.

    Raises:
        ValueError: one of the two markers is missing, or there is a second one.
    """
    begin, end = markers(name)
    text = path.read_text(encoding="utf-8") if path.is_file() else "# Results of the ablations\n"
    counts = text.count(begin), text.count(end)
    section = f"{begin}\n{body.strip()}\n{end}"
    if counts == (0, 0):
        text = f"{text.rstrip()}\n\n{section}\n"
    elif counts == (1, 1) and text.index(begin) < text.index(end):
        before, _, rest = text.partition(begin)
        text = f"{before}{section}{rest.partition(end)[2]}"
    else:
        raise ValueError(f"{path}: the markers {begin} and {end} must be there once each, in this order; mend them")
    with write_atomically(path) as file:
        file.write(text.encode())
