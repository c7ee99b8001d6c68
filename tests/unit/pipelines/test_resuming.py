"""Resuming a run: what is noticed, kept and refused before anything is started for it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import roll
from roll.config.history import read_history
from roll.config.load import load_config
from roll.errors import CheckpointError, ConfigError
from roll.pipelines.fingerprints import check_fingerprints, compute_fingerprints

pytestmark = pytest.mark.integration

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
    for word in ("ab", "ba", "cab", "abc")
]


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rows, of a run whose paths are relative to it."""
    home = tmp_path / "project"
    (home / "rows").mkdir(parents=True)
    for name, rows in (("train", ROWS), ("held_out", ROWS[:2])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (home / "rows" / f"{name}.jsonl").write_text(text.replace("Say", "Write") if name == "held_out" else text)
    (home / "model").symlink_to(tiny_model)
    monkeypatch.chdir(home)
    return home


def config(**changes: Any) -> dict[str, Any]:
    """A run of a second."""
    return {
        "pipeline": "sft",
        "name": "run",
        "model": {"path": "model", "dtype": "float32"},
        "data": [{"source": "file", "path": "rows/train.jsonl", "held_out_path": "rows/held_out.jsonl"}],
        "training": {"num_steps": 2, "examples_per_step": 2, "num_threads": 1},
        "tracking": {"console": "quiet", "tensorboard": False},
    } | changes


REWARDED = {"name": "run", "model": {"path": "model"}, "training": {"num_steps": 1}}


def steps_of(run: Path) -> list[int]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == "train"]


def files_of(run: Path) -> dict[Path, int]:
    """When each was written."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def lose_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def test_resume_of_an_ended_run_says_so_and_starts_nothing(
    project: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = roll.train(config())
    before = files_of(Path("runs/run"))
    monkeypatch.setattr("roll.pipelines.commands.Tracker", None)  # whoever starts something has one
    again = roll.resume("runs/run")
    assert "is finished: all 2 steps are trained" in caplog.text and "training.num_steps=4" in caplog.text
    assert (again.num_steps, again.score_after) == (first.num_steps, first.score_after)
    assert files_of(Path("runs/run")) == before
    with pytest.raises(ConfigError, match=r"no effect: training\.learning_rate=0\.1"):
        roll.resume("runs/run", ["training.learning_rate=0.1"])
    roll.resume("runs/run", ["training.num_steps=2", "cluster.address=127.0.0.1:6379"])  # as a job that is run again
    assert files_of(Path("runs/run")) == before


def test_resume_of_a_run_stopped_in_its_last_evaluation_goes_on(project: Path) -> None:
    roll.train(config())
    summary = json.loads(Path("runs/run/summary.json").read_text())
    assert summary["ending"]["kind"] == "finished"
    Path("runs/run/summary.json").write_text(
        json.dumps(summary | {"ending": {"kind": "interrupted", "message": "SIGINT"}})
    )
    roll.resume("runs/run")
    assert json.loads(Path("runs/run/summary.json").read_text())["ending"]["kind"] == "finished"


def test_resume_without_a_checkpoint_keeps_what_was_recorded(project: Path) -> None:
    roll.train(config())
    run = Path("runs/run")
    lose_checkpoints(run)
    recorded = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="finished at step 2, but it has no checkpoint"):
        roll.resume(run)
    assert (run / "metrics.jsonl").read_bytes() == recorded

    (run / "summary.json").unlink()  # as of a run that was killed
    roll.resume(run)
    assert (run / "before-restart-1" / "metrics.jsonl").read_bytes() == recorded
    assert steps_of(run) == [1, 2]

    lose_checkpoints(run)
    roll.resume(run, ["training.num_steps=3"])
    assert steps_of(run / "before-restart-2") == [1, 2] and steps_of(run) == [1, 2, 3]


def test_resume_works_from_another_directory(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roll.train(config())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    roll.resume(project / "runs" / "run", ["training.num_steps=3"])
    assert steps_of(project / "runs" / "run") == [1, 2, 3]
    assert Path.cwd() == tmp_path / "elsewhere" and not list(Path.cwd().iterdir())


def test_resume_works_from_another_directory_where_output_dir_is_absolute(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll.train(config(output_dir=str(tmp_path / "output")))
    monkeypatch.chdir(tmp_path)
    roll.resume("output/run", ["training.num_steps=3"])
    assert steps_of(tmp_path / "output" / "run") == [1, 2, 3]


def test_resume_of_a_project_that_was_moved_uses_its_new_place(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll.train(config())
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    roll.resume(moved / "runs" / "run", ["training.num_steps=3"])
    assert steps_of(moved / "runs" / "run") == [1, 2, 3]


def test_resume_notices_changed_held_out_rows(project: Path) -> None:
    roll.train(config())
    rows = project / "rows" / "held_out.jsonl"
    rows.write_text(rows.read_text().replace("ab", "aa"))
    with pytest.raises(CheckpointError, match="the held-out rows of 'file' changed since the checkpoint"):
        roll.resume("runs/run", ["training.num_steps=3"])
    assert steps_of(Path("runs/run")) == [1, 2]


def test_resume_of_a_checkpoint_without_digests_compares_nothing(project: Path) -> None:
    roll.train(config())
    (state,) = Path("runs/run/checkpoints").glob("*/state.json")
    saved = json.loads(state.read_text())
    assert saved.pop("unchanging")
    state.write_text(json.dumps(saved))
    rows = project / "rows" / "held_out.jsonl"
    rows.write_text(rows.read_text().replace("ab", "aa"))
    roll.resume("runs/run", ["training.num_steps=3"])
    assert steps_of(Path("runs/run")) == [1, 2, 3]


def test_resume_applies_a_hand_edited_configuration_and_dates_it(project: Path) -> None:
    roll.train(config())
    path = Path("runs/run/config.yaml")
    path.write_text(path.read_text().replace("num_steps: 2", "num_steps: 3  # one more"))
    roll.resume("runs/run")
    assert steps_of(Path("runs/run")) == [1, 2, 3]
    (entry,) = read_history(Path("runs/run"))
    assert entry.fields == {
        "from_step": 3,
        "overrides": ["training.num_steps=3"],
        "changed": {"training.num_steps": {"from": 2, "to": 3}},
    }
    roll.resume("runs/run", ["training.num_steps=4"])
    assert [entry.overrides for entry in read_history(Path("runs/run"))][1:] == [["training.num_steps=4"]]


@pytest.mark.parametrize(("before", "after"), [("seed: 0", "seed: 1"), ("path: model", "path: other")])
def test_resume_refuses_a_hand_edit_that_makes_another_run(project: Path, before: str, after: str) -> None:
    roll.train(config())
    path = Path("runs/run/config.yaml")
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=r"cannot change to .* when it is resumed.*restore it in config\.yaml"):
        roll.resume("runs/run")


def test_resume_takes_a_reformatted_configuration_for_the_same(project: Path, caplog: Any) -> None:
    roll.train(config())
    path = Path("runs/run/config.yaml")
    path.write_text("# mine\n" + json.dumps(yaml.safe_load(path.read_text()), indent=1))
    roll.resume("runs/run", ["training.num_steps=3"])
    (entry,) = read_history(Path("runs/run"))
    assert list(entry.changed) == ["training.num_steps"]


def test_resume_compares_the_code_of_rewards_and_of_what_they_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rewards", "helper"):
        Path(f"{name}.py").write_text("import helper\n" if name != "helper" else "")
    data = [
        {"source": "arithmetic", "reward": {"type": "python", "function": "rewards.py:score"}},
        {"source": "arithmetic", "domain": "other", "reward": {"type": "math"}},
    ]
    loaded = load_config({**REWARDED, "data": data})
    assert list(compute_fingerprints(loaded, {"a": "1"})) == [
        "the held-out rows of 'a'",
        "the code of 'rewards.py:score'",
    ]
    before = compute_fingerprints(loaded, {})
    Path("helper.py").write_text("changed = 1\n")
    with pytest.raises(CheckpointError, match=r"the code of 'rewards\.py:score' changed since the checkpoint"):
        check_fingerprints(before, compute_fingerprints(loaded, {}))
    check_fingerprints({}, before)
    check_fingerprints({"the code of 'gone.py:score'": "1"}, before)


def test_resume_compares_the_source_of_a_reward_that_was_given(caplog: pytest.LogCaptureFixture) -> None:
    from roll.config.python_objects import load_with_python_objects

    def of(function: Any) -> dict[str, str]:
        rows = [{"prompt": "a", "answer": "b"}]
        loaded = load_with_python_objects(REWARDED, (), rows, None, function)
        return compute_fingerprints(loaded, {})

    def score(text: str, answer: str, metadata: Any) -> float:
        return float(text == answer)

    first = score

    def score(text: str, answer: str, metadata: Any) -> float:  # type: ignore[no-redef]
        return float(text != answer)

    assert of(first) == of(first) != of(score)
    assert list(of(first)) == ["the code of the reward 'score'"]
    logging.getLogger(__name__).debug("%s", of(eval))  # without a source
