"""A run whose rewards come from programs in sandboxes, on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.harness import tiny_config
from sandbox.conftest import roll_sandbox, served

import roll
from roll.errors import ConfigError
from roll_sandbox import SandboxAccessError

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")


def config(directory: Path, model: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"type": "code", "require_finished": False}
    source = {"source": "file", "path": str(file), "answer_key": None, "held_out": 0.0, "reward": [reward]}
    return {
        **tiny_config(model, num_steps=2),
        "output_dir": str(directory),
        "data": [source],
        "rollout": {"prompts_per_step": 2, "group_size": 8, "max_new_tokens": 1, "max_attempts": 2},
        "sandbox": {"max_parallel": 2},
        "checkpoint": {"at_end": False},
        **changes,
    }


def steps(directory: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def test_code_reward_run_a_run_trains_on_what_programs_do_and_leaves_none_behind(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One token is a program: a digit runs, most others do not."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    tasks = [{"prompt": f"Task {i}", "tests": [{"stdin": "", "stdout": ""}]} for i in range(4)]
    roll.train(config(tmp_path, tiny_model, tasks))
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert any(row["training/stepped"] for row in rows)
    assert all(row["rollout/infra_errors"] == 0 for row in rows)
    assert all(0 < row["reward/mean"] < 1 for row in rows)
    new = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    _, left = psutil.wait_procs(new, timeout=10)  # a sandbox that was killed may still be ending
    assert left == []


@pytest.mark.slow
def test_code_reward_run_what_right_answers_took_is_remembered_over_a_resume(tmp_path: Path, tiny_model: Path) -> None:
    tasks = [{"prompt": f"Task {i}", "tests": [{"stdin": "", "stdout": ""}]} for i in range(2)]
    roll.train(config(tmp_path, tiny_model, tasks, checkpoint={"at_end": True}))
    file = tmp_path / "run" / "checkpoints" / "step-000002" / "state.json"
    state = json.loads(file.read_text())
    anchors = state["verifiers"]["file"]["code"]
    assert anchors and all(0 < cpu_s < 5 for pairs in anchors.values() for _, cpu_s in pairs)
    uid = next(iter(anchors))
    anchors[uid] = [[0, 7.5]]  # more than any of these programs takes, so that it stays the largest
    file.write_text(json.dumps(state))
    roll.resume(tmp_path / "run", ["training.num_steps=3"])
    later = json.loads((tmp_path / "run" / "checkpoints" / "step-000003" / "state.json").read_text())
    assert later["verifiers"]["file"]["code"][uid] == [[0, 7.5]]


@pytest.mark.slow
def test_code_reward_run_a_run_with_the_sandboxes_of_a_service_has_the_same_rewards(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"prompt": f"Task {i}", "tests": [{"stdin": "", "stdout": ""}]} for i in range(4)]
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    roll.train(config(tmp_path / "here", tiny_model, tasks))
    with served(tmp_path, "--warm", "0") as (url, token):
        monkeypatch.setenv("ROLL_SANDBOX_TOKEN", token)
        changes = {"sandbox": {"max_parallel": 2, "url": url}}
        roll.train(config(tmp_path / "there", tiny_model, tasks, **changes))
    here, there = steps(tmp_path / "here"), steps(tmp_path / "there")
    same = ("reward/mean", "reward/std", "training/loss", "rollout/infra_errors")
    assert [[row.get(name) for name in same] for row in there] == [[row.get(name) for name in same] for row in here]
    assert any(0 < row["reward/mean"] < 1 for row in there)
    files = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert files and not any(token.encode() in path.read_bytes() for path in files)


@pytest.mark.slow
def test_code_reward_run_a_token_that_is_revoked_stops_the_run_and_a_new_one_resumes_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"prompt": f"Task {i}", "tests": [{"stdin": "", "stdout": ""}]} for i in range(4)]
    with served(tmp_path, "--warm", "0") as (url, admin):
        database = f"sqlite:///{tmp_path}/sandboxes.db"
        token = roll_sandbox("token", "create", "brief", "--database", database)
        monkeypatch.setenv("ROLL_SANDBOX_TOKEN", token)
        changes = {"sandbox": {"max_parallel": 2, "url": url}, "checkpoint": {"every_num_steps": 1, "at_end": True}}

        def revoke(step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                roll_sandbox("token", "revoke", token.split("_")[1], "--database", database)

        settings = config(tmp_path, tiny_model, tasks, **changes)
        settings["training"] = {**settings["training"], "num_steps": 200}
        with pytest.raises(SandboxAccessError, match="expired or revoked"):
            roll.train(settings, on_step=revoke)
        reached = len(steps(tmp_path))
        assert 1 <= reached < 200
        monkeypatch.setenv("ROLL_SANDBOX_TOKEN", admin)
        roll.resume(tmp_path / "run", [f"training.num_steps={reached + 1}"])
        assert steps(tmp_path)[-1]["step"] == reached + 1


def test_code_reward_run_a_malformed_task_is_left_out_by_name_and_the_run_goes_on(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"prompt": f"Task {i}", "tests": [{"stdin": "", "stdout": ""}]} for i in range(3)]
    roll.train(config(tmp_path, tiny_model, [*good, {"prompt": "Bad", "tests": [{"stdout": 3}]}]))
    assert [row["step"] for row in steps(tmp_path)] == [1, 2]
    assert sum(row["rollout/infra_errors"] for row in steps(tmp_path)) > 0
    assert "prompt 'file/4': its tests cannot be used: case 0: stdout must be a string, got 3." in caplog.text
    assert "attempt 2 of 2" not in caplog.text  # no repetition can help


def test_code_reward_run_a_missing_tool_chain_stops_the_run_before_it_starts(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, **more: None if name == "g++" else which(name, **more))
    settings = config(tmp_path, tiny_model, [{"prompt": "x", "tests": [{"stdout": ""}]}])
    settings["data"][0]["reward"] = [{"type": "code", "language": "cpp"}]
    with pytest.raises(ConfigError, match=r"require 'g\+\+'"):
        roll.train(settings)
