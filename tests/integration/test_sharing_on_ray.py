"""Runs whose engines release the trainer's devices, on Ray: their weights are those of a run that never switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from safetensors.torch import load_file

import roll

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # each run starts Ray processes

NUM_STEPS = 5


def train(
    directory: Path, source: Path, sharing: str, **scheduling: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the metrics and the weights of five steps with one rank on the devices of one of two engines."""
    config = tiny_config(source, num_steps=NUM_STEPS)
    rollout = {**config["rollout"], "prompts_per_step": 6, "scheduling": scheduling}
    cluster = {
        "type": "ray",
        "devices_per_node": 2,
        "device_mapping": {"actor_train": "1", "actor_infer": "0-1"},
        "sharing": sharing,
    }
    changes = {
        "algorithm": {"filters": {"skip_zero_variance": False}},
        "inference": {"engine": "hf", "max_num_seqs": 2},  # fewer than a step's rollouts: groups end one by one
        "training": {**config["training"], "learning_rate": 1e-4},  # Adam amplifies the rounding of gradients near 0
    }
    roll.train(
        {**config, **changes, "output_dir": str(directory), "name": sharing, "rollout": rollout, "cluster": cluster}
    )
    rows = map(json.loads, (directory / sharing / "metrics.jsonl").read_text().splitlines())
    model = directory / sharing / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model" / "model.safetensors"
    return [row for row in rows if row["kind"] == "train"], load_file(model)


def test_sharing_ray_synchronous_rules_train_the_weights_of_a_run_without_switches(
    tmp_path: Path, tiny_model: Path
) -> None:
    pytest.importorskip("ray")
    _, expected = train(tmp_path, tiny_model, "disaggregated")
    for sharing in ("colocated", "stream_training"):
        rows, weights = train(tmp_path, tiny_model, sharing)
        assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-6, sharing
        assert all("time/offload_s" in row for row in rows), sharing
    assert max(row["training/streamed_share"] for row in rows) > 0.1


@pytest.mark.parametrize("sharing", ["colocated", "partial_overlap", "elastic_overlap"])
def test_sharing_ray_asynchronous_rules_train_every_draw_once(tmp_path: Path, tiny_model: Path, sharing: str) -> None:
    pytest.importorskip("ray")
    rows, _ = train(tmp_path, tiny_model, sharing, async_ratio=1)
    assert len(rows) == NUM_STEPS and rows[-1]["policy_version"] == NUM_STEPS
    assert any("time/offload_s" in row for row in rows)
    assert max(row.get("data/staleness_max", 0) for row in rows) <= 1
    checkpoint = tmp_path / sharing / "checkpoints" / f"step-{NUM_STEPS:06d}"
    entries = [json.loads(line) for line in (checkpoint / "ledger.jsonl").read_text().splitlines()]
    outcomes = [entry["draw_id"] for entry in entries if entry.get("outcome") == "trained"]
    assert len(outcomes) == len(set(outcomes)) == 6 * NUM_STEPS
