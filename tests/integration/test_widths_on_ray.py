"""A run whose engines change their width, on Ray, trains on the tokens of a run whose engines keep their width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.harness import tiny_config
from pyarrow import parquet
from safetensors.torch import load_file

import roll
from roll.models import describe_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # each run starts Ray processes

NUM_STEPS = 3
CACHED_TOKENS = 128
"""Tokens in the cache of one device: more than one request needs, but fewer than the requests of one engine."""
LIMIT = 1e-5
"""Tolerance of log-probs: sums over ranks are rounded in another order."""


class FinishedRun:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        self.steps = [row for row in rows if row["kind"] == "train"]
        self.log = (path / "logs" / "controller-0.log").read_text()
        tables = [parquet.read_table(path / "rollouts" / f"step-{n:06d}.parquet") for n in range(1, NUM_STEPS + 1)]
        self.rollouts = {row["rollout_id"]: row for table in tables for row in table.to_pylist()}
        self.weights = load_file(path / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model" / "model.safetensors")

    def list_widths(self) -> list[float]:
        return [step["engines/width"] for step in self.steps]


def train(directory: Path, source: Path, name: str, tensor_parallel: Any, **changes: Any) -> FinishedRun:
    """Train a run with engines on two devices; the trainer uses the second device."""
    config = tiny_config(source, num_steps=NUM_STEPS)
    cluster = {"type": "ray", "devices_per_node": 2, "device_mapping": {"actor_train": "1", "actor_infer": "0-1"}}
    inference = {
        "engine": "hf",
        "tensor_parallel": tensor_parallel,
        "max_num_seqs": 6,
        "kv_cache_bytes": CACHED_TOKENS * describe_model(str(source)).compute_kv_bytes_per_token(4),
    }
    own = {
        "name": name,
        "output_dir": str(directory),
        "algorithm": {"filters": {"skip_zero_variance": False}},
        "training": {**config["training"], "learning_rate": 1e-4},  # Adam amplifies the rounding of gradients near 0
        "inference": inference,
        "cluster": {**cluster, **changes.pop("cluster", {})},
        "rollout": {**config["rollout"], **changes.pop("rollout", {})},
    }
    roll.train({**config, **own, **changes})
    return FinishedRun(directory / name)


@pytest.mark.parametrize("sharing", ["disaggregated", "colocated"])
def test_widths_ray_a_run_that_switches_trains_the_tokens_of_a_run_that_does_not(
    tmp_path: Path, tiny_model: Path, sharing: str
) -> None:
    pytest.importorskip("ray")
    fixed = train(tmp_path, tiny_model, "fixed", 1)
    switched = train(tmp_path, tiny_model, "switched", [1, 2], cluster={"sharing": sharing})
    assert switched.list_widths() == [1, 2, 2]
    assert switched.steps[-1]["engines/width_switches"] == 1
    assert "engines of width 2 replace engines of width 1: 12 requests of" in switched.log
    assert "engines/width" not in fixed.steps[0]
    assert switched.rollouts.keys() == fixed.rollouts.keys() and len(fixed.rollouts) == 12 * NUM_STEPS
    for name, one in fixed.rollouts.items():
        two = switched.rollouts[name]
        assert two["token_ids"] == one["token_ids"]
        for column in ("logprobs", "trainer_logprobs"):
            np.testing.assert_allclose(two[column], one[column], atol=LIMIT)
    assert max(float((switched.weights[name] - fixed.weights[name]).abs().max()) for name in fixed.weights) < 1e-6
