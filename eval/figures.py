"""Figures of a run. Matplotlib is imported when the first one is drawn, so that nothing else needs it.

All functions return a matplotlib `Figure`; `to_png` turns it into bytes. Colours are distinguishable with the common
forms of colour blindness (Okabe & Ito 2008; matplotlib's PuOr), and nothing is told by colour alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
# Relative loads are drawn on a logarithmic scale from a quarter to four times the uniform value.
RELATIVE_LIMIT = 4.0


def to_png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def loss_figure(metrics: Sequence[dict[str, Any]], threshold_step: int | None = None, title: str = "") -> Any:
    """Bits per byte over steps; what a non-causal router gave is drawn in a panel of its own.

    Args:
        metrics: lines of metrics.jsonl.
        threshold_step: steps after which training routes by threshold; None where it never changes.
        title: of the figure.

    Raises:
        ValueError: there is nothing to draw.
    """
    causal, noncausal, held_out = (
        _series(metrics, key) for key in ("bits_per_byte", "noncausal_bits_per_byte", "val/bits_per_byte")
    )
    final = _series(metrics, "final/bits_per_byte")
    if not (causal[0].size or noncausal[0].size or held_out[0].size):
        raise ValueError("metrics.jsonl has no step yet: train first")
    apart = noncausal[0].size > 0
    figure = new_figure(7, 6.4 if apart else 4)
    panels = figure.subplots(2 if apart else 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    if causal[0].size:
        _noisy_line(panels[0], *causal, BLUE, "training, causal routing")
    if held_out[0].size:
        panels[0].plot(*held_out, color=ORANGE, marker="o", markersize=4, label="held-out, causal routing")
    if final[0].size:  # other windows than the curve's: not its last point
        panels[0].plot(*final, color=ORANGE, marker="*", markersize=11, linestyle="", label="at the end, on more text")
    panels[0].set_title(title or "Loss")
    if apart:
        _noisy_line(panels[1], *noncausal, GREY, "training, expert choice", "--")
        panels[1].set_title("NOT causal: the router sees later tokens. Never a result.", fontsize=10, color=GREY)
    for panel in panels:
        panel.set_ylabel("bits per byte")
        if threshold_step:
            panel.axvline(threshold_step, color="black", linestyle=":", label="switch to threshold routing")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False, fontsize=9)
    panels[-1].set_xlabel("optimizer step")
    return figure


def load_figure(
    records: Sequence[dict[str, Any]], threshold_step: int | None = None, layer_names: Sequence[str] = ()
) -> Any:
    """Load of each expert over training steps, one panel a layer, relative to an equal share.

    Args:
        records: lines of routing/steps.jsonl: {"step", "counts": per layer and expert}.
        threshold_step: steps after which training routes by threshold; None where it never changes.
        layer_names: of the panels; "layer 0", ... where not given.

    Raises:
        ValueError: there is no record.
    """
    if not records:
        raise ValueError("routing/steps.jsonl has no record: nothing was routed, or log.every is above the steps run")
    counts_XLE = np.array([record["counts"] for record in records], dtype=np.float64)
    mean_XL1 = counts_XLE.mean(-1, keepdims=True)
    relative_XLE = np.divide(counts_XLE, mean_XL1, out=np.ones_like(counts_XLE), where=mean_XL1 > 0)
    steps = [record["step"] for record in records]
    edges = _edges(steps)
    layers, experts = counts_XLE.shape[1:]
    figure, panels = _grid(layers)
    for layer, panel in enumerate(panels):
        image = panel.pcolormesh(edges, np.arange(experts + 1) - 0.5, _log2(relative_XLE[:, layer].T), **_scale())
        panel.set_title(layer_names[layer] if layer_names else f"layer {layer}", fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.set_ylabel("expert")
        panel.yaxis.get_major_locator().set_params(integer=True)
        if threshold_step:
            panel.axvline(threshold_step, color="black", linestyle=":")
    _relative_bar(figure, image, panels, "load / equal share")
    figure.suptitle(
        "Load of each expert in training"
        + (" (equal by construction up to the switch to thresholds)" if threshold_step else "")
    )
    return figure


def domain_figure(share_LME: np.ndarray, domains: Sequence[str], layer_names: Sequence[str] = ()) -> Any:
    """Share of each domain's tokens that each expert takes, relative to no specialisation, one panel a layer.

    Args:
        share_LME: (L, M, E) N_{e,D} / N_D from `routing_metrics.domain_specialisation`.
        domains: M names.
        layer_names: of the panels; "layer 0", ... where not given.
    """
    share_LME = np.asarray(share_LME, dtype=np.float64)
    # The null k/E of each layer, with the k that was realised in the mean over domains.
    null_L11 = np.nanmean(share_LME, axis=(1, 2), keepdims=True)
    relative_LME = np.divide(share_LME, null_L11, out=np.ones_like(share_LME), where=null_L11 > 0)
    figure, panels = _grid(len(share_LME), height=max(2.2, 0.28 * len(domains) + 1.2))
    corners_E = np.arange(share_LME.shape[2] + 1) - 0.5
    corners_M = np.arange(len(domains) + 1) - 0.5
    for layer, panel in enumerate(panels):
        image = panel.pcolormesh(corners_E, corners_M, _log2(relative_LME[layer]), **_scale())
        panel.set_title(layer_names[layer] if layer_names else f"layer {layer}", fontsize=10)
        panel.set_yticks(range(len(domains)), domains, fontsize=8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.invert_yaxis()
        panel.set_xlabel("expert")
    _relative_bar(figure, image, panels, "times an equal share")
    figure.suptitle("Experts by domain, held-out text, causal routing")
    return figure


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches, which needs no screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = f"figures need matplotlib ({error}): install it, or give --no-figures"
        raise ModuleNotFoundError(message) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and leaves pyplot's global state alone
    return figure


def _grid(panels: int, height: float = 2.6) -> tuple[Any, list[Any]]:
    columns = min(panels, 2) if panels <= 8 else 4
    rows = math.ceil(panels / columns)
    figure = new_figure(4.2 * columns + 1, height * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, axes[:panels]


def _series(metrics: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a key; of two lines for one step the later one, the final evaluation, holds."""
    points = {line["step"]: line[key] for line in metrics if line.get(key) is not None}
    steps = sorted(points)
    return np.array(steps, dtype=np.float64), np.array([points[step] for step in steps], dtype=np.float64)


def _noisy_line(panel: Any, step_N: np.ndarray, value_N: np.ndarray, colour: str, label: str, style: str = "-") -> None:
    """Every step faintly, and over it the mean of the last few."""
    span = max(1, step_N.size // 50)
    total_N = np.concatenate([[0.0], np.cumsum(value_N)])
    end_N = np.arange(1, value_N.size + 1)
    start_N = np.maximum(end_N - span, 0)
    smooth_N = (total_N[end_N] - total_N[start_N]) / (end_N - start_N)
    if span > 1:
        panel.plot(step_N, value_N, color=colour, alpha=0.25, linewidth=0.7)
        label = f"{label} (mean of {span} steps)"
    panel.plot(step_N, smooth_N, color=colour, linestyle=style, linewidth=1.4, label=label)


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Borders of the columns that stand for recorded steps."""
    step_X = np.array(steps, dtype=np.float64)
    if step_X.size == 1:
        return np.array([step_X[0] - 0.5, step_X[0] + 0.5])
    middle = (step_X[1:] + step_X[:-1]) / 2
    return np.concatenate([[2 * step_X[0] - middle[0]], middle, [2 * step_X[-1] - middle[-1]]])


def _log2(relative: np.ndarray) -> np.ndarray:
    return np.log2(np.clip(relative, 1 / RELATIVE_LIMIT, RELATIVE_LIMIT))


def _scale() -> dict[str, Any]:
    limit = math.log2(RELATIVE_LIMIT)
    return {"cmap": "PuOr_r", "vmin": -limit, "vmax": limit}


def _relative_bar(figure: Any, image: Any, panels: list[Any], label: str) -> None:
    bar = figure.colorbar(image, ax=panels, shrink=0.8)
    bar.set_ticks([-2, -1, 0, 1, 2], labels=["1/4 or less", "1/2", "1", "2", "4 or more"])
    bar.set_label(label)
