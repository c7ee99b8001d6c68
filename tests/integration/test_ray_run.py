"""A whole run on Ray, in a process of its own, while its processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.harness import Run, tiny_config

pytestmark = pytest.mark.ray

DEADLINE_S = 240.0


def ray_config(model: Path, **changes: Any) -> dict[str, Any]:
    """Two trainer ranks and two engines, each on a device of its own."""
    config = tiny_config(model, num_steps=8)
    config["rollout"] = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 48}
    config["cluster"] = {
        "type": "ray",
        "devices_per_node": 4,
        "device_mapping": {"actor_train": "0-1", "actor_infer": "2-3"},
    }
    return config | changes


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment variable's value that every process of a run inherits."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("ROLL_TEST_MARK", value)
    return value


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes of a run."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("ROLL_TEST_MARK") == mark:
                yield process


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until something is so."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.05)


def steps_recorded(run: Run) -> int:
    path = run.path / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return max((row["step"] for row in rows if row["kind"] == "train"), default=0)


def actor_processes(mark: str, actor: str) -> list[psutil.Process]:
    return [p for p in marked(mark) if any(actor in part for part in p.cmdline())]


def end(process: subprocess.Popen[bytes]) -> str:
    _, errors = process.communicate(timeout=DEADLINE_S)
    return errors.decode()


@pytest.mark.timeout(600)
def test_ray_run_a_killed_engine_is_replaced_and_sigterm_saves_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path, mark: str
) -> None:
    run = Run(tmp_path / "runs", ray_config(tiny_model))
    process = run.start("train", str(tmp_path / "runs" / "config.yaml"), "training.num_steps=1000")
    wait_until(lambda: steps_recorded(run) >= 1 or process.poll() is not None, "the first step")
    assert process.poll() is None, end(process)
    engines = actor_processes(mark, "EngineActor")
    assert len(engines) == 2
    engines[0].kill()

    def training() -> list[dict[str, Any]]:
        return [row for row in run.metrics() if row["kind"] == "train"]

    wait_until(lambda: training()[-1]["engines/replaced"] == 1 or process.poll() is not None, "a new engine")
    process.terminate()
    errors = end(process)
    assert process.returncode == 143, errors
    rows = training()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["engines/replaced"] == 1
    assert rows[-1]["rollout/infra_errors"] == 0
    assert run.checkpoint().name == f"step-{len(rows):06d}"
    assert {entry["outcome"] for entry in run.ledger()} <= {"trained", "filtered"}
    wait_until(lambda: not list(marked(mark)), "the end of every process")


@pytest.mark.timeout(600)
def test_ray_run_a_killed_controller_leaves_no_process_behind(tmp_path: Path, tiny_model: Path, mark: str) -> None:
    run = Run(tmp_path / "runs", ray_config(tiny_model))
    process = run.begin()
    wait_until(lambda: steps_recorded(run) >= 1 or process.poll() is not None, "the first step")
    assert process.poll() is None, end(process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not list(marked(mark)), "the end of every process")


@pytest.mark.timeout(600)
def test_ray_run_a_killed_rank_ends_the_run_which_then_resumes_with_one_rank_and_one_engine(
    tmp_path: Path, tiny_model: Path, mark: str
) -> None:
    run = Run(tmp_path / "runs", ray_config(tiny_model))
    process = run.begin()
    wait_until(lambda: steps_recorded(run) >= 3 or process.poll() is not None, "the third step")
    assert process.poll() is None, end(process)
    ranks = actor_processes(mark, "TrainerActor")
    assert len(ranks) == 2
    ranks[1].kill()
    errors = end(process)
    assert process.returncode == 1
    assert f"rank 1 of trainer policy: its process ended (see {run.path / 'logs' / 'policy-1.log'})" in errors
    assert "Traceback" not in errors
    wait_until(lambda: not list(marked(mark)), "the end of every process")
    logs = {path.name for path in (run.path / "logs").glob("*.log")}
    assert {"policy-0.log", "policy-1.log", "engine_actor-0.log", "engine_actor-1.log"} <= logs

    changes = ["cluster.type=local", "cluster.device_mapping.actor_train=0", "cluster.device_mapping.actor_infer=0"]
    process = run.start("resume", str(run.path), *changes, "training.num_steps=8")
    errors = end(process)
    assert process.returncode == 0, errors
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [entry["draw_id"] for entry in run.ledger()] == list(range(32))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_ray_run_the_quickstart_trains_on_two_ranks_and_two_vllm_engines(tmp_path: Path, default_model: Path) -> None:
    config = {
        **ray_config(default_model),
        "model": str(default_model),
        "data": [{"source": "arithmetic", "reward": "math"}],
        "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 32},
        "training": {"num_steps": 40, "learning_rate": 1e-5},
        "evaluation": {"every_num_steps": 10, "num_prompts": 24},
        "inference": {"engine": "vllm"},
    }
    run = Run(tmp_path / "runs", config)
    process = run.begin()
    _, errors = process.communicate(timeout=1700)
    assert process.returncode == 0, errors.decode()
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.25
    assert summary["accuracy_after"] >= 0.85
