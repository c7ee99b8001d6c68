"""`roll simulate`: simulate every variant of a file with every seed, and write a table, a plot and JSON."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.simulation import PaperConfig, SimulationConfig
from roll.preflight.report import align_rows
from roll.simulation.run import SimulatedRun, simulate
from roll.simulation.sharing_choice import resolve_sharing
from roll.tracking import atomic

__all__ = [
    "ConfidenceInterval",
    "SimulationResults",
    "compute_confidence_interval",
    "render_results",
    "simulate_variants",
    "write_results",
]

TOLERANCE = 0.15
"""Relative tolerance within which a simulation reproduces a published ratio."""
MAX_TOKEN_DIFFERENCE = 0.01
"""Maximum relative difference in trained tokens per step between variants whose step times are comparable."""
MAX_PRICE_DIFFERENCE = 0.02
"""Maximum relative difference in the price of all devices between variants whose step times are comparable; different
devices have different prices, so equal prices are not always possible."""
# Two-sided 95 % quantiles of Student's t, by degrees of freedom; beyond the table, the normal quantile is close.
_STUDENT_T_QUANTILES = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
_STUDENT_T_QUANTILES_MORE = {19: 2.093, 24: 2.064, 29: 2.045}
_TEXT_COLOR, _GRID_COLOR = "#333333", "#e4e4e4"
_STEP_PARTS = (
    ("wait_s", "generation and rewards", "#2a78d6"),
    ("train_s", "training", "#e07b00"),
    ("sync_s", "sync", "#8a8a8a"),
)
_LINE_COLORS = ("#2a78d6", "#e07b00", "#2f9e44", "#9c36b5", "#c92a2a", "#0b7285", "#8a8a8a", "#5c4813")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfidenceInterval:
    """A mean over seeds and half of its 95 % confidence interval (0 for one seed)."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if not self.half else f"{self.mean:.3g} ± {self.half:.2g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResults:
    """All runs of a simulation: for each variant one run per seed, in the order of the seeds."""

    config: SimulationConfig
    runs: Mapping[str, Sequence[SimulatedRun]]
    sharing: Mapping[str, str] = field(default_factory=dict)
    """For each variant with `placement.sharing: auto`, the chosen rule and the reason for it."""

    @property
    def baseline(self) -> str:
        """Name of the first variant, to which the others are compared."""
        return next(iter(self.runs))

    def compute_step_s(self, variant: str) -> ConfidenceInterval:
        """Return the mean duration of a step of a variant, with its confidence interval over seeds."""
        return compute_confidence_interval([run.step_s for run in self.runs[variant]])

    def compute_ratio(self, slower: str, faster: str) -> ConfidenceInterval:
        """Return the speed-up of `faster` over `slower`: the ratio of their step times, as a mean over seeds."""
        pairs = zip(self.runs[slower], self.runs[faster], strict=True)
        return compute_confidence_interval([slow.step_s / fast.step_s for slow, fast in pairs])

    def compute_mean(self, variant: str, name: str) -> float:
        """Return the mean of a field of `StepRecord` over all steps of all seeds of a variant."""
        return statistics.fmean(getattr(step, name) for run in self.runs[variant] for step in run.steps)

    def get_num_devices(self, variant: str) -> int:
        """Return the number of devices of a variant."""
        return (self.config.select_variant(variant) if self.config.variants else self.config).placement.num_devices

    def get_price_per_hour(self, variant: str) -> float | None:
        """Return the price of a variant's devices per hour; `None` if prices are not known."""
        return (self.config.select_variant(variant) if self.config.variants else self.config).price_per_hour

    def compute_step_cost(self, variant: str) -> float | None:
        """Return the mean price of a step of a variant; `None` if prices are not known."""
        price = self.get_price_per_hour(variant)
        return None if price is None else price * self.compute_step_s(variant).mean / 3600

    def get_max_staleness(self, variant: str) -> int:
        """Return the maximum staleness of the rollouts that a variant trained on, in policy versions."""
        return max(step.max_staleness for run in self.runs[variant] for step in run.steps)

    def describe_unequal_work(self, variant: str) -> str:
        """Describe how the work of a variant differs from the baseline; an empty string if the step times are
        comparable.
        """
        differences: list[str] = []
        tokens = self.compute_mean(variant, "num_tokens") / max(1.0, self.compute_mean(self.baseline, "num_tokens")) - 1
        if abs(tokens) > MAX_TOKEN_DIFFERENCE:
            differences.append(f"{abs(tokens):.0%} {'more' if tokens > 0 else 'fewer'} tokens trained per step")
        price, base_price = self.get_price_per_hour(variant), self.get_price_per_hour(self.baseline)
        if price is not None and base_price is not None:
            if abs(difference := price / base_price - 1) > MAX_PRICE_DIFFERENCE:
                differences.append(f"devices that cost {abs(difference):.0%} {'more' if difference > 0 else 'less'}")
        elif (devices := self.get_num_devices(variant)) != (base := self.get_num_devices(self.baseline)):
            differences.append(f"{devices} devices instead of {base}")
        if (staleness := self.get_max_staleness(variant)) != (base := self.get_max_staleness(self.baseline)):
            differences.append(f"staleness up to {staleness} instead of {base}")
        return ", ".join(differences)

    def reproduces(self, figure: PaperConfig) -> bool:
        """Return whether the simulated speed-up is within 15 % of the published speed-up, or range, in `figure`."""
        ratio = self.compute_ratio(figure.baseline, figure.variant).mean
        return figure.ratio * (1 - TOLERANCE) <= ratio <= (figure.max_ratio or figure.ratio) * (1 + TOLERANCE)


def simulate_variants(
    config: SimulationConfig,
    *,
    variant_names: Sequence[str] = (),
    trace: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    processes: Executor | None = None,
) -> SimulationResults:
    """Simulate every variant with every seed, and return all results.

    Args:
        config: The workload.
        variant_names: Variants to simulate; empty for all.
        trace: Whether to keep the events of each variant's first seed.
        progress: Called with a line for every completed run.
        processes: Worker pool for the simulations; by default, simulations run one by one in this process.

    Raises:
        UserError: A variant is unknown, or cannot be simulated.
    """
    names = list(variant_names) or list(config.variants) or ["as written"]
    written = {name: config.select_variant(name) if config.variants or variant_names else config for name in names}
    resolved = {name: resolve_sharing(variant) for name, variant in written.items()}
    variants = {name: variant for name, (variant, _) in resolved.items()}
    jobs = [
        (name, partial(simulate, variant, seed=config.seed + number, trace=trace and number == 0))
        for number in range(config.num_seeds)
        for name, variant in variants.items()
    ]
    if processes is None:
        ended = (job() for _, job in jobs)
    else:
        ended = (future.result() for future in [processes.submit(job) for _, job in jobs])
    runs: dict[str, list[SimulatedRun]] = {name: [] for name in names}
    for (name, _), run in zip(jobs, ended, strict=True):
        runs[name].append(run)
        progress(f"{name}, seed {run.seed}: {run.step_s:.4g} s a step ({run.wall_s:.1f} s to simulate)")
    sharing = {name: line for name, (_, line) in resolved.items() if line}
    return SimulationResults(config=config, runs=runs, sharing=sharing)


def compute_confidence_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Return the mean and its 95 % confidence interval, by Student's t."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    if freedom == 0:
        return ConfidenceInterval(mean=mean, half=0.0)
    known = dict(enumerate(_STUDENT_T_QUANTILES, 1)) | _STUDENT_T_QUANTILES_MORE
    quantile = known.get(freedom) or next((known[n] for n in sorted(known, reverse=True) if n < freedom), 1.96)
    return ConfidenceInterval(mean=mean, half=quantile * statistics.stdev(values) / math.sqrt(len(values)))


def render_results(results: SimulationResults) -> str:
    """Format the results as a table of the variants, for a terminal."""
    config = results.config
    place = config.placement
    where = f"{place.generation} + {place.training}"
    if place.shares_devices:
        train = "" if place.is_colocated else f"{place.training} of them "
        where = f"{place.generation} generate and {train}train"
    num_seeds = len(results.runs[results.baseline])
    head = (
        f"{config.name}: {config.model} on {place.num_devices} x {config.device} ({where}), "
        f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size}, "
        f"up to {config.rollout.max_new_tokens:,} tokens; {num_seeds} seed{'s' if num_seeds > 1 else ''}"
    )
    has_prices = any(results.get_price_per_hour(variant) is not None for variant in results.runs)
    rows: list[tuple[str, ...]] = [
        (
            *("variant", "devices", "step", "speed-up", "wait", "train", "sync", "busy", "tokens/s", "tokens trained"),
            *("preempted", "staleness"),
            *(("cost of a step",) if has_prices else ()),
        )
    ]
    for variant in results.runs:
        mark = "*" if results.describe_unequal_work(variant) else ""
        rows.append(
            (
                variant,
                str(results.get_num_devices(variant)),
                f"{results.compute_step_s(variant)} s",
                f"{results.compute_ratio(results.baseline, variant)}{mark}",
                *(f"{results.compute_mean(variant, name):.1f} s" for name in ("wait_s", "train_s", "sync_s")),
                f"{results.compute_mean(variant, 'busy_share'):.0%}",
                f"{results.compute_mean(variant, 'tokens_per_s'):,.0f}",
                f"{results.compute_mean(variant, 'num_tokens'):,.0f}",
                f"{results.compute_mean(variant, 'num_preempted'):.1f}",
                str(results.get_max_staleness(variant)),
                *((_format_cost(results.compute_step_cost(variant)),) if has_prices else ()),
            )
        )
    sharing = [f"{variant}: {line}" for variant, line in results.sharing.items()]
    lines = [*([""] if sharing else []), *sharing, *_format_unequal_work(results), *_format_paper_lines(results)]
    return "\n".join([head, "", *align_rows(rows), *lines])


def _format_cost(cost: float | None) -> str:
    return "-" if cost is None else f"{cost:.3g}"


def _format_unequal_work(results: SimulationResults) -> list[str]:
    """Format the differences in work between the variants whose speed-ups are marked with *."""
    lines = [f"  * {variant}: {why}" for variant in results.runs if (why := results.describe_unequal_work(variant))]
    return ["", f"The speed-up over {results.baseline} does not compare equal work:", *lines] if lines else []


def _format_paper_lines(results: SimulationResults) -> list[str]:
    lines = [""] if results.config.paper else []
    for figure in results.config.paper:
        if figure.variant not in results.runs or figure.baseline not in results.runs:
            continue
        verdict = "reproduced" if results.reproduces(figure) else "not reproduced"
        lines.append(
            f"{figure.baseline} / {figure.variant}: {results.compute_ratio(figure.baseline, figure.variant)}, "
            f"published {figure.ratios} "
            f"({figure.source}): {verdict}"
        )
        if figure.missing:
            source = "the paper" if figure.read else "our notes on the paper (the paper itself was not read)"
            lines.append(f"  missing in {source}: {figure.missing}")
    return lines


def write_results(results: SimulationResults, directory: Path) -> list[Path]:
    """Write `results.json`, the plot and, for the first seed, traces to `directory`, and return the files.

    Raises:
        OSError: The directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "results.json", directory / "plot.png"]
    atomic.write_json(paths[0], _build_json_document(results))
    plot_results(results, paths[1])
    for variant, runs in results.runs.items():
        if runs[0].recorder.trace:
            path = directory / f"trace-{variant}.json"
            runs[0].recorder.write(path)
            paths.append(path)
    return paths


def _build_json_document(results: SimulationResults) -> dict[str, Any]:
    return {
        "config": results.config.model_dump(mode="json"),
        "variants": {
            variant: {
                "step_s": asdict(results.compute_step_s(variant)),
                "speed_up": asdict(results.compute_ratio(results.baseline, variant)),
                "step_cost": results.compute_step_cost(variant),
                "runs": [
                    {"seed": run.seed, "digest": run.digest, "steps": [asdict(step) for step in run.steps]}
                    for run in runs
                ],
            }
            for variant, runs in results.runs.items()
        },
        "paper": [
            json.loads(figure.model_dump_json())
            | {
                "simulated": asdict(results.compute_ratio(figure.baseline, figure.variant)),
                "reproduced": results.reproduces(figure),
            }
            for figure in results.config.paper
            if figure.variant in results.runs and figure.baseline in results.runs
        ],
    }


def plot_results(results: SimulationResults, path: Path) -> None:
    """Plot the step times by variant and, with traces, the number of running rollouts over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = {
        variant: runs[0].recorder.timeline for variant, runs in results.runs.items() if runs[0].recorder.timeline
    }
    num_variants = len(results.runs)
    figure = Figure(figsize=(9, 1.6 + 0.45 * num_variants + (3 if timelines else 0)), dpi=150, layout="constrained")
    ratios = [0.8 + 0.45 * num_variants, 3] if timelines else [1]
    axes = figure.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
    _plot_bars(axes[0], results)
    if timelines:
        for (variant, timeline), colour in zip(timelines.items(), _LINE_COLORS * 9, strict=False):
            times, numbers = zip(*timeline, strict=True)
            axes[1].plot(times, numbers, drawstyle="steps-post", color=colour, linewidth=1, label=variant)
        axes[1].set_xlabel("seconds", color=_TEXT_COLOR)
        axes[1].set_ylabel("rollouts being generated", color=_TEXT_COLOR)
        axes[1].legend(frameon=False, fontsize=8, labelcolor=_TEXT_COLOR)
        _style_axes(axes[1])
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    atomic.write_bytes(path, buffer.getvalue())


def _plot_bars(axes: Any, results: SimulationResults) -> None:
    variants = list(results.runs)
    left = [0.0] * len(variants)
    for name, label, colour in _STEP_PARTS:
        widths = [results.compute_mean(variant, name) for variant in variants]
        axes.barh(variants, widths, left=left, color=colour, label=label, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, variant in enumerate(variants):
        step = results.compute_step_s(variant)
        axes.errorbar(step.mean, row, xerr=step.half, color=_TEXT_COLOR, capsize=3, linewidth=1)
        speed_up = results.compute_ratio(results.baseline, variant).mean
        axes.annotate(f"  {speed_up:.2f}x", (step.mean + step.half, row), va="center", color=_TEXT_COLOR, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(f"{results.config.name}: seconds per step", loc="left", color=_TEXT_COLOR, fontweight="bold")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), labelcolor=_TEXT_COLOR)
    _style_axes(axes)


def _style_axes(axes: Any) -> None:
    axes.grid(axis="x", color=_GRID_COLOR)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_TEXT_COLOR, length=0)
