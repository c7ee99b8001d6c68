"""Runs and configurations that an earlier version wrote: resumed, shown, exported and replayed by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded.older_runs import extract_older_runs
from safetensors.numpy import load_file

import roll
from roll.cli.commands import roll as command
from roll.config.load import load_config
from roll.config.simulation import load_simulation
from roll.dashboard.metrics import Metrics
from roll.tracking.metrics_file import read_metrics
from roll.tracking.reading.files import SafeDirectory as SafeDirectory

RUNS = ("rlvr", "agentic")
RENAMED = "older_names.tar.xz"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    extract_older_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    extract_older_runs(tmp_path, RENAMED)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def rows(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


@pytest.mark.parametrize("name", RUNS)
def test_older_run_resumes_where_it_stood(runs: Path, name: str) -> None:
    before = rows(runs / name)
    weights = load_file(runs / name / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    ledger = (runs / name / "checkpoints" / "step-000002" / "ledger.jsonl").read_text().splitlines()
    roll.resume(runs / name, ["training.num_steps=4"])
    after = rows(runs / name)
    assert after[:2] == before and [row["step"] for row in after] == [1, 2, 3, 4]
    last = runs / name / "checkpoints" / "step-000004"
    trained = load_file(last / "model" / "model.safetensors")
    assert trained.keys() == weights.keys() and any((trained[key] != weights[key]).any() for key in weights)
    draws = [json.loads(line) for line in (last / "ledger.jsonl").read_text().splitlines()]
    assert len(draws) == 2 * len(ledger)  # three a step, none twice
    assert (runs / name / "rollouts" / "step-000004.parquet").is_file()


@pytest.mark.parametrize("name", RUNS)
def test_older_run_is_shown_and_exported(runs: Path, name: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, ["view", str(runs / name), "--plain", "--filter", "kind=train"])
    assert shown.exit_code == 0 and len(shown.output.splitlines()) == 1 + 24, shown.output
    target = tmp_path / "exported"
    roll.export(runs / name, target)
    saved = load_file(runs / name / "checkpoints" / "step-000002" / "model" / "model.safetensors")
    exported = load_file(target / "model.safetensors")
    assert all((exported[key] == saved[key]).all() for key in saved)


def test_older_run_older_recording_is_replayed(runs: Path) -> None:
    roll.replay(runs / "rlvr")
    recorded, replayed = rows(runs / "rlvr"), rows(runs / "rlvr-replay")
    for key in ("training/loss", "training/grad_norm", "training/policy/entropy_estimate", "reward/mean"):
        assert [row[key] for row in replayed] == pytest.approx([row[key] for row in recorded], rel=1e-4, abs=1e-6), key


def test_older_run_older_configurations_load(runs: Path) -> None:
    files = [*runs.glob("*/config.yaml"), *runs.parent.glob("examples/*.yaml")]
    assert len(files) > 20
    for file in files:
        load_config(file)


@pytest.mark.parametrize("name", ["rlvr", "sft"])
def test_run_with_former_names_resumes_and_writes_the_new_ones(
    renamed: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    roll.resume(renamed / name, ["training.num_steps=3"])
    (warning,) = [record.message for record in caplog.records if "former names" in record.message]
    assert "training.mlp_slice_tokens -> training.tiled_mlp_tokens" in warning
    written = (renamed / name / "config.yaml").read_text()
    assert "tiled_mlp_tokens: 64" in written and "mlp_slice_tokens" not in written and "hand_over" not in written
    history = (renamed / name / "config_history.yaml").read_text()
    assert "training.num_steps:" in history and "mlp" not in history  # a new name is not a change
    if name == "rlvr":
        lines = rows(renamed / name)
        assert "choice/reward_counted" in lines[1] and "selection/reward_counted" not in lines[1]
        assert "selection/reward_counted" in lines[2] and not any("choice/" in key for key in lines[2])
        read = [row for row in read_metrics(renamed / name / "metrics.jsonl") if row["kind"] == "train"]
        assert len([row["selection/reward_counted"] for row in read]) == 3
    roll.resume(renamed / name, ["training.num_steps=4"])
    assert sum("former names" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["rlvr", "sft"])
def test_run_with_former_names_is_shown_compared_and_exported(renamed: Path, name: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(command, list(arguments))
        assert result.exit_code == 0, result.output
        return result.output

    path = str(renamed / name)
    target = tmp_path / "exported"
    roll.export(path, target)
    assert (target / "model.safetensors").is_file()
    other = renamed / "other"
    shutil.copytree(path, other)
    settings = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(
        settings.replace("mlp_slice_tokens: 64", "tiled_mlp_tokens: 128").replace("name: " + name, "name: other")
    )
    compared = run("compare", path, str(other), "-m", "selection/*" if name == "rlvr" else "training/*")
    assert "tiled_mlp_tokens" in compared and "mlp_slice_tokens" not in compared and "close_heap" not in compared
    if name == "rlvr":
        assert run("view", path, "--plain", "--filter", "kind=train").count("\n") == 1 + 24
        assert "selection/reward_counted" in compared
    metrics = Metrics(SafeDirectory(Path(path)))
    metrics.refresh()
    names = {entry["name"] for entry in metrics.build_overview()["names"]}
    assert not any("choice/" in each or each.endswith(("judged_share", "mismatch/left_out")) for each in names)


def test_recording_with_former_names_is_replayed(renamed: Path) -> None:
    roll.replay(renamed / "rlvr")
    for key in ("training/loss", "reward/mean"):
        recorded, replayed = ([row[key] for row in rows(renamed / each)] for each in ("rlvr", "rlvr-replay"))
        assert replayed == pytest.approx(recorded, rel=1e-4, abs=1e-6), key


def test_configurations_with_former_names_load(renamed: Path) -> None:
    files = sorted(renamed.parent.glob("configurations/*.yaml"))
    assert len(files) == 6
    for file in files:
        load_config(file)
    simulations = sorted(renamed.parent.glob("examples/*.yaml"))
    assert len(simulations) == 9 and all("over:" in file.read_text() for file in simulations)
    for file in simulations:
        load_simulation(file)
