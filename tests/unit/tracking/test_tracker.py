"""A few made-up steps through the tracker; every file it wrote is read back by its own reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from unit.tracking.conftest import make_group
from worlds.timing import is_timing

from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ConfigError, RunDirectoryError
from roll.tracking import RunDirectory, Tracker, read_metrics
from roll.tracking.rollout_table import write_rollouts
from roll.types import RewardResult


def scalars(run: RunDirectory, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself reads."""
    events = EventAccumulator(str(run.tensorboard_dir))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


def untimed(run: RunDirectory) -> list[dict]:
    return [{k: v for k, v in row.items() if not is_timing(k)} for row in read_metrics(run.metrics_path)]


def test_tracker_every_file_of_a_run_can_be_read_back(
    run: RunDirectory, config: RLVRConfig, demo: SimpleNamespace
) -> None:
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        demo.evaluation(tracker, 0)
        for step in range(1, 5):
            demo.step(tracker, step)
        summary = tracker.finish()

    assert RLVRConfig.model_validate(yaml.safe_load(run.config_path.read_text())) == config

    rows = read_metrics(run.metrics_path)
    assert [(row["step"], row["kind"]) for row in rows] == [
        (0, "evaluation"), (1, "train"), (2, "train"), (2, "evaluation"),
        (3, "train"), (4, "train"), (4, "evaluation"),
    ]  # fmt: skip
    assert [row["reward/mean"] for row in rows if row["kind"] == "train"] == [0.125, 0.25, 0.375, 0.5]
    assert rows[1]["training/loss"] == 0.5
    assert rows[1]["throughput/generated_tokens_per_s"] == pytest.approx(9 / rows[1]["time/generate_s"])

    assert scalars(run, "reward/mean") == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert scalars(run, "eval/accuracy") == [(0, 0.0), (2, 0.5), (4, 1.0)]

    table = pq.read_table(run.get_rollouts_path(3)).to_pylist()
    assert [row["rollout_id"] for row in table] == ["6.0", "6.1", "7.0", "7.1"]
    assert table[0]["token_ids"] == [6, 0, 2]
    assert table[0]["logprobs"] == [-0.5, -0.25, -0.125]
    assert dict(table[0]["components"]) == {"math": 1.0, "form": 0.5}
    assert (table[0]["advantage"], table[1]["advantage"], table[2]["advantage"]) == (1.0, -1.0, None)
    assert (table[2]["status"], table[2]["cause"], table[2]["reward"]) == ("infra_error", "engine died", None)
    assert pq.read_table(run.get_evaluation_path(2)).num_rows == 2

    names = [event["name"] for event in json.loads(run.trace_path.read_text()) if event["ph"] == "X"]
    assert names.count("generate") == 4 and "step 4" in names

    written = json.loads(run.summary_path.read_text())
    assert written == summary.to_json()
    assert (written["accuracy_before"], written["accuracy_after"]) == (0.0, 1.0)
    assert written["reward_last5"] == pytest.approx((0.375 + 0.5) / 2)  # of four steps the last half
    assert written["peak_rss_bytes"] > 10 * 2**20
    assert written["setup_s"] > 0
    assert run.get_plot_path("reward").read_bytes().startswith(b"\x89PNG")


def test_tracker_a_run_resumed_from_a_checkpoint_records_what_an_uninterrupted_one_does(
    tmp_path: Path, demo: SimpleNamespace
) -> None:
    whole, torn = (demo.config(tmp_path / name) for name in ("whole", "torn"))
    with (
        RunDirectory.create(whole.run_dir, {}) as run,
        Tracker(run, whole, num_steps=whole.training.num_steps) as tracker,
    ):
        demo.evaluation(tracker, 0)
        for step in range(1, 5):
            demo.step(tracker, step)

    with RunDirectory.create(torn.run_dir, {}) as run, Tracker(run, torn, num_steps=torn.training.num_steps) as tracker:
        demo.evaluation(tracker, 0)
        for step in range(1, 4):
            demo.step(tracker, step)
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 4, "kind": "tr')  # killed in the middle of a line
    with (
        RunDirectory.open(torn.run_dir, lock=True) as run,
        Tracker(run, torn, num_steps=torn.training.num_steps, resumed_at=1) as tracker,
    ):
        assert not run.get_rollouts_path(2).exists() and not run.get_evaluation_path(2).exists()
        for step in range(2, 5):
            demo.step(tracker, step)

    uninterrupted = RunDirectory.open(whole.run_dir)
    assert untimed(run) == untimed(uninterrupted)
    assert scalars(run, "reward/mean") == scalars(uninterrupted, "reward/mean")
    assert scalars(run, "eval/accuracy") == scalars(uninterrupted, "eval/accuracy")
    for path in uninterrupted.rollouts_dir.iterdir():
        assert (run.rollouts_dir / path.name).read_bytes() == path.read_bytes()


def test_tracker_a_run_killed_before_its_first_checkpoint_starts_with_an_empty_record(
    run: RunDirectory, config: RLVRConfig, demo: SimpleNamespace
) -> None:
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        demo.evaluation(tracker, 0)
        demo.step(tracker, 1)
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        assert read_metrics(run.metrics_path) == []
        assert list(run.rollouts_dir.iterdir()) == []
        demo.step(tracker, 1)
    assert scalars(run, "reward/mean") == [(1, 0.125)]


def test_trackers_that_are_switched_off_write_nothing(tmp_path: Path, demo: SimpleNamespace) -> None:
    config = demo.config(tmp_path, tensorboard=False, rollouts=False)
    with (
        RunDirectory.create(config.run_dir, {}) as run,
        Tracker(run, config, num_steps=config.training.num_steps) as tracker,
    ):
        demo.step(tracker, 2)
    assert list(run.tensorboard_dir.iterdir()) == []
    assert list(run.rollouts_dir.iterdir()) == []
    assert len(read_metrics(run.metrics_path)) == 2


def test_tracker_a_tracker_that_fails_during_the_run_is_counted_and_does_not_stop_it(
    run: RunDirectory, config: RLVRConfig, demo: SimpleNamespace
) -> None:
    run.rollouts_dir.rmdir()
    run.rollouts_dir.write_text("a file where the directory was")
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        demo.step(tracker, 1)
        summary = tracker.finish()
    assert summary.tracker_failures == 1
    assert summary.num_steps == 1


def test_tracker_a_record_that_cannot_be_written_stops_the_run_with_the_reason(
    run: RunDirectory, config: RLVRConfig
) -> None:
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker:
        run.metrics_path.mkdir()
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl.*directory"):
            tracker.log_step(1, {"reward/mean": 0.0})


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_tracker_a_missing_package_of_a_tracker_is_said_before_anything_runs(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: SimpleNamespace
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)  # importing it now fails, installed or not
    config = demo.config(tmp_path, **{package: "project"})
    with (
        RunDirectory.create(config.run_dir, {}) as run,
        pytest.raises(ConfigError, match=rf"pip install 'roll-rl\[{package}\]'"),
        Tracker(run, config, num_steps=config.training.num_steps),
    ):
        pass


@pytest.mark.parametrize(
    "changed",
    [
        {"text": "half \ud800 a pair"},
        {"cause": "\udcff"},
        {"reward": RewardResult(value=1.0, verdict="\ud800", components={"\udfff": 1.0})},
    ],
    ids=str,
)
def test_tracker_halves_of_surrogate_pairs_cost_no_table(tmp_path: Path, changed: dict[str, Any]) -> None:
    group = make_group(0)
    group = replace(group, rollouts=(replace(group.rollouts[0], **changed), *group.rollouts[1:]))
    write_rollouts(tmp_path / "step.parquet", 1, [group])
    (first, second) = pq.read_table(tmp_path / "step.parquet").to_pylist()
    assert "?" in str({key: first[key] for key in ("text", "cause", "verdict", "components")})
    assert second["text"] == group.rollouts[1].text


def test_tracker_the_first_time_out_of_a_phase_is_said_at_once(
    run: RunDirectory, config: RLVRConfig, demo: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    first = demo.group(1).rollouts[0]
    late = replace(first, reward=replace(first.reward, timed_out=("slow",)))
    with Tracker(run, config, num_steps=config.training.num_steps) as tracker, tracker.spans.phase("generate"):
        tracker.on_rollout(first)
        assert not caplog.messages
        for _ in range(3):
            tracker.on_rollout(late)
        said = [message for message in caplog.messages if "time_limit_s" in message]
    assert said == [
        "verifying an answer to prompt 'arithmetic/1+1' exceeded the reward's time_limit_s: the reward is 0"
    ]
