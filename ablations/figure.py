"""The figure of an ablation: every run a point, every arm a mean with its interval."""

from __future__ import annotations

from typing import Any

from ablations.summary import ranking
from eval.figures import BLUE, GREY, ORANGE, new_figure


def scores_figure(summary: dict[str, Any]) -> Any:
    """Held-out bits a byte under causal routing on the left, paired differences to the baseline on the right.

    The left panel shows runs as open circles, joined by a line where they share a seed, and means with 95% t intervals
    as filled squares. On the right an interval that does not reach 0 is orange and thick.

    Args:
        summary: from `summarise`.
    """
    arms, baseline = summary["arms"], summary["baseline"]
    order = ranking(summary)[::-1]  # the best on top
    figure = new_figure(10, 1.4 + 0.42 * len(order))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for seed in summary["seeds"]:
        points = [
            (runs[str(seed)]["bits_per_byte"], place)
            for place, name in enumerate(order)
            if str(seed) in (runs := arms[name]["runs"])
        ]
        if points:
            left.plot(*zip(*points, strict=True), color=GREY, linewidth=0.5, alpha=0.4, zorder=1)
            left.plot(
                *zip(*points, strict=True), color=GREY, marker="o", mfc="white", markersize=5, linestyle="", zorder=2
            )
    for place, name in enumerate(order):
        _bar(left, arms[name]["means"]["bits_per_byte"], place, BLUE, 1.5)
        difference = arms[name]["against_baseline"]
        if difference is not None:
            low, high = difference["low"], difference["high"]
            clear = low is not None and not low <= 0 <= high
            _bar(right, difference, place, ORANGE if clear else BLUE, 3 if clear else 1.2)
    right.axvline(0, color="black", linewidth=0.8, linestyle=":")
    left.set_yticks(range(len(order)), [f"{name} (baseline)" if name == baseline else name for name in order])
    left.set_ylim(-0.6, len(order) - 0.4)
    left.set_xlabel("held-out bits per byte, causal routing (circles: seeds)")
    right.set_xlabel(f"paired difference to {baseline}\n(left of 0: better; 95% t, uncorrected)")
    for panel in (left, right):
        panel.grid(alpha=0.25, axis="x")
    smoke = "SMOKE RUN, not a result: " if summary["quick"] else ""
    figure.suptitle(f"{smoke}{summary['name']}", fontsize=11)
    return figure


def _bar(panel: Any, value: dict[str, Any], place: int, colour: str, width: float) -> None:
    if value["low"] is not None:
        panel.plot([value["low"], value["high"]], [place, place], color=colour, linewidth=width, zorder=3)
    panel.plot([value["mean"]], [place], color=colour, marker="s", markersize=5, zorder=4)
