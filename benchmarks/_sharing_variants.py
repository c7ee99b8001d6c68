"""Variants of a workload that share devices by different rules, and the baselines with which they are compared.

The baseline is the fastest of: the synchronous run on all devices in turns (`colocated`), every fixed split of the
devices, and a synchronous batch that is trained in as many updates as the compared run is stale. All variants have the
same devices, prompts and staleness; a comparison states the trained tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate
from roll.simulation.sharing_choice import resolve_sharing

SWITCH_S = 4.0
"""Duration of a switch of shared devices to training and back."""
NUM_SPLITS, NUM_COARSE_SPLITS = 8, 4
"""The devices are divided into this many equal parts to list the splits, if the engines allow it; splits in eighths are
measured only next to the fastest split in quarters."""
WHOLE_SAMPLES: dict[str, Any] = {
    "type": "queue",
    "prompt_redundancy": None,
    "rollout_redundancy": None,
    "choose": None,
    "leftovers": "defer",
}
"""Every prompt is trained once, with all its rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The times of one variant, as means over seeds."""

    step_s: float
    by_seed: tuple[float, ...]
    num_tokens: float
    max_staleness: int


def prepare(config: SimulationConfig, *, async_ratio: float, num_steps: int, warmup_steps: int) -> SimulationConfig:
    """Return the workload of a file without its schedule: all of its devices, whole samples, and the async ratio."""
    total = config.placement.num_devices
    changes = {
        "placement": {"generation": total // 2, "training": total - total // 2, "switch_s": SWITCH_S},
        "num_steps": num_steps,
        "warmup_steps": warmup_steps,
        "num_seeds": 1,
        "rollout.scheduling.async_ratio": async_ratio,
    }
    return config.with_changes(changes | {f"rollout.scheduling.{key}": value for key, value in WHOLE_SAMPLES.items()})


def list_sizes(config: SimulationConfig, num_parts: int = NUM_SPLITS) -> list[int]:
    """Return the numbers of training devices of all splits, a multiple of the devices of an engine."""
    total, width = config.placement.num_devices, config.engine.width
    sizes = {max(1, round(total * part / num_parts / width)) * width for part in range(1, num_parts)}
    return sorted(size for size in sizes if size < total)


def build_splits(config: SimulationConfig, sizes: Iterable[int], *, streams: bool = False) -> dict[str, dict[str, Any]]:
    """Return the fixed splits with the given numbers of training devices."""
    total = config.placement.num_devices
    splits = {
        f"{'stream_split' if streams else 'split'}_{size}": {
            "placement.generation": total - size,
            "placement.training": size,
        }
        for size in sizes
    }
    if streams:
        return {name: changes | {"rollout.scheduling.stream_training": True} for name, changes in splits.items()}
    return splits


def build_baselines(config: SimulationConfig) -> dict[str, dict[str, Any]]:
    """Return the baselines of a workload: synchronous, fixed splits in quarters, and a batch in several updates."""
    total, staleness = config.placement.num_devices, config.rollout.scheduling.max_staleness
    turns = {"placement.generation": total, "placement.training": 0, "placement.sharing": "colocated"}
    found: dict[str, dict[str, Any]] = {"colocated": turns}
    if staleness:
        parts = staleness + 1
        found["split_batch"] = turns | {
            "rollout.scheduling.async_ratio": 0.0,
            "rollout.prompts_per_step": config.rollout.prompts_per_step * parts,
            "training.num_updates": parts,
            "num_steps": config.num_steps // parts,
            "warmup_steps": config.warmup_steps // parts,
        }
    return found | build_splits(config, list_sizes(config, NUM_COARSE_SPLITS))


def build_neighbors(config: SimulationConfig, fastest: str) -> dict[str, dict[str, Any]]:
    """Return the splits next to a fixed split that are not in `build_baselines`; none for other variants."""
    if not fastest.startswith("split_") or not fastest.removeprefix("split_").isdecimal():
        return {}
    sizes = list_sizes(config)
    place = sizes.index(int(fastest.removeprefix("split_")))
    return build_splits(config, [sizes[index] for index in (place - 1, place + 1) if 0 <= index < len(sizes)])


def build_shared(config: SimulationConfig, rule: str, sizes: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return variants in which all devices generate, and the trainer shares the given number of them."""
    total = config.placement.num_devices
    name = {"stream_training": "stream", "elastic_overlap": "elastic", "partial_overlap": "partial"}.get(rule, rule)
    return {
        f"{name}_{size}": {
            "placement.generation": total,
            "placement.training": size,
            "placement.sharing": rule,
        }
        for size in sizes
    }


def measure(
    config: SimulationConfig, variants: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], processes: Executor
) -> dict[str, Figures]:
    """Simulate all variants with all seeds."""
    jobs = {
        (name, seed): processes.submit(_simulate, config.with_changes(changes, name), seed)
        for name, changes in variants.items()
        for seed in seeds
    }
    return {name: _summarize([jobs[name, seed].result() for seed in seeds]) for name in variants}


def _simulate(config: SimulationConfig, seed: int) -> tuple[float, float, int]:
    run = simulate(resolve_sharing(config)[0], seed=seed)
    return (
        run.step_s,
        statistics.fmean(step.num_tokens for step in run.steps),
        max(step.max_staleness for step in run.steps),
    )


def _summarize(runs: Sequence[tuple[float, float, int]]) -> Figures:
    return Figures(
        step_s=statistics.fmean(run[0] for run in runs),
        by_seed=tuple(run[0] for run in runs),
        num_tokens=statistics.fmean(run[1] for run in runs),
        max_staleness=max(run[2] for run in runs),
    )


def find_fastest(figures: Mapping[str, Figures]) -> str:
    """Return the name of the variant with the shortest step."""
    return min(figures, key=lambda name: figures[name].step_s)


def compare(slow: Figures, fast: Figures) -> dict[str, Any]:
    """Return the speed-up of a variant over another, its range over seeds, and the ratio of the trained tokens."""
    ratios = [before / after for before, after in zip(slow.by_seed, fast.by_seed, strict=True)]
    return {
        "ratio": slow.step_s / fast.step_s,
        "lowest": min(ratios),
        "highest": max(ratios),
        "tokens": fast.num_tokens / slow.num_tokens,
        "ratio_per_token": slow.step_s / fast.step_s * fast.num_tokens / slow.num_tokens,
    }
