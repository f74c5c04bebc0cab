"""Figures draw what there is, keep non-causal values apart, and say when they cannot be drawn."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from eval import figures

METRICS: list[dict[str, Any]] = [
    *({"step": step, "noncausal_bits_per_byte": 4 - step / 10} for step in range(1, 5)),
    {"step": 5, "bits_per_byte": 3.5, "val/bits_per_byte": 3.7},
    {"step": 6, "bits_per_byte": 3.4},
    {"step": 6, "final/bits_per_byte": 3.6},
]


def texts(axes: Any) -> str:
    legend = axes.get_legend()
    return " | ".join([axes.get_title(), axes.get_ylabel(), *(text.get_text() for text in legend.get_texts())])


def test_noncausal_losses_have_a_panel_of_their_own_that_says_so() -> None:
    figure = figures.loss_figure(METRICS, threshold_step=4)
    causal, noncausal = figure.axes
    assert "NOT causal" in texts(noncausal) and "Never a result" in texts(noncausal)
    assert "expert choice" in texts(noncausal) and "expert choice" not in texts(causal)
    assert "held-out, causal routing" in texts(causal) and "switch to threshold routing" in texts(causal)
    assert "bits per byte" in texts(causal)
    drawn = {line.get_label(): line.get_xdata() for line in causal.lines}
    # The final evaluation reads other windows: it is no point of the curve.
    assert list(drawn["held-out, causal routing"]) == [5]
    assert list(drawn["at the end, on more text"]) == [6]
    assert list(drawn["training, causal routing"]) == [5, 6]


def test_a_causal_run_has_one_panel() -> None:
    assert len(figures.loss_figure(METRICS[-3:]).axes) == 1


def test_many_steps_are_smoothed_and_the_label_says_over_how_many() -> None:
    metrics = [{"step": step, "bits_per_byte": float(step % 2)} for step in range(1, 201)]
    (panel,) = figures.loss_figure(metrics).axes
    assert "mean of 4 steps" in texts(panel)
    assert panel.lines[-1].get_ydata()[-1] == pytest.approx(0.5)


def test_load_is_drawn_relative_to_an_equal_share() -> None:
    records = [
        {"step": 10, "counts": [[3, 3], [1, 7]], "threshold_phase": False},
        {"step": 20, "counts": [[6, 2], [0, 0]], "threshold_phase": True},
    ]
    figure = figures.load_figure(records, 15, ["layer 0", "layer 2"])
    first, second = figure.axes[:2]
    assert (first.get_title(), second.get_title()) == ("layer 0", "layer 2")
    log2_EX = np.asarray(first.collections[0].get_array()).reshape(2, 2)
    assert log2_EX == pytest.approx(np.log2([[1, 1.5], [1, 0.5]]))
    # A layer that routed nothing is neither over nor under its share.
    assert second.collections[0].get_array().reshape(2, 2)[:, 1].tolist() == [0, 0]


def test_domains_are_drawn_relative_to_the_null() -> None:
    share_LME = np.array([[[1.0, 0.5], [0.25, 0.25]], [[0.5, 0.5], [0.5, np.nan]]])
    figure = figures.domain_figure(share_LME, ["a", "b"])
    first = figure.axes[0]
    log2_ME = np.asarray(first.collections[0].get_array()).reshape(2, 2)
    assert log2_ME == pytest.approx(np.log2([[2, 1], [0.5, 0.5]]))
    assert [label.get_text() for label in first.get_yticklabels()] == ["a", "b"]


@pytest.mark.parametrize("layers", [1, 3, 11])
def test_figures_become_png(layers: int) -> None:
    share_LME = np.ones((layers, 2, 5))
    assert figures.to_png(figures.domain_figure(share_LME, ["a", "b"])).startswith(b"\x89PNG")


def test_nothing_to_draw_is_explained() -> None:
    with pytest.raises(ValueError, match="no step yet"):
        figures.loss_figure([])
    with pytest.raises(ValueError, match="no record"):
        figures.load_figure([])


def test_a_missing_matplotlib_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="figures need matplotlib .*--no-figures"):
        figures.loss_figure(METRICS)
