"""Ctrl-C and SIGTERM save at the last step's boundary; the resumed run equals one that was never interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from chaos.harness import Run, tiny_config

DEADLINE_S = 200.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_resumed_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, tiny_model: Path, number: signal.Signals, code: int
) -> None:
    config = {**tiny_config(tiny_model, num_steps=30), "checkpoint": {"every_num_steps": 0}}
    config["evaluation"] = {"every_num_steps": 10, "num_prompts": 2, "samples_per_prompt": 1}
    run = Run(tmp_path / "interrupted", config)
    process = run.begin()
    end = time.monotonic() + DEADLINE_S
    metrics = run.path / "metrics.jsonl"
    while not (metrics.exists() and '"step": 2, "kind": "train"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1].decode()
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, errors.decode()
    assert f"roll resume {run.path}" in errors.decode()
    saved = run.checkpoint()
    assert saved.name >= "step-000002"
    assert (saved / "model" / "model.safetensors").is_file()
    run.finish()
    reference = Run(tmp_path / "reference", config)
    reference.finish()
    assert run.metrics() == reference.metrics()
    assert run.ledger() == reference.ledger()
