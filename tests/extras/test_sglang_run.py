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


def test_sglang_real_grpo_run_has_the_trainers_log_probs_on_every_step(tmp_path: Path, tiny_model: Path) -> None:
    options: dict[str, Any] = {**CPU_OPTIONS, "python": str(write_sglang_python(tmp_path))}
    config = {
        **tiny_config(tiny_model, num_steps=4),
        "output_dir": str(tmp_path / "runs"),
        "algorithm": {"type": "grpo"},
        "inference": {"engine": "sglang", "options": options},
    }
    roll.train(config)
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["agreement/logprob_max_abs"] < 1e-4 for row in rows)
    assert all(row["sync/probe_max_abs"] < 1e-4 and row["sync/probe_change"] > 0 for row in rows[1:])
