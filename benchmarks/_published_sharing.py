"""Published ratios of systems that share devices or move work between them, next to simulated ones.

A row has a simulation, or names what is missing for one. No constant was fitted to these ratios.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.simulation import SimulationConfig, load_simulation
from roll.simulation.report import TOLERANCE
from roll.simulation.run import simulate

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "simulation"
SEEDS = (0, 1, 2)
ROLLPACKER = "RollPacker, arXiv 2509.21009"
ROLLART = "RollArt, arXiv 2512.22560"
Simulated = Callable[[Executor], list[float]]
"""Returns the simulated ratio of each seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRatio:
    """A published ratio, or a range of them."""

    source: str
    what: str
    low: float
    high: float | None = None
    simulated: Simulated | None = None
    missing: str = ""
    """Constants that the source does not give, and differences from the simulation."""


def _measure(config: SimulationConfig, seed: int) -> dict[str, float]:
    """Return the mean time of a step, under an empty key, and of the rounds of each kind."""
    steps = simulate(config, seed=seed).steps
    found = {kind: [step.total_s for step in steps if step.kind == kind] for kind in {step.kind for step in steps}}
    return {kind: statistics.fmean(times) for kind, times in found.items()} | {
        "": statistics.fmean(step.total_s for step in steps)
    }


def _ratios(slow: SimulationConfig, fast: SimulationConfig, processes: Executor, kind: str = "") -> list[float]:
    """Return the ratio of the mean step times of each seed; with `kind`, of the rounds of this kind."""
    jobs = [[_submit(each, seed, processes) for seed in SEEDS] for each in (slow, fast)]
    return [before.result()[kind] / after.result()[kind] for before, after in zip(*jobs, strict=True)]


_SUBMITTED: dict[tuple[str, int], Future[dict[str, float]]] = {}


def _submit(config: SimulationConfig, seed: int, processes: Executor) -> Future[dict[str, float]]:
    """Simulate a configuration, unless it was simulated before."""
    key = config.model_dump_json(), seed
    if key not in _SUBMITTED:
        _SUBMITTED[key] = processes.submit(_measure, config, seed)
    return _SUBMITTED[key]


def _streamed(name: str, kind: str = "") -> Simulated:
    """Tail batching with the stream trainer, on half of the devices, against tail batching."""

    def run(processes: Executor) -> list[float]:
        config = load_simulation(EXAMPLES / f"{name}.yaml")
        plain = config.select_variant("tail_batching").with_changes({"num_steps": 20})
        half = config.placement.generation // 2
        streamed = plain.with_changes({"placement.training": half, "placement.sharing": "stream_training"})
        return _ratios(plain, streamed, processes, kind)

    return run


def _pushed(model: str, exposed_s: float, hidden_s: float) -> Simulated:
    """Weight syncs that take `hidden_s` against syncs that take `exposed_s`, in an asynchronous run on 128 devices."""

    def run(processes: Executor) -> list[float]:
        base = load_simulation(EXAMPLES / "async-rlvr.yaml")
        changes = {
            "model": model,
            "engine.tensor_parallel": {"qwen3-8b": 1, "qwen2.5-14b": 2, "qwen2.5-32b": 4}[model],
            "placement": {"generation": 96, "training": 32},
            "rollout.prompts_per_step": 512,
            "rollout.group_size": 8,
            "rollout.scheduling.async_ratio": 1.0,
        }
        config = base.with_changes(changes)
        slow, fast = (config.with_changes({"training.sync_s": seconds}) for seconds in (exposed_s, hidden_s))
        return _ratios(slow, fast, processes)

    return run


def _variants(name: str, slow: str, fast: str) -> Simulated:
    """Two variants of a file."""

    def run(processes: Executor) -> list[float]:
        config = load_simulation(EXAMPLES / f"{name}.yaml")
        return _ratios(config.select_variant(slow), config.select_variant(fast), processes)

    return run


_TRAINER = (
    "the time of a switch, and the rest of the round: in the paper, all devices train after generation; in ROLL, the "
    "half that began"
)
_WEIGHTS = (
    "times of a step and lengths; the shortest and the longest published sync are taken for the smallest and the "
    "largest model"
)
_AFFINITY = "prices, tasks and their lengths, numbers of turns, prefix caching"
RATIOS: tuple[PublishedRatio, ...] = (
    PublishedRatio(
        source=ROLLPACKER,
        what="stream trainer, long rounds of 7B",
        low=124.2 / 115.2,
        simulated=_streamed("tail-batching-7b", "long"),
        missing=_TRAINER,
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="stream trainer, all rounds of 7B",
        low=2.03 / 2.01,
        simulated=_streamed("tail-batching-7b"),
        missing=_TRAINER,
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="stream trainer, all rounds of 14B",
        low=2.22 / 2.02,
        simulated=_streamed("tail-batching-14b"),
        missing=_TRAINER,
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="stream trainer, all rounds of 32B",
        low=2.56 / 2.52,
        simulated=_streamed("tail-batching-32b"),
        missing=_TRAINER,
    ),
    PublishedRatio(
        source=ROLLART,
        what="asynchronous weight transfer, 8B",
        low=1.10,
        high=1.16,
        simulated=_pushed("qwen3-8b", 38.6, 1.4),
        missing=_WEIGHTS,
    ),
    PublishedRatio(
        source=ROLLART,
        what="asynchronous weight transfer, 32B",
        low=1.10,
        high=1.16,
        simulated=_pushed("qwen2.5-32b", 157.0, 9.6),
        missing=_WEIGHTS,
    ),
    PublishedRatio(
        source=ROLLART,
        what="hardware affinity over H20 alone, equal cost",
        low=1.30,
        high=1.68,
        simulated=_variants("device-classes", "h20_only", "affinity"),
        missing=_AFFINITY,
    ),
    PublishedRatio(
        source=ROLLART,
        what="hardware affinity over H800 alone, equal cost",
        low=1.12,
        high=1.37,
        simulated=_variants("device-classes", "h800_only", "affinity"),
        missing=_AFFINITY,
    ),
    PublishedRatio(
        source=ROLLART,
        what="hardware affinity over H20 alone, without a prefix cache",
        low=1.30,
        high=1.68,
        simulated=_variants("device-classes", "no_prefix_cache_h20", "no_prefix_cache_affinity"),
        missing=_AFFINITY,
    ),
    PublishedRatio(
        source=ROLLART,
        what="hardware affinity over H800 alone, without a prefix cache",
        low=1.12,
        high=1.37,
        simulated=_variants("device-classes", "no_prefix_cache_h800", "no_prefix_cache_affinity"),
        missing=_AFFINITY,
    ),
    PublishedRatio(
        source="verl, page v1_async_trainer",
        what="trainer GPUs that also generate, 13.15 h to 11.79 h",
        low=13.15 / 11.79,
        simulated=_variants("verl-sharing", "no_switch", "switch"),
        missing="distribution of lengths, efficiency of the trainer, staleness, time of a switch",
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="planner of the tensor parallelism, short rounds",
        low=1.11,
        high=1.28,
        missing="not simulated: the size of the KV cache, and with it the number of preemptions",
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="adaptive time limits of rewards",
        low=1.6,
        missing="not simulated: the distribution of the run times of wrong programs (measured on recorded programs by "
        "`make bench NAME=rewards`)",
    ),
    PublishedRatio(
        source=ROLLPACKER,
        what="asynchronous rewards on tail batching (7B, 14B, 32B: 1.55, 1.34, 1.12)",
        low=2.48 / 2.21,
        high=2.01 / 1.30,
        missing="not simulated: the latency of rewards, which is only known from these ratios",
    ),
    PublishedRatio(
        source="RLBoost, arXiv 2510.19225",
        what="spot engines in addition to reserved devices",
        low=1.51,
        high=1.97,
        missing="not simulated: the number of spot devices over time (the ratio is not at equal cost)",
    ),
    PublishedRatio(
        source="RollMux, arXiv 2512.11306",
        what="cost of two jobs that share devices",
        low=1.84,
        missing="not simulated: ROLL schedules one job",
    ),
)


def measure_published() -> list[dict[str, Any]]:
    """Simulate all ratios, and return a row for each."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:
        for ratio in RATIOS:
            rows.append(build_row(ratio, ratio.simulated(processes) if ratio.simulated is not None else []))
            print(f"  {ratio.what}: {rows[-1].get('simulated', 'not simulated')}", flush=True)
    return rows


def build_row(ratio: PublishedRatio, found: Sequence[float]) -> dict[str, Any]:
    """Return the row of a ratio.

    Args:
        ratio: The published ratio.
        found: The simulated ratio of each seed; empty if it was not simulated.
    """
    row: dict[str, Any] = {
        "source": ratio.source,
        "what": ratio.what,
        "published": [ratio.low, ratio.high or ratio.low],
        "missing": ratio.missing,
        "num_seeds": len(found),
    }
    if found:
        row |= {"simulated": statistics.fmean(found), "lowest": min(found), "highest": max(found)}
        row["within"] = is_within(row["simulated"], ratio.low, ratio.high or ratio.low)
    return row


def is_within(simulated: float, low: float, high: float) -> bool:
    """Return whether a ratio is within 15 % of a published range."""
    return low * (1 - TOLERANCE) <= simulated <= high * (1 + TOLERANCE)


HEAD = """
## Systems that share devices

These ratios are from papers and pages about systems that share devices between generation and training, or move work
to other devices. Nothing was fitted to them: the workloads are those of this page, `device-classes.yaml` and
`verl-sharing.yaml`, whose constants were chosen before a simulation. `--parts sharing` simulates all rows that can be
simulated; rows with – were not simulated. The last column names what the source does not give, or what differs from
the simulation.
"""


def render_published(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section of the page."""
    if not rows:
        return []
    head = (
        "source",
        "what",
        "published",
        "simulated (seeds)",
        "range over seeds",
        "within 15 %",
        "missing or different",
    )
    lines = [HEAD, f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        low, high = row["published"]
        published = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        cells = ["–", "–", "–"]
        if "simulated" in row:
            span = f"{row['lowest']:.2f} … {row['highest']:.2f}"
            cells = [f"{row['simulated']:.2f} ({row['num_seeds']})", span, "yes" if row["within"] else "no"]
        lines.append(f"| {' | '.join((row['source'], row['what'], published, *cells, row['missing']))} |")
    return lines
