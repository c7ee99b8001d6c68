"""Small simulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.config.document import dump
from roll.config.simulation import SimulationConfig, load_simulation

STEADY: dict[str, Any] = {
    "name": "steady",
    "model": "qwen3-8b",
    "device": "h800",
    "num_steps": 1,
    "placement": {"generation": 2},
    "engine": {"step_s": 0.01, "max_num_seqs": 4, "kv_capacity": 1_000_000, "restart_s": 0.0},
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 100_000},
    "prompt_tokens": {"type": "fixed", "value": 1},
    "answer_tokens": {"type": "lognormal", "median": 50, "sigma": 1.0, "max": 2000},
    "training": {"duration": {"type": "fixed", "value": 0}, "sync_s": 0.0},
}
"""Every step of an engine takes 10 ms; nothing else takes any time."""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted `changes`."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in changes.items():
        place = result
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def workload(directory: Path, changes: dict[str, Any] | None = None) -> SimulationConfig:
    """`STEADY` with changes, written to a file and loaded."""
    path = directory / "workload.yaml"
    path.write_text(dump(merged(STEADY, changes or {})))
    return load_simulation(path)


def steady(changes: dict[str, Any] | None = None) -> SimulationConfig:
    """`STEADY` with changes, without a file."""
    return SimulationConfig.model_validate(merged(STEADY, changes or {}))
