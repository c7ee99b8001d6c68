"""How fast the simulator is: one step of 65,536 rollouts on 3,072 GPUs, and how its cost grows from 1,024 rollouts on.

    make bench NAME=simulator

Each size runs in a process of its own, on one core, so that its peak memory is its own; several times, of which the
fastest counts. Growth is judged by the exponent of `cost / (n log n)` over all sizes (least squares): at most 0.05
means no faster than n log n.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from _report import report

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
LIMIT_S, LIMIT_BYTES, LIMIT_EXPONENT = 60.0, 2e9, 0.05
WORKLOAD = {
    "name": "bench-simulator",
    "model": "qwen2.5-32b",
    "device": "h800",
    "num_steps": 1,
    "placement": {"generation": 3072},
    "engine": {"tensor_parallel": 4, "max_num_seqs": 128},
    "prompt_tokens": {"type": "lognormal", "median": 200, "sigma": 0.6, "max": 4000},
    "answer_tokens": {"type": "quantiles", "points": [[0.5, 1170], [0.75, 1860], [0.999, 32768]], "max": 32768},
    "reward": {"latency": {"type": "lognormal", "median": 0.5, "sigma": 0.7, "max": 10.0}},
}
"""768 engines; lengths of examples/simulation/tail-batching-32b.yaml."""


def measure(num_rollouts: int) -> dict[str, float]:
    """One step, in this process."""
    from roll.config.simulation import SimulationConfig
    from roll.simulation.run import simulate

    rollout = {"prompts_per_step": num_rollouts // 8, "group_size": 8, "max_new_tokens": 32768}
    config = SimulationConfig.model_validate(WORKLOAD | {"rollout": rollout})
    cpu = time.process_time()
    run = simulate(config)
    cpu = time.process_time() - cpu
    assert run.steps[0].num_samples == num_rollouts
    return {
        "wall_s": run.wall_s,
        "cpu_s": cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "transitions": run.num_transitions,
        "callbacks": run.num_callbacks,
        "simulated_s": run.step_s,
        "us_per_rollout": cpu / num_rollouts * 1e6,
    }


def fastest(num_rollouts: int, repeats: int) -> dict[str, float]:
    """The fastest of several processes."""
    command = [sys.executable, __file__, "--one", str(num_rollouts)]
    if hasattr(os, "sched_getaffinity"):
        core = min(os.sched_getaffinity(0))
        command = ["taskset", "-c", str(core), *command] if Path("/usr/bin/taskset").exists() else command
    runs = []
    for _ in range(repeats):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return min(runs, key=lambda run: run["cpu_s"])


def growth(found: dict[int, dict[str, float]]) -> float:
    """Exponent e of the best fit cost = c (n log n) n^e."""
    points = [(math.log(n), math.log(run["cpu_s"] / (n * math.log(n)))) for n, run in found.items()]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def main() -> int:
    """Print figures; the exit code says whether every limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, help="measure one size in this process and print it")
    parser.add_argument("--repeats", type=int, default=3, help="processes per size")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return 0
    found = {size: fastest(size, arguments.repeats) for size in SIZES}
    for size, run in found.items():
        print(
            f"{size:>6} rollouts: {run['cpu_s']:6.2f} s CPU, {run['us_per_rollout']:4.0f} us each, "
            f"{run['peak_bytes'] / 1e6:5.0f} MB, {run['transitions']:,.0f} transitions"
        )
    largest, exponent = found[SIZES[-1]], growth(found)
    kept = {
        "wall_s <= 60": largest["wall_s"] <= LIMIT_S,
        "peak_bytes <= 2e9": largest["peak_bytes"] <= LIMIT_BYTES,
        "no faster than n log n": exponent <= LIMIT_EXPONENT,
    }
    report(
        "simulator",
        {
            "gpus": 3072,
            "rollouts": SIZES[-1],
            "wall_s": largest["wall_s"],
            "peak_bytes": largest["peak_bytes"],
            "exponent_over_n_log_n": exponent,
            "sizes": {str(size): run for size, run in found.items()},
            "kept": kept,
        },
    )
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
