"""Measure whether shared devices, deferred prompts and asynchrony change which samples a run trains on.

    make bench NAME=bias

Each rule is simulated on the workload of `examples/simulation/sharing.yaml`, and the lengths and rewards of all trained
rollouts are compared with those of a run without it (two-sample Kolmogorov-Smirnov test for lengths, test of equal
proportions for rewards, which are 0 or 1). An answer is correct with probability 0.8 if it is longer than the median,
and 0.2 otherwise, so that a preference for short answers biases the rewards too. `redundant` is a control that is known
to be biased: it starts 10 rollouts per prompt and trains on the first 8.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import report

from roll.config.simulation import SimulationConfig, load_simulation
from roll.simulation import steps
from roll.simulation.run import simulate

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "simulation" / "sharing.yaml"
BASELINES = {"stream_split_8": "split_16", "stream_24": "split_16", "colocated": "split_16"}
"""Synchronous variants and their baseline; the other variants are compared with `split_16_async`."""
NUM_SEEDS = 3
MIN_P = 0.01
SYNC = {"rollout.scheduling.async_ratio": 0.0}
EXTRA: dict[str, dict[str, Any]] = {
    "split_16": SYNC,
    "tail_batching_async": {
        "rollout.scheduling.async_ratio": 1.0,
        "rollout.scheduling.type": "tail_batching",
        "rollout.scheduling.rollout_redundancy": 1.0,
    },
    "redundant": {
        "rollout.scheduling.async_ratio": 1.0,
        "rollout.scheduling.rollout_redundancy": 1.25,
        "rollout.scheduling.choose": "first_finished",
    },
}
CONTROL = "redundant"
Sample = tuple[list[int], list[int]]
"""Lengths and rewards."""


def collect_samples(config: SimulationConfig, seed: int, median: float) -> Sample:
    """Return the lengths and rewards of all rollouts that a simulated run trains on."""
    lengths: list[int] = []
    rewards: list[int] = []
    collect = steps.SimulatedSteps.collect

    async def record(self: steps.SimulatedSteps, batch: Any) -> Any:
        collected = await collect(self, batch)
        for rollout in collected.rollouts:
            number = hashlib.blake2b(f"{seed}/{rollout.rollout_id}".encode(), digest_size=8).digest()
            length = len(rollout.token_ids)
            lengths.append(length)
            rewards.append(int(int.from_bytes(number) / 2**64 < (0.8 if length > median else 0.2)))
        return collected

    steps.SimulatedSteps.collect = record  # type: ignore[method-assign]
    try:
        simulate(config, seed=seed)
    finally:
        steps.SimulatedSteps.collect = collect  # type: ignore[method-assign]
    return lengths, rewards


def compute_p_values(sample: Sample, baseline: Sample) -> tuple[float, float]:
    """Return the p-values for equal distributions of lengths, and for equal mean rewards."""
    from scipy.stats import ks_2samp, norm

    length_p = float(ks_2samp(sample[0], baseline[0]).pvalue)
    numbers = [len(rewards) for rewards in (sample[1], baseline[1])]
    pooled = (sum(sample[1]) + sum(baseline[1])) / sum(numbers)
    error = math.sqrt(pooled * (1 - pooled) * (1 / numbers[0] + 1 / numbers[1]))
    z = (statistics.fmean(sample[1]) - statistics.fmean(baseline[1])) / error
    return length_p, float(2 * norm.sf(abs(z)))


def summarize(samples: Sequence[Sample], baselines: Sequence[Sample]) -> dict[str, float]:
    """Return the smallest p-values over all seeds, and the means of all samples."""
    values = [compute_p_values(sample, base) for sample, base in zip(samples, baselines, strict=True)]
    return {
        "samples": min(len(lengths) for lengths, _ in samples),
        "mean_length": statistics.fmean(length for lengths, _ in samples for length in lengths),
        "mean_reward": statistics.fmean(reward for _, rewards in samples for reward in rewards),
        "length_p": min(length for length, _ in values),
        "reward_p": min(reward for _, reward in values),
    }


def main() -> None:
    """Simulate all rules, and report the p-values."""
    example = load_simulation(str(EXAMPLE), [])
    config = example.model_copy(update={"variants": {**example.variants, **EXTRA}})
    seeds = range(config.seed, config.seed + NUM_SEEDS)
    names = [*dict.fromkeys([*EXTRA, *config.variants])]
    samples: dict[str, list[Sample]] = {}
    for name in names:
        variant = config.select_variant(name).with_changes({"num_seeds": 1, "warmup_steps": 0})
        samples[name] = [collect_samples(variant, seed, median=585) for seed in seeds]
        print(name, len(samples[name][0][0]), "samples", flush=True)
    baselines = {"split_16", "split_16_async"}
    found = {
        name: summarize(samples[name], samples[BASELINES.get(name, "split_16_async")])
        for name in names
        if name not in baselines
    }
    num_tests = 2 * NUM_SEEDS * (len(found) - 1)
    limit = MIN_P / num_tests
    for name, figures in found.items():
        is_biased = min(figures["length_p"], figures["reward_p"]) < limit
        print(
            f"{name:<22} {figures['mean_length']:8.1f} tokens, mean reward {figures['mean_reward']:.4f}, "
            f"p >= {figures['length_p']:.3g} and {figures['reward_p']:.3g}{'  BIASED' if is_biased else ''}"
        )
    report("bias", {"rules": found, "p_limit": limit, "num_tests": num_tests})
    wrong = [
        name for name in found if (min(found[name]["length_p"], found[name]["reward_p"]) < limit) != (name == CONTROL)
    ]
    if wrong:
        raise SystemExit(f"unexpected results: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
