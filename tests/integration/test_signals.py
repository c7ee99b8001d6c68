"""Ctrl-C and SIGTERM save at the last step's boundary; the resumed run equals one that was never interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from chaos.harness import Run, tiny_config

DEADLINE_S = 200.0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_signal_a_signal_saves_and_the_resumed_run_goes_on_as_if_nothing_had_been(
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
    assert (
        f"{number.name}: stopping the run and saving its last complete step"
        in (run.path / "logs" / "controller-0.log").read_text()
    )
    assert f"roll resume {run.path}" in errors.decode()
    saved = run.checkpoint()
    assert saved.name >= "step-000002"
    assert (saved / "model" / "model.safetensors").is_file()
    run.finish()
    reference = Run(tmp_path / "reference", config)
    reference.finish()
    assert run.metrics() == reference.metrics()
    assert run.ledger() == reference.ledger()


@pytest.mark.parametrize(
    ("said", "number", "code"),
    [
        ("reading the model's files", signal.SIGINT, 130),
        pytest.param("starting engines", signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_signal_a_run_that_starts_ends_without_going_on(
    tmp_path: Path, tiny_model: Path, said: str, number: signal.Signals, code: int
) -> None:
    run = Run(tmp_path / "runs", tiny_config(tiny_model, num_steps=1), forks=False)  # imports are a part of the start
    process = run.begin()
    end = time.monotonic() + DEADLINE_S
    log = run.path / "logs" / "controller-0.log"
    while not (log.exists() and said in log.read_text()):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1].decode()
        time.sleep(0.01)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, errors.decode()
    assert errors.decode().splitlines()[-1] == f"Interrupted. Continue with: roll resume {run.path}"
    assert "syncing the weights" not in log.read_text()
    assert not list((run.path / "checkpoints").iterdir())
    run.finish()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_signal_ctrl_c_while_vllm_starts_is_an_interruption(tmp_path: Path, servable_model: Path) -> None:
    pytest.importorskip("vllm")
    run = Run(tmp_path / "vllm", tiny_config(servable_model, engine="vllm", num_steps=3))
    process = run.begin()
    end = time.monotonic() + DEADLINE_S
    while not _engines(process.pid):
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1].decode()
        time.sleep(0.01)
    (engine,) = _engines(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors.decode()
    assert "Interrupted" in errors.decode()
    assert not engine.is_running()


def _engines(process_id: int) -> list[psutil.Process]:
    """vLLM's processes below this one, once they have named themselves."""
    found = []
    for child in psutil.Process(process_id).children(recursive=True):
        try:
            name = child.name() + " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "EngineCore" in name:
            found.append(child)
    return found
