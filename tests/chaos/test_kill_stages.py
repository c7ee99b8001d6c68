"""Stages of two parts each that save while they train, killed, stopped and signalled: resumed, bit for bit the same."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.harness import TIMEOUT_S, Run, tiny_config
from worlds.tiny_model import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.chaos]

NUM_STEPS = 8
NUM_RUNS = 12
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)


def staged(model: Path) -> dict[str, Any]:
    config = tiny_config(model, num_steps=NUM_STEPS)
    config["training"] |= {"parallel": {"pp": 2, "vpp": 2}, "max_tokens_per_micro_batch": 128}
    config["checkpoint"] = {"every_num_steps": 1, "asynchronous": True, "keep_last": 2}
    config["cluster"] = {
        "type": "ray",
        "devices_per_node": 3,
        "device_mapping": {"actor_train": "0-1", "actor_infer": "2"},
    }
    return config


def wait_for_saves(run: Run, process: subprocess.Popen[bytes], count: int) -> None:
    """Until so many have begun, or the run has ended."""
    seen: set[str] = set()
    while process.poll() is None and len(seen) < count:
        seen.update(path.name for path in (run.path / "checkpoints").glob(".*"))
        time.sleep(0.003)


def signalled(process: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Send a signal to a rank, to all of them or to the controller; one that was stopped goes on. Says which."""
    whom, what = rng.choice(["rank", "rank", "ranks", "controller"]), rng.choice(SIGNALS)
    chosen: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        controller = psutil.Process(process.pid)
        ranks = [p for p in controller.children(recursive=True) if "TrainerActor" in "".join(p.cmdline())]
        chosen = {"rank": ranks[-1:] if rng.random() < 0.5 else ranks[:1], "ranks": ranks}.get(whom, [controller])
    for sent in (what, *([signal.SIGCONT] if what == signal.SIGSTOP else [])):
        for each in chosen:
            with contextlib.suppress(psutil.Error):
                each.send_signal(sent)
        if sent == signal.SIGSTOP:
            time.sleep(rng.uniform(0.2, 4.0))
    return f"{what.name} to the {whom}"


@pytest.mark.timeout(7200)
def test_resume_after_kill_pipeline_parallel_a_dozen_runs_that_are_hit_while_they_save(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", layers=5)
    reference = Run(tmp_path / "reference", staged(model))
    reference.finish()
    for seed in range(NUM_RUNS):
        rng, run = random.Random(seed), Run(tmp_path / str(seed), staged(model))
        process = run.begin()
        wait_for_saves(run, process, rng.randrange(1, NUM_STEPS - 1))
        time.sleep(rng.uniform(0.0, 0.15))
        hit = signalled(process, rng)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert b"Traceback" not in errors, (seed, hit)
        run.finish()
        assert run.rollouts() == reference.rollouts(), (seed, hit)
        assert run.ledger() == reference.ledger(), (seed, hit)
        ours, theirs = (each.checkpoint() / "model" / "model.safetensors" for each in (run, reference))
        assert ours.read_bytes() == theirs.read_bytes(), (seed, hit)
        steps = [row["step"] for row in run.metrics() if row["kind"] == "train"]
        assert steps == list(range(1, NUM_STEPS + 1)), (seed, hit)
