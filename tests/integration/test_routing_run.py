"""Whole runs whose updates use the experts that the engine chose, by the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos.harness import tiny_config
from worlds.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))
from families import FAMILIES, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)


def train(
    tmp_path: Path, family: str, engine: str, *, settings: Mapping[str, Any] = {}, **sizes: int
) -> subprocess.CompletedProcess[str]:
    """A run of two steps; `settings` of its sections' keys."""
    tokenizer = write_tiny_model(tmp_path / "tokenizer", hidden=128, tied=False, context_length=192)
    small = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32, "intermediate_size": 64}
    path = write_model(tmp_path / family, tokenizer, FAMILIES[family], **(small | sizes))
    config = {**tiny_config(path, engine=engine, num_steps=2), "output_dir": str(tmp_path)}
    config["training"]["router_replay"] = "engine"
    for name, changes in settings.items():
        config[name] |= changes
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from roll.cli import main; main()", "train", str(tmp_path / "config.yaml")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What was measured in the steps of a run."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("engine", ["hf", VLLM])
def test_router_replay_run_two_steps_replay_what_the_engine_chose(tmp_path: Path, engine: str) -> None:
    done = train(tmp_path, "qwen3-moe", engine)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for row in steps:
        assert row["agreement/replayed_share"] == 1.0 and row["agreement/expert_overlap"] >= 0.98
        assert row["agreement/logprob_max_abs"] <= 1e-3
        for name in ("own_routing", "engine_routing"):
            assert row[f"agreement/{name}/logprob_mean_abs"] <= 1e-3 and row[f"agreement/{name}/divergence"] >= 0


@pytest.mark.parametrize("engine", ["hf", VLLM])
def test_router_replay_run_in_bfloat16_replay_brings_log_probs_nearer_to_the_engine_s(
    tmp_path: Path, engine: str
) -> None:
    """Of 32 experts, engine and trainer choose two in a hundred otherwise: kernels round differently."""
    settings = {"model": {"dtype": "bfloat16"}, "rollout": {"group_size": 16, "max_new_tokens": 24}}
    sizes = {"num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    done = train(tmp_path, "qwen3-moe", engine, settings=settings, **sizes)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for row in steps:
        assert row["agreement/replayed_share"] == 1.0 and 0.9 < row["agreement/expert_overlap"] < 1
        for name in ("logprob_mean_abs", "divergence"):
            assert row[f"agreement/engine_routing/{name}"] <= 0.9 * row[f"agreement/own_routing/{name}"], name


def test_router_replay_run_a_model_that_cannot_replay_is_refused_before_training(tmp_path: Path) -> None:
    done = train(tmp_path, "phi-moe", "hf")
    assert done.returncode != 0 and "cannot be replayed" in done.stderr + done.stdout
