"""Print the digests of a few runs, for comparing processes with each other."""

from __future__ import annotations

from unit.simulation.run_helpers import steady

from roll.simulation.run import simulate

RUNS = (
    {"rollout.scheduling.type": "batch"},
    {"rollout.scheduling.type": "tail_batching", "num_steps": 6},
    {
        "num_steps": 6,
        "placement.training": 2,
        "training.duration": {"type": "normal", "mean": 0.5, "std": 0.3},
        "rollout.scheduling.async_ratio": 1.5,
        "rollout.scheduling.pause_mode": "abort",
        "reward.latency": {"type": "lognormal", "median": 0.1, "sigma": 1.0},
        "reward.solve_rate": {"type": "empirical", "values": [0, 0.5, 0.5, 1]},
        "reward.filter_groups": True,
        "failures": [{"at_s": 0.7, "engine": 1}, {"at_s": 1.1, "type": "stall", "duration_s": 0.5}],
    },
)

if __name__ == "__main__":
    for changes in RUNS:
        print(simulate(steady(changes), seed=9).digest)
