"""Plot the rewards of all steps and the scores of all evaluations; for a run without rewards, plot the loss."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll.tracking import atomic
from roll.tracking.console_views import EvaluationView

__all__ = ["is_loss_plotted", "plot_run", "smooth"]

_REWARD_COLOR, _ACCURACY_COLOR, _TEXT_COLOR, _GRID_COLOR = "#2a78d6", "#e07b00", "#333333", "#e4e4e4"


def is_loss_plotted(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether to plot the loss instead of the reward, because no step has a reward."""
    return not _select_points(rows, "train", "reward/mean")


def plot_run(path: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot the reward (or the loss) and the held-out scores over steps, and write the image to `path`.

    Args:
        path: The PNG file.
        name: Title of the plot.
        rows: Lines of `metrics.jsonl`.

    Raises:
        OSError: The file cannot be written.
    """
    # pyplot is not used, since it would select a GUI backend and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    quantity = "loss" if is_loss_plotted(rows) else "reward"
    rewards = _select_points(rows, "train", "training/loss" if quantity == "loss" else "reward/mean")
    views = [EvaluationView.from_metrics(row["step"], row) for row in rows if row["kind"] == "evaluation"]
    held_out = [(view.step, view.value) for view in views if view.value is not None]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if rewards:
        steps, values = zip(*rewards, strict=True)
        axes.plot(steps, values, color=_REWARD_COLOR, alpha=0.3, linewidth=1)
        axes.plot(steps, smooth(values), color=_REWARD_COLOR, linewidth=2.2, label=f"training {quantity}, smoothed")
    if held_out:
        steps, values = zip(*held_out, strict=True)
        axes.plot(
            steps,
            values,
            color=_ACCURACY_COLOR,
            marker="o",
            markersize=6,
            linewidth=1.4,
            linestyle="--",
            clip_on=False,
            zorder=3,
            label=f"held-out {views[-1].measure}",
        )
        for index in {0, len(values) - 1}:
            axes.annotate(
                f"{values[index]:.2f}",
                (steps[index], values[index]),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color=_ACCURACY_COLOR,
                fontsize=10,
                fontweight="bold",
            )
    _style_axes(axes, name, [v for _, v in (*rewards, *held_out)])
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    atomic.write_bytes(path, buffer.getvalue())


def _style_axes(axes: Any, name: str, values: Sequence[float]) -> None:
    axes.set_title(name, loc="left", color=_TEXT_COLOR, fontsize=13, fontweight="bold", pad=14)
    axes.set_xlabel("step", color=_TEXT_COLOR)
    axes.grid(axis="y", color=_GRID_COLOR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_TEXT_COLOR, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.05)
    if values:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, labelcolor=_TEXT_COLOR)


def _select_points(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row["kind"] == kind and row.get(name) is not None]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average over a centered window whose length is a tenth of the series.

    The window is narrower at both ends, so that the average does not lag.
    """
    half = max(1, len(values) // 20)
    smoothed = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
