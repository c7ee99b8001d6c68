"""`best` against a synchronous run of the same staleness: (alpha + 1) N prompts at once, in as many updates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from roll.config.simulation import SimulationConfig
from roll.simulation.run import SimulatedRun, simulate

VARIANTS = {
    "queue-scheduling": ("continuous", "best"),
    "async-rlvr": ("continuous", "best"),
    "environment-latency": ("each_alone", "best"),
    "environment-ladder": ("alone_10", "best_10"),
    "tail-batching-7b": ("continuous", "best"),
    "tail-batching-14b": ("continuous", "best"),
    "tail-batching-32b": ("continuous", "best"),
}
NUM_STEPS = 2
"""Of the large batches, each of which is five updates."""


def equal_staleness(name: str, config: SimulationConfig, num_seeds: int) -> dict[str, Any]:
    """Both runs' time, samples, tokens and staleness, by update."""
    sync, ahead = VARIANTS[name]
    ours = config.select_variant(ahead)
    parts = ours.rollout.scheduling.max_staleness + 1
    split = config.select_variant(sync).with_changes(
        {
            "rollout.prompts_per_step": config.rollout.prompts_per_step * parts,
            "training.num_updates": parts,
            "num_steps": NUM_STEPS,
            "warmup_steps": 0,
        }
    )
    seeds = range(config.seed, config.seed + num_seeds)
    runs = {
        "split": [simulate(split, seed=seed) for seed in seeds],
        "best": [simulate(ours, seed=seed) for seed in seeds],
    }
    ratios = [slow.step_s / fast.step_s for slow, fast in zip(runs["split"], runs["best"], strict=True)]
    found = {kind: facts(of) for kind, of in runs.items()}
    ratio = found["split"]["step_s"] / found["best"]["step_s"]
    return found | {"updates": parts, "ratio": ratio, "ratios": ratios, "num_seeds": num_seeds}


def facts(runs: Sequence[SimulatedRun]) -> dict[str, float]:
    """Means over the steps of all seeds."""
    steps = [step for run in runs for step in run.steps]
    return {
        "step_s": statistics.fmean(run.step_s for run in runs),
        "samples": statistics.fmean(step.num_samples for step in steps),
        "tokens": statistics.fmean(step.num_tokens for step in steps),
        "staleness": max(step.max_staleness for step in steps),
    }
