"""Runs and configurations that an earlier version wrote: resumed, shown, exported and replayed by this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded.older_runs import extract_older_runs
from safetensors.numpy import load_file

import roll
from roll.cli.commands import roll as command
from roll.config.load import load_config

RUNS = ("rlvr", "agentic")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    extract_older_runs(tmp_path)
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
