"""Mismatch and staleness, measured apart on a run with partial rollouts, against log-probs by its checkpoints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos.harness import tiny_config

import roll

NUM_STEPS = 4


def settings(directory: Path, source: Path, **correction: Any) -> dict[str, Any]:
    """Steps of one update, and answers that several weight syncs interrupt."""
    base = tiny_config(source, num_steps=NUM_STEPS)
    return base | {
        "output_dir": str(directory),
        "algorithm": {
            "filters": {"skip_zero_variance": False},
            "correction": {"corrects": "mismatch", **correction},
        },
        "rollout": {
            "prompts_per_step": 2,
            "group_size": 2,
            "max_new_tokens": 120,
            "scheduling": {"async_ratio": 2.0, "pause_mode": "abort"},
        },
        "training": {"num_steps": NUM_STEPS, "learning_rate": 1e-3, "num_threads": 1},
        "evaluation": {"every_num_steps": 0, "num_prompts": 1, "before_training": False},
        "checkpoint": {"every_num_steps": 1, "keep_last": NUM_STEPS, "asynchronous": False},
    }


def rows(directory: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["kind"] == "train"]


@cache
def model_at(path: Path) -> Any:
    """Return transformers' own model of a directory, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def logprobs_by_hand(path: Path, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return log-probs [T] of an answer."""
    logits = model_at(path)(torch.tensor([[*prompt, *answer]])).logits[0]
    found = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return found[torch.arange(len(answer)), torch.tensor(answer)].numpy()


def by_hand(directory: Path, source: Path, step: int) -> dict[str, float]:
    """Return what `train_inference/…` should say of a step: version v is the checkpoint after step v."""
    from pyarrow import parquet

    def weights(version: int) -> Path:
        return directory / "run" / "checkpoints" / f"step-{version:06d}" / "model" if version else source

    table = parquet.read_table(directory / "run" / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
    mismatch, staleness, ages = [], [], []
    for row in table:
        versions = np.array(row["policy_versions"])
        said = {
            v: logprobs_by_hand(weights(v), row["prompt_token_ids"], row["token_ids"]) for v in {*versions, step - 1}
        }
        behavior = np.array([said[v][t] for t, v in enumerate(versions)])
        mismatch.append(behavior - np.array(row["logprobs"]))
        staleness.append(said[step - 1] - behavior)
        ages.append(step - 1 - versions)
    found = {"stale_share": float((np.concatenate(ages) > 0).mean()), "known_share": 1.0}
    for name, parts in (("mismatch", mismatch), ("staleness", staleness)):
        d = np.concatenate(parts)
        found |= {
            f"{name}/log_ratio_mean": d.mean(),
            f"{name}/log_ratio_mean_abs": np.abs(d).mean(),
            f"{name}/log_ratio_max_abs": np.abs(d).max(),
            f"{name}/kl": (np.exp(d) - 1 - d).mean(),
        }
    return {f"train_inference/{name}": float(value) for name, value in found.items()}


def test_policy_snapshots_run_mismatch_and_staleness_measured_apart_agree_with_checkpoints_by_hand(
    tmp_path: Path, tiny_model: Path
) -> None:
    roll.train(settings(tmp_path, tiny_model))
    metrics = rows(tmp_path)
    assert [row["policy_version"] for row in metrics] == list(range(1, NUM_STEPS + 1))
    for row in metrics:
        expected = by_hand(tmp_path, tiny_model, row["step"])
        found = {name: value for name, value in row.items() if name.startswith("train_inference/")}
        assert found.keys() == expected.keys()
        for name, value in found.items():  # the trainer's float32 rounds a single log-prob by some 1e-6
            assert value == pytest.approx(expected[name], abs=5e-6 if "max" in name else 1e-6, rel=0), (
                name,
                row["step"],
            )
    # rollouts of several versions were trained, and what the policy learned meanwhile is far above the engine's error
    assert max(row["train_inference/staleness/log_ratio_mean_abs"] for row in metrics) > 1e-2
    assert max(row["train_inference/mismatch/log_ratio_mean_abs"] for row in metrics) < 1e-4
    assert max(row["train_inference/stale_share"] for row in metrics) > 0.3
