"""Whole runs whose engines compute in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.harness import tiny_config
from worlds.tiny_model import write_tiny_model

import roll

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="session")
def tiny_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model than the policy, with room for a question."""
    return write_tiny_model(tmp_path_factory.mktemp("judge") / "judge", seed=5, hidden=128, context_length=4096)


def config(directory: Path, model: Path, form: str, **changes: Any) -> dict[str, Any]:
    return {
        **tiny_config(model),
        "output_dir": str(directory),
        "model": {"path": str(model), "dtype": "bfloat16"},
        "inference": {"engine": "vllm", "quantization": form},
        "checkpoint": {"at_end": False},
        "evaluation": {"before_training": False, "every_num_steps": 0, "num_prompts": 1},
        **changes,
    }


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize(
    ("form", "seed"),
    [
        ("int8", 0),
        *(
            pytest.param(form, seed, marks=pytest.mark.slow)
            for form in ("int8", "fp8")
            for seed in range(form == "int8", 3)
        ),
    ],
)
def test_quantized_run_learns_a_rewarded_letter(tmp_path: Path, servable_model: Path, form: str, seed: int) -> None:
    roll.train(
        config(
            tmp_path,
            servable_model,
            form,
            seed=seed,
            training={"num_steps": 8, "learning_rate": 1e-3, "num_threads": 1},
            rollout={"prompts_per_step": 6, "group_size": 6, "max_new_tokens": 6},
        )
    )
    rows = steps(tmp_path)
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.6
    rows = [row for row in rows if row["training/stepped"]]
    assert len(rows) >= 2
    # k3 is never negative, and 0 only if engine and trainer compute the same.
    assert all(0 < row["agreement/divergence"] < 0.1 for row in rows)
    # Codes and scales of 7 layers, twice. oneDNN, which computes int8 without AMX, does not return its codes.
    num_read_back = 2 * 2 * 7 if form == "fp8" or torch.cpu._is_amx_tile_supported() else 0
    assert all(row["sync/checksums_read_back"] == num_read_back for row in rows)


def test_quantized_run_a_judge_in_fp8_scores_a_policy_in_int8(
    tmp_path: Path, servable_model: Path, tiny_judge: Path
) -> None:
    reward = {
        "type": "judge", "rubric": "quality", "explain": False, "scale": [0, 4], "require_finished": False,
        "max_reply_tokens": 8,
    }  # fmt: skip
    roll.train(
        config(
            tmp_path,
            servable_model,
            "int8",
            training={"num_steps": 3, "learning_rate": 3e-3, "num_threads": 1},
            data=[{"source": "arithmetic", "reward": [reward]}],
            judge={"model": str(tiny_judge), "engine": "vllm", "quantization": "fp8", "max_context": 2048},
        )
    )
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["judge/verdicts"] >= 12 and row["judge/failures"] == 0 for row in rows)
    assert len({row["reward/mean"] for row in rows}) > 1
