"""Which values of constants that a source does not give would lead to its published ratio.

The workloads in `examples/simulation/` stay as they are; here one supposition after the other is made, and the ratio is
simulated again, with the other published figures of the same experiment. A supposition that moves these away from what
was published is no explanation.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll.config.simulation import SimulationConfig
from roll.simulation.hardware import load_device
from roll.simulation.run import SimulatedRun, simulate

SEEDS = range(2000, 2005)
"""Others than those of the page's tables."""

REWARD_SHARE = {
    "tail-batching-7b": 1 / 1.30 - 1 / 2.01,
    "tail-batching-14b": 1 / 1.48 - 1 / 1.99,
    "tail-batching-32b": 1 / 2.21 - 1 / 2.48,
}
"""Of the baseline's step: what asynchronous rewards gained on top of tail batching (RollPacker's results: from 1.30 to
2.01, 1.48 to 1.99, 2.21 to 2.48 times veRL's speed), so how long rewards still held a step up when tail batching alone
was measured."""
SUPPOSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as in the workload file", {}),
    ("rewards are not asynchronous", {"reward": True}),
    ("rewards are not asynchronous; correlation 0.5", {"reward": True, "correlation": 0.5}),
    (
        "rewards are not asynchronous; correlation 0.5; 0.3 ms of host time per request and step",
        {"reward": True, "correlation": 0.5, "host_s": 0.3e-3},
    ),
    (
        "rewards are not asynchronous; correlation 0.5; 0.5 ms of host time per request and step",
        {"reward": True, "correlation": 0.5, "host_s": 0.5e-3},
    ),
    ("1 % of the answers reach the limit", {"at_limit": 0.01}),
    ("5 % of the answers reach the limit", {"at_limit": 0.05}),
)

FILTERED: tuple[tuple[float, list[float]], ...] = (
    (0.5, [0] * 4 + [0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8] + [1] * 4),
    (0.5625, [0] * 5 + [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8] + [1] * 4),
    (0.625, [0] * 5 + [0.2, 0.3, 0.5, 0.5, 0.7, 0.8] + [1] * 5),
    (0.6875, [0] * 6 + [0.2, 0.4, 0.5, 0.6, 0.8] + [1] * 5),
)
"""Shares of prompts that are always right or always wrong, and solve rates."""
LIMITS = (8192, 6144)
ENGINES = (8, 2, 1)


def explained(name: str, config: SimulationConfig) -> list[str]:
    """Lines for the page, none where the published ratio was met."""
    if name == "queue-scheduling":
        return _queue(config)
    return _tail(name, config) if name in REWARD_SHARE else []


def _tail(name: str, config: SimulationConfig) -> list[str]:
    (figure,) = config.paper
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for what, supposed in SUPPOSED:
            slow, fast = (
                _runs(_with(config, variant, supposed, Path(directory))) for variant in ("batch", figure.variant)
            )
            base_s = _step_s(slow)
            share = REWARD_SHARE[name] if supposed.get("reward") else 0.0
            exposed_s = base_s * share / (1 - share)
            ratio = (base_s + exposed_s) / (_step_s(fast) + exposed_s)
            short = [step for run in fast for step in run.steps if step.kind == "short"]
            wait_s = statistics.fmean(step.wait_s for run in slow for step in run.steps)
            faster = (wait_s + exposed_s) / (statistics.fmean(step.wait_s for step in short) + exposed_s)
            shorter = config.rollout.max_new_tokens / statistics.fmean(step.longest for step in short)
            off = f"{ratio / figure.ratio - 1:+.0%}"
            rows.append((what, f"{base_s + exposed_s:.0f} s", f"{ratio:.2f}", off, f"{faster:.1f}", f"{shorter:.1f}"))
    head = ("assumption", "baseline", f"ratio (published {figure.ratio:g})", "error")
    return _table(
        (
            *head,
            "speed-up of short rounds (published 2.1 to 3.6)",
            "reduction of the longest answer (published: up to 8.9x)",
        ),
        rows,
    )


def _with(config: SimulationConfig, variant: str, supposed: Mapping[str, Any], directory: Path) -> SimulationConfig:
    changes: dict[str, Any] = {"answer_correlation": supposed.get("correlation", 0.0)}
    if "host_s" in supposed:
        values = load_device(config.device).model_dump(mode="json", exclude={"name"}, exclude_none=True)
        known = values | {"request_overhead_s": supposed["host_s"]}
        path = directory / f"host-{supposed['host_s']:g}.yaml"
        path.write_text(yaml.safe_dump(known))
        changes["device"] = str(path)
    if "at_limit" in supposed:
        points = config.model_dump(mode="json")["answer_tokens"]["points"]
        changes["answer_tokens.points"] = [*points[:-1], [1 - supposed["at_limit"], points[-1][1]]]
    return config.select_variant(variant).with_changes(changes)


def _queue(config: SimulationConfig) -> list[str]:
    (figure,) = config.paper
    settings = [(share, limit, ENGINES[0]) for limit in LIMITS for share, _ in FILTERED]
    settings += [(FILTERED[0][0], LIMITS[0], engines) for engines in ENGINES[1:]]
    rows = []
    for share, limit, engines in settings:
        points = [[p, round(value * limit / LIMITS[0])] for p, value in ((0.5, 293), (0.75, 466), (0.999, 8192))]
        changes = {
            "placement.generation": engines,
            "reward.solve_rate": {"type": "empirical", "values": dict(FILTERED)[share]},
            "answer_tokens.points": points,
            "answer_tokens.max": limit,
            "rollout.max_new_tokens": limit,
        }
        slow, fast = (
            _step_s(_runs(config.select_variant(v).with_changes(changes))) for v in (figure.baseline, figure.variant)
        )
        off = f"{slow / fast / figure.ratio - 1:+.0%}"
        rows.append(
            (f"{share:.0%}", f"{limit:,}", str(engines), f"{slow:.0f} s", f"{fast:.1f} s", f"{slow / fast:.2f}", off)
        )
    head = (
        "prompts without a signal",
        "length limit",
        "GPUs",
        "step of the baseline (published 125 s)",
        "step with redundant prompts (published 37 s)",
        "ratio (published 3.4)",
        "error",
    )
    return _table(head, rows)


def _runs(config: SimulationConfig) -> list[SimulatedRun]:
    return [simulate(config, seed=seed) for seed in SEEDS]


def _step_s(runs: Sequence[SimulatedRun]) -> float:
    return statistics.fmean(run.step_s for run in runs)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
