"""The settings that a run trained with, step by step."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.config.document import parse
from roll.config.history import (
    CONFIG_FILE,
    HISTORY_FILE,
    build_transition_history,
    dump_entries,
    extend_history,
    find_differences,
    find_first_recorded_config,
    read_history,
    restore_config,
)
from roll.config.load import dump_config, load_config, load_run_config
from roll.errors import RunDirectoryError
from roll.pipelines.recording.configuration import load_replay_config
from roll.tracking import atomic
from roll.tracking.run_directory import RunDirectory

BASE = {
    "name": "run",
    "model": "tiny",
    "data": [{"source": "arithmetic", "reward": "math"}],
    "training": {"num_steps": 400},
}


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run", dump_config(load_config(BASE | {"output_dir": str(tmp_path)}))) as run:
        yield run


def resume(run: RunDirectory, step: int, *overrides: str):
    """What `roll resume` does with its overrides, from a checkpoint of `step`."""
    config = load_run_config(run.path, overrides)
    run.record_resume(dump_config(config), step, overrides)
    return config


def test_config_history_overrides_of_a_resume_are_kept_with_the_step_from_which_they_hold(run):
    resume(run, 400, "training.num_steps=1000")
    assert resume(run, 700).training.num_steps == 1000, "a plain resume keeps them"
    assert load_config(run.path / CONFIG_FILE).training.num_steps == 1000
    assert [entry.fields for entry in read_history(run.path)] == [
        {
            "from_step": 401,
            "overrides": ["training.num_steps=1000"],
            "changed": {"training.num_steps": {"from": 400, "to": 1000}},
        }
    ]


def test_config_history_every_step_has_the_settings_it_was_trained_with(run):
    resume(run, 10, "training.learning_rate=2e-5")
    resume(run, 20, "training.learning_rate=3e-5", "training.num_steps=500")
    current, history = dump_config(load_config(run.path / CONFIG_FILE)), read_history(run.path)
    rates = {
        step: restore_config(current, history, step)["training"]["learning_rate"] for step in (1, 10, 11, 20, 21, 99)
    }
    usual = load_config(BASE).training.learning_rate
    assert rates == {1: usual, 10: usual, 11: 2e-5, 20: 2e-5, 21: 3e-5, 99: 3e-5}


def test_config_history_a_resume_from_an_earlier_checkpoint_dates_the_settings_anew(run):
    resume(run, 50, "training.learning_rate=2e-5")
    resume(run, 30, "training.num_steps=500")  # the checkpoint of step 50 was removed: 31 to 50 are trained again
    assert [entry.fields for entry in read_history(run.path)] == [
        {
            "from_step": 31,
            "overrides": ["training.learning_rate=2e-5", "training.num_steps=500"],
            "changed": {
                "training.learning_rate": {"from": load_config(BASE).training.learning_rate, "to": 2e-5},
                "training.num_steps": {"from": 400, "to": 500},
            },
        }
    ]


def test_config_history_a_run_that_goes_on_as_it_was_has_no_history(run):
    before = (run.path / CONFIG_FILE).read_bytes()
    resume(run, 5)
    resume(run, 6, "training.num_steps=400")
    assert (run.path / CONFIG_FILE).read_bytes() == before
    assert not (run.path / HISTORY_FILE).exists()


def test_config_history_a_change_that_is_taken_back_before_it_was_trained_leaves_no_trace(run):
    resume(run, 5, "training.num_steps=9")
    resume(run, 5, "training.num_steps=400")
    assert read_history(run.path) == []


def test_config_history_two_resumes_before_the_next_step_make_one_entry_with_what_both_said(run):
    resume(run, 5, "training.learning_rate=2e-5")
    resume(run, 5, "training.num_steps=9")
    (entry,) = read_history(run.path)
    assert (entry.from_step, entry.overrides) == (6, ["training.learning_rate=2e-5", "training.num_steps=9"])
    assert sorted(entry.changed) == ["training.learning_rate", "training.num_steps"]


def test_config_history_a_run_that_recorded_from_its_first_step_on_is_replayed_from_there(run):
    resume(run, 0, "tracking.record_rollouts=true", "rollout.max_new_tokens=17")
    resume(run, 8, "rollout.max_new_tokens=99")
    history = read_history(run.path)
    (run.path / HISTORY_FILE).write_text(dump_entries(history[1:]))  # as if it had been so from the start
    assert find_first_recorded_config(run.path)["rollout"]["max_new_tokens"] == 17


def test_config_history_a_replay_begins_with_the_settings_that_were_recorded_first(run, tmp_path):
    resume(run, 5, "tracking.record_rollouts=true", "rollout.max_new_tokens=17")
    resume(run, 8, "rollout.max_new_tokens=99")
    assert find_first_recorded_config(run.path)["rollout"]["max_new_tokens"] == 17
    assert load_replay_config(run.path).rollout.max_new_tokens == 17


@pytest.mark.parametrize("text", ["- from_step: one\n", "- {from_step: 1, changed: {name: x}}\n", "- 3\n"])
def test_config_history_a_history_that_was_corrupted_is_named(run, text):
    (run.path / HISTORY_FILE).write_text(text)
    with pytest.raises(RunDirectoryError, match=r"config_history\.yaml' is not a valid history of settings \(a change"):
        resume(run, 5)


_VALUES = st.integers(0, 3) | st.sampled_from(["a", None]) | st.lists(st.integers(0, 2), max_size=2)
_INNER = st.dictionaries(st.sampled_from(["a", "c.d"]), _VALUES, max_size=2)
_TREES = st.dictionaries(
    st.sampled_from(["a", "b", "e"]),
    _VALUES | _INNER | st.dictionaries(st.sampled_from(["a", "b"]), _INNER),
    max_size=3,
)


@given(
    st.lists(st.tuples(st.integers(0, 6), _TREES, st.sampled_from(["whole", "no config", "no end"])), min_size=1),
)
@example([(0, {"a": 1}, "whole"), (3, {"a": 2}, "whole"), (2, {"a": 1}, "no config"), (2, {"a": 2}, "whole")])
def test_config_history_undoing_changes_gives_what_was_trained(resumes):
    """Against a plain list of what each step was trained with; a resume from a checkpoint forgets the later steps.

    Some resumes are killed while they write their files, before any step.
    """
    current, history = resumes[0][1], []
    trained = dict.fromkeys(range(1, 4), current)
    for step, tree, end in resumes[1:]:
        step = min(step, max(trained, default=0))
        trained = {s: t for s, t in trained.items() if s <= step}
        whole = extend_history(current, history, step, tree, ["x=1"])
        history = whole if end == "whole" else build_transition_history(history, whole, step)
        current = current if end == "no config" else tree
        if end == "whole":
            trained |= dict.fromkeys(range(step + 1, step + 3), tree)
        assert [restore_config(current, history, s) for s in trained] == list(trained.values())
    assert parse(dump_entries(history), HISTORY_FILE)[0] == [entry.fields for entry in history]


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_config_history_a_resume_that_is_killed_between_its_files_leaves_a_true_history(run, monkeypatch, written):
    """Steps from 51 on had another learning rate; a resume from step 30 that takes it back is killed."""
    usual = load_config(BASE).training.learning_rate
    resume(run, 50, "training.learning_rate=2e-5")
    write, left = atomic.write_text, iter(range(written))

    def dies(path, text):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(path, text)

    monkeypatch.setattr(atomic, "write_text", dies)
    with contextlib.suppress(KeyboardInterrupt):
        resume(run, 30, f"training.learning_rate={usual}")
    monkeypatch.undo()
    goes_on_with = resume(run, 30).training.learning_rate
    current, history = dump_config(load_config(run.path / CONFIG_FILE)), read_history(run.path)
    rates = [restore_config(current, history, step)["training"]["learning_rate"] for step in (30, 31)]
    assert rates == [usual, goes_on_with]
    assert goes_on_with == (2e-5 if written < 2 else usual)


def test_config_history_differences_are_dotted_leaves():
    before, after = {"a": {"b": 1, "c": [1]}, "x.y": 1}, {"a": {"b": 2, "c": [1]}, "x.y": 1}
    assert list(find_differences({"k": before["a"]}, {"k": after["a"]}, "")) == [("k.b", 1, 2)]
    assert list(find_differences(before, after, "s")) == [("s", before, after)]
