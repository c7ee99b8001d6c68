"""Runs with `inference.engine: sglang` and the real server of SGLang, on a CPU; see `test_sglang.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from worlds.sglang import CPU_OPTIONS, write_sglang_python

import roll

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


@pytest.mark.parametrize("lora", ["none", "merged", "adapter"])
def test_sglang_real_grpo_run_has_the_trainers_log_probs_on_every_step(
    lora: str, tmp_path: Path, tiny_model: Path
) -> None:
    options: dict[str, Any] = {**CPU_OPTIONS, "python": str(write_sglang_python(tmp_path))}
    settings = tiny_config(tiny_model, num_steps=4)
    if lora != "none":
        settings |= {"model": {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}}}
        settings |= {"weight_sync": {"lora": lora}}
        settings["training"] |= {"learning_rate": 1e-2}
    if lora == "adapter":
        options["lora_backend"] = "torch_native"
    config = {
        **settings,
        "output_dir": str(tmp_path / "runs"),
        "algorithm": {"type": "grpo"},
        "inference": {"engine": "sglang", "options": options},
    }
    roll.train(config)
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # Answers are random, so all rewards of a step may be equal; it then changes nothing.
    stepped = [row for row in rows if row["training/stepped"]]
    assert stepped and all(row["agreement/logprob_max_abs"] < 1e-4 for row in stepped)
    probes = [row for row in rows[1:] if row["sync/probe_max_abs"] is not None]
    assert all(row["sync/probe_max_abs"] < 1e-4 for row in probes)
    assert any(row["sync/probe_change"] > 0 for row in probes)
