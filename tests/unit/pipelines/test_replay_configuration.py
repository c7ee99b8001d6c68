"""The configuration of a replay: what it takes from the recorded run, and what it refuses to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.cli.main import run as command
from roll.config.load import dump_config, dump_yaml, load_config
from roll.errors import ConfigError, RunDirectoryError
from roll.pipelines.recording.configuration import check_replayable, load_replay_config

BASE: dict[str, Any] = {
    "name": "x",
    "model": "smollm2-135m-instruct",
    "data": [{"source": "arithmetic", "reward": "math"}],
    "training": {"num_steps": 4},
    "tracking": {"record_rollouts": True},
}


def recorded(directory: Path, **changes: Any) -> Path:
    """A run's directory with its resolved configuration."""
    path = directory / "runs" / "x"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_yaml(load_config(BASE | changes)))
    return path


def test_replay_config_a_replay_lies_beside_its_run_and_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded(tmp_path)
    config = load_replay_config(run)
    assert config.run_dir == tmp_path / "runs" / "x-replay"
    assert load_replay_config(run, only="rollout").name == "x-rollouts"
    assert load_replay_config(run, ["name=y"], checkpoint="c").run_dir == tmp_path / "runs" / "y"
    assert not config.tracking.record_rollouts
    assert config.replay is not None and (config.replay.run, config.replay.only) == (str(run), "train")
    monkeypatch.chdir(run)
    assert load_replay_config(".").run_dir == tmp_path / "runs" / "x-replay"


def test_replay_config_another_algorithm_leaves_the_old_presets_keys_behind_and_keeps_the_users_own(
    tmp_path: Path,
) -> None:
    own = {"type": "dapo", "kl": {"coefficient": 0.125}, "gate": {"type": "min_clip", "low": 0.1, "high": 0.28}}
    run = recorded(tmp_path, algorithm=own)
    before = load_config(run / "config.yaml").algorithm
    changed = load_replay_config(run, ["algorithm.type=gspo"]).algorithm
    fresh = load_config(BASE | {"algorithm": {"type": "gspo"}}).algorithm
    assert before.aggregation == "token_mean"  # dapo's
    assert changed.aggregation == fresh.aggregation != before.aggregation
    assert changed.ratio == fresh.ratio
    assert changed.kl.coefficient == 0.125
    assert changed.gate.model_dump()["low"] == 0.1  # the user's
    assert changed.gate.model_dump()["high"] == fresh.gate.model_dump()["high"]  # dapo has 0.28 of its own
    assert load_replay_config(run).algorithm == before


@pytest.mark.parametrize(
    ("only", "override", "what"),
    [
        ("train", "rollout.temperature=0.5", r"rollout\.temperature: recorded 1\.0, now 0\.5"),
        ("train", "inference.max_num_seqs=7", r"inference\.max_num_seqs: recorded .*, now 7"),
        ("rollout", "seed=3", r"without the trainer .*\n.*seed: recorded 0, now 3"),
        ("rollout", "model=other", r"model\.path: recorded 'smollm2-135m-instruct', now 'other'"),
    ],
)
def test_replay_config_what_a_recording_has_decided_cannot_change(
    tmp_path: Path, only: Any, override: str, what: str
) -> None:
    run = recorded(tmp_path)
    config = load_replay_config(run, [override], only=only)
    with pytest.raises(ConfigError, match=what):
        check_replayable(config, dump_config(load_config(run / "config.yaml")))


def test_replay_config_what_makes_the_difference_may_change(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    before = dump_config(load_config(run / "config.yaml"))
    learning = load_replay_config(run, ["algorithm.type=gspo", "training.learning_rate=1e-3"])
    check_replayable(learning, before)
    assert dump_config(learning)["training"] == before["training"] | {"learning_rate": 1e-3}
    schedule = ["rollout.scheduling.async_ratio=1.0", "inference.max_num_seqs=7"]
    check_replayable(load_replay_config(run, schedule, only="rollout"), before)
    with pytest.raises(ConfigError, match=r"async_ratio: recorded 0\.0, now 1\.0\n.*max_num_seqs: recorded .*, now 7"):
        check_replayable(load_replay_config(run, schedule, only="train"), before)


@pytest.mark.parametrize(("section", "override"), [("tracking", ""), ("algorithm", "algorithm.type=gspo")])
def test_replay_config_a_recorded_section_that_is_none_is_named(tmp_path: Path, section: str, override: str) -> None:
    run = recorded(tmp_path)
    tree = dump_config(load_config(run / "config.yaml"))
    (run / "config.yaml").write_text(json.dumps({**tree, section: 3}))
    with pytest.raises(ConfigError, match=section):
        load_replay_config(run, [override] if override else [])


def test_replay_config_the_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not a run: it has no config\.yaml"):
        load_replay_config(tmp_path)
    assert command(["replay", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
