"""Checkpoints are whole or absent, pruned after their successor exists, and read back as written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from roll.algorithms.normalization import Moments
from roll.config.operations import CheckpointConfig
from roll.errors import CheckpointError, CheckpointVersionError, RunDirectoryError, UserError
from roll.pipelines.checkpoint_files import find_checkpoint, list_checkpoints, read_checkpoint
from roll.pipelines.checkpointer import Checkpointer
from roll.pipelines.learning.state import LearningState
from roll.pipelines.state import RunState
from roll.rollout import DataLedger
from roll.tracking import RunDirectory
from roll.types import DrawOutcome, Prompt, PromptDraw
from roll.version import __version__


class FileTrainer:
    """Writes one file where a trainer writes its state; may fail, as a full disk does."""

    def __init__(self, state: str = "weights") -> None:
        self.state = state
        self.fails: Exception | None = None

    async def save(self, path: Path) -> None:
        path.mkdir()
        if self.fails:
            raise self.fails
        (path / "weights").write_text(self.state)

    async def export(self, path: Path) -> None:
        if self.fails:
            raise self.fails
        path.mkdir()
        (path / "config.json").write_text("{}")


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def ledger_of(count: int) -> DataLedger:
    ledger = DataLedger()
    for i in range(count):
        prompt = Prompt(uid=f"d/{i}", domain="d", messages=())
        ledger.record_draws([PromptDraw(draw_id=i, prompt=prompt, token_ids=np.zeros(1, np.int32))], step=1)
        ledger.record_outcome(i, DrawOutcome.TRAINED, step=1)
    return ledger


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {"name": "run"})


async def test_checkpoint_a_checkpoint_reads_back_as_written(run: RunDirectory) -> None:
    state = LearningState(
        step=4,
        policy_version=3,
        data={"cursor": 7},
        num_draws=3,
        pending=[[2, "d", 5]],
        scores={"0": 0.25},
        moments={"d": Moments(2, 0.5, 0.25)},
        evaluated_at=4,
        verifiers={"d": {"code": {"d/1": [[0, 0.25], [2, 0.1]]}}},
    )
    path = await Checkpointer(run, CheckpointConfig(), FileTrainer()).save(state, ledger_of(5))  # two since then
    saved = read_checkpoint(path, LearningState)
    assert saved.state == state
    core = {"step": 4, "policy_version": 3, "data": {"cursor": 7}, "num_draws": 3, "scores": {"0": 0.25}}
    assert read_checkpoint(path, RunState).state == RunState(**core, evaluated_at=4)  # type: ignore[arg-type]
    assert list(saved.ledger) == list(ledger_of(3))
    assert (saved.trainer_path / "weights").read_text() == "weights"
    assert path == run.get_checkpoint_path(4)


async def test_checkpoint_critics_are_saved_beside_the_trainer_and_found_by_number(run: RunDirectory) -> None:
    critics = [FileTrainer("first"), FileTrainer("second")]
    path = await Checkpointer(run, CheckpointConfig(), FileTrainer(), critics).save(RunState(step=1), ledger_of(0))
    saved = read_checkpoint(path, RunState)
    assert [(saved.get_critic_path(i) / "weights").read_text() for i in (0, 1)] == ["first", "second"]
    assert saved.get_critic_path(1) == path / "critic-1"
    with pytest.raises(CheckpointError, match=r"has no 'critic-2'.*fewer critics"):
        saved.get_critic_path(2)


async def test_checkpoint_a_critic_that_cannot_be_saved_leaves_the_previous_checkpoint_whole(run: RunDirectory) -> None:
    critics = [FileTrainer(), FileTrainer()]
    checkpointer = Checkpointer(run, CheckpointConfig(keep_last=1), FileTrainer(), critics)
    await checkpointer.save(RunState(step=1), ledger_of(1))
    critics[1].fails = OSError("disk full")
    with pytest.raises(CheckpointError, match=r"could not be written: disk full\..*'step-000001', is complete"):
        await checkpointer.save(RunState(step=2), ledger_of(2))
    found = find_checkpoint(run.checkpoints_dir)
    assert found is not None and read_checkpoint(found, RunState).state.step == 1
    assert read_checkpoint(found, RunState).get_critic_path(1).is_dir()


async def test_checkpoint_the_newest_are_kept_and_the_best_where_asked(run: RunDirectory) -> None:
    checkpointer = Checkpointer(run, CheckpointConfig(keep_last=2, keep_best=True), FileTrainer())
    for step in range(1, 6):
        await checkpointer.save(RunState(step=step, best_step=min(step, 2)), ledger_of(0))
    assert list(list_checkpoints(run.checkpoints_dir)) == [2, 4, 5]


async def test_checkpoint_a_failure_while_saving_leaves_the_previous_one_whole(run: RunDirectory) -> None:
    trainer = FileTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(), trainer)
    await checkpointer.save(RunState(step=1), ledger_of(1))
    trainer.fails = OSError("disk full")
    with pytest.raises(CheckpointError, match=r"could not be written: disk full\..*'step-000001', is complete"):
        await checkpointer.save(RunState(step=2), ledger_of(2))
    found = find_checkpoint(run.checkpoints_dir)
    assert found is not None and read_checkpoint(found, RunState).state.step == 1
    assert [p.name for p in run.checkpoints_dir.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        chained(RuntimeError("unexpected pos 64 vs 0"), OSError(errno.ENOSPC, "No space left on device")),
    ],
)
async def test_checkpoint_a_full_disk_is_one_message_and_its_remains_are_removed(
    run: RunDirectory, failure: Exception
) -> None:
    trainer = FileTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(), trainer)
    trainer.fails = failure
    with pytest.raises(
        RunDirectoryError, match=r"could not be written: No space left.*no earlier checkpoint.*Free space"
    ):
        await checkpointer.save(RunState(step=2), ledger_of(2))
    assert list(run.checkpoints_dir.iterdir()) == []
    trainer.fails = None
    await checkpointer.save(RunState(step=2), ledger_of(2))  # somebody made room


def test_checkpoint_due_once_the_last_one_is_long_ago(run: RunDirectory) -> None:
    now = 0.0
    checkpointer = Checkpointer(run, CheckpointConfig(), FileTrainer(), clock=lambda: now)
    state = RunState(step=7)
    assert not checkpointer.is_due(state)
    now = 601.0
    assert checkpointer.is_due(state)
    off = Checkpointer(run, CheckpointConfig(every_s=None), FileTrainer(), clock=lambda: now)
    now = 1e9
    assert not off.is_due(state)


def test_checkpoint_states_of_the_format_before_are_read() -> None:
    for kind in (RunState, LearningState):
        old = kind(step=3).to_json()
        scores = old.pop("scores")
        old |= {"format": 4, "accuracies": scores | {"3": 0.5}, "rewards": [0.5]}
        assert kind.from_json(old) == kind(step=3, scores={"3": 0.5})


async def test_checkpoint_saving_the_same_step_twice_writes_once(run: RunDirectory) -> None:
    checkpointer = Checkpointer(run, CheckpointConfig(), FileTrainer())
    path = await checkpointer.save(RunState(step=1), ledger_of(0))
    before = (path / "state.json").stat().st_mtime_ns
    assert await checkpointer.save(RunState(step=1), ledger_of(0)) == path
    assert (path / "state.json").stat().st_mtime_ns == before


def test_checkpoint_due_by_number_and_by_being_the_best(run: RunDirectory) -> None:
    by_number = Checkpointer(run, CheckpointConfig(every_num_steps=3), FileTrainer())
    assert [by_number.is_due(RunState(step=s)) for s in (1, 3, 4, 6)] == [False, True, False, True]
    best = Checkpointer(run, CheckpointConfig(keep_best=True), FileTrainer())
    assert [best.is_due(RunState(step=s, best_step=2)) for s in (1, 2, 3)] == [False, True, False]
    assert not best.is_due(RunState(step=0, best_step=0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 99, "roll": "7.1.0"}, r"format 99 \(written by ROLL 7\.1\.0\).* Upgrade: .*roll-rl>=7\.1\.0"),
        ({"format": 99, "roll": None}, r"format 99 \(written by another version of ROLL\).* --upgrade\.$"),
        (
            {"format": 2, "roll": "0.0.3"},
            r"supports formats 4 to 5.*roll-rl==0\.0\.3'.*model=CHECKPOINT/model",
        ),
        ({"format": None}, "format None"),
        ({"num_draws": None}, "missing 'num_draws'"),
    ],
)
async def test_checkpoint_a_checkpoint_of_another_version_is_refused_with_the_way_out(
    run: RunDirectory, changes, says
) -> None:
    path = await Checkpointer(run, CheckpointConfig(), FileTrainer()).save(RunState(step=1), ledger_of(0))
    state = json.loads((path / "state.json").read_text()) | changes
    state = {name: value for name, value in state.items() if value is not None}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointVersionError, match=says) as caught:
        read_checkpoint(path, RunState)
    assert str(caught.value).startswith(f"checkpoint '{path}' cannot be read: it")
    assert isinstance(caught.value, CheckpointError | UserError), "exit code 2, without a traceback"


async def test_checkpoint_what_is_corrupted_is_refused_with_the_checkpoint_before_it(run: RunDirectory) -> None:
    class Corrupted(FileTrainer):
        async def load(self, path: Path) -> None:
            raise CheckpointError(f"'{path}' is corrupted.")

    checkpointer = Checkpointer(run, CheckpointConfig(keep_last=2), FileTrainer())
    paths = [await checkpointer.save(RunState(step=step), ledger_of(0)) for step in (9, 10)]
    ways = ["There is no older checkpoint: if files are corrupted, begin a new run."]
    ways += [f"If files are corrupted, move '{paths[1]}' away: `roll resume` then continues from 'step-000009'."]
    for path, way in zip(paths, ways, strict=True):
        with pytest.raises(CheckpointError) as caught:
            await read_checkpoint(path, RunState).restore(Corrupted())
        assert str(caught.value) == f"'{path / 'trainer'}' is corrupted. {way}"
        (path / "state.json").write_text("[")
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(path, RunState)
        assert str(caught.value).endswith(way)


def test_checkpoint_a_state_says_which_version_wrote_it() -> None:
    state = RunState(step=3).to_json()
    assert (state["format"], state["roll"]) == (5, __version__)
    assert RunState.from_json(state | {"roll": "0.0.9"}) == RunState(step=3)


async def test_checkpoint_a_checkpoint_with_a_missing_file_is_refused(run: RunDirectory) -> None:
    path = await Checkpointer(run, CheckpointConfig(), FileTrainer()).save(RunState(step=1), ledger_of(0))
    (path / "ledger.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"ledger\.jsonl"):
        read_checkpoint(path, RunState)


class BackgroundTrainer(FileTrainer):
    """Writes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Path] = []
        self.saved = ""

    async def save(self, path: Path, *, background: bool = False) -> None:
        assert background
        path.mkdir()
        self.begun.append(path)
        self.saved = self.state  # as it is now

    def write(self) -> None:
        (self.begun.pop() / "weights").write_text(self.saved)

    async def is_save_written(self, *, wait: bool) -> bool:
        if self.fails:
            self.begun.clear()
            failure, self.fails = self.fails, None
            raise failure
        if wait and self.begun:
            self.write()
        return not self.begun


async def test_checkpoint_what_is_written_in_the_background_has_its_name_once_it_is_whole(run: RunDirectory) -> None:
    trainer, told = BackgroundTrainer(), []
    config = CheckpointConfig(asynchronous=True)
    checkpointer = Checkpointer(run, config, trainer, on_saved=lambda step, path: told.append(step))
    ledger, state = ledger_of(3), RunState(step=1, num_draws=2)
    await checkpointer.save(state, ledger)
    state.step, state.num_draws, trainer.state = 2, 3, "later"  # training goes on
    await checkpointer.publish_pending(wait=False)
    assert find_checkpoint(run.checkpoints_dir) is None
    assert told == []
    trainer.write()
    await checkpointer.publish_pending(wait=False)
    saved = read_checkpoint(run.get_checkpoint_path(1), RunState)
    assert (saved.state.step, list(saved.ledger)) == (1, list(ledger_of(2)))
    assert (saved.trainer_path / "weights").read_text() == "weights"
    assert told == [1]


async def test_checkpoint_the_next_save_waits_for_the_one_before(run: RunDirectory) -> None:
    trainer = BackgroundTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(asynchronous=True, keep_last=2), trainer)
    await checkpointer.save(RunState(step=1), ledger_of(0))
    await checkpointer.save(RunState(step=2), ledger_of(0))
    assert list(list_checkpoints(run.checkpoints_dir)) == [1]
    await checkpointer.publish_pending(wait=True)
    assert list(list_checkpoints(run.checkpoints_dir)) == [1, 2]


async def test_checkpoint_a_failure_in_the_background_is_said_at_the_next_boundary(run: RunDirectory) -> None:
    trainer = BackgroundTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(asynchronous=True), trainer)
    await checkpointer.save(RunState(step=1), ledger_of(0))
    await checkpointer.publish_pending(wait=True)
    await checkpointer.save(RunState(step=2), ledger_of(0))
    trainer.fails = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunDirectoryError, match=r"step-000002' could not be written: No space left.*'step-000001', is"):
        await checkpointer.publish_pending(wait=False)
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-000001"]
    await checkpointer.publish_pending(wait=True)  # it was said
    await checkpointer.save(RunState(step=3), ledger_of(0))
    await checkpointer.publish_pending(wait=True)
    assert list(list_checkpoints(run.checkpoints_dir)) == [3]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_checkpoint_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """After a power cut, a file has what it was synced with, and a directory the names that it was synced with."""
    final, fsync, rename = run.get_checkpoint_path(1), os.fsync, os.rename
    synced: dict[int, int] = {}
    """By inode, when it was last changed before its sync."""
    named: list[bool] = []

    def note(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_mtime_ns

    def check(source: Path, target: Path) -> None:
        if target == final:
            below = [path.stat() for path in (source, *source.rglob("*"))]
            assert len(below) == 7
            assert all(synced[status.st_ino] == status.st_mtime_ns for status in below)
            named.append(True)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    trainer = BackgroundTrainer() if asynchronous else FileTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(asynchronous=asynchronous), trainer)
    await checkpointer.save(RunState(step=1), ledger_of(1))
    await checkpointer.publish_pending(wait=True)
    assert named
    assert run.checkpoints_dir.stat().st_ino in synced


class WritingTrainer(BackgroundTrainer):
    """Writes, as a thread does, until it is waited for; then it may find that it could not."""

    breaks: Exception | None = None
    export_breaks: Exception | None = None

    async def is_save_written(self, *, wait: bool) -> bool:
        if wait and self.begun:
            assert self.begun[0].is_dir(), "removed while it was written"
            failure, self.breaks = self.breaks, None
            if failure:
                self.begun.clear()
                raise failure
            self.write()
        return not self.begun

    async def export(self, path: Path) -> None:
        failure, self.export_breaks = self.export_breaks, None
        if failure:
            raise failure
        await super().export(path)


async def test_checkpoint_what_failed_is_removed_once_no_trainer_writes_any_more(run: RunDirectory) -> None:
    policy, critic = WritingTrainer(), WritingTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(asynchronous=True), policy, [critic])
    broken = OSError(errno.EIO, "Input/output error")
    for step, trainer, what in ((1, policy, "breaks"), (2, critic, "breaks"), (3, policy, "export_breaks")):
        setattr(trainer, what, broken)
        critic.breaks = critic.breaks or OSError(errno.EIO, "of the same checkpoint: said with the other's")
        with pytest.raises(RunDirectoryError, match=f"step-{step:06d}' could not be written: Input/output error"):
            await checkpointer.save(RunState(step=step), ledger_of(0))
            await checkpointer.publish_pending(wait=True)
        assert not policy.begun
        assert not critic.begun
        assert not list(run.checkpoints_dir.glob(".*"))
        await checkpointer.save(RunState(step=step), ledger_of(0))
        await checkpointer.publish_pending(wait=True)
        assert find_checkpoint(run.checkpoints_dir) == run.get_checkpoint_path(step)


async def test_checkpoint_a_checkpoint_that_failed_unheard_keeps_none_from_being_written(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = WritingTrainer()
    checkpointer = Checkpointer(run, CheckpointConfig(asynchronous=True), trainer)
    await checkpointer.save(RunState(step=1), ledger_of(0))
    trainer.breaks = OSError(errno.EIO, "Input/output error")
    await checkpointer.save(RunState(step=2), ledger_of(0))
    await checkpointer.publish_pending(wait=True)
    assert list(list_checkpoints(run.checkpoints_dir)) == [2]
    assert "step-000001' could not be written: Input/output error" in caplog.text


async def test_checkpoint_an_old_checkpoint_that_cannot_be_removed_costs_a_warning(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    checkpointer = Checkpointer(run, CheckpointConfig(keep_last=1), FileTrainer())
    await checkpointer.save(RunState(step=1), ledger_of(0))
    with monkeypatch.context() as patch:
        patch.setattr("roll.pipelines.checkpointer.shutil.rmtree", refuse)
        await checkpointer.save(RunState(step=2), ledger_of(0))
    assert "step-000001' could not be removed" in caplog.text
    assert list(list_checkpoints(run.checkpoints_dir)) == [2]
    await checkpointer.save(RunState(step=3), ledger_of(0))
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-000003"]
