"""A disk that is full: what fails is reported, nothing is half-applied, and the server continues when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import ApiFailure, client, datum, serving

from roll.serving import journal as journal_module
from roll.serving import startup, states
from roll.serving.journal import Journal
from roll.serving.submissions import Result, Submission

TOKENS = list(range(10, 30))
FULL = OSError(errno.ENOSPC, "No space left on device")


def simple(seed: int = 0) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(TOKENS))
    return datum(TOKENS, targets, weights=np.ones(len(TOKENS)))


class FullDisk:
    """A replacement of the journal's writes that fails after half of a record while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write = os.write
        monkeypatch.setattr(journal_module.os, "write", self.write)

    def write(self, file: int, content: Any) -> int:
        if self.is_full and len(content) > 1:
            return self._write(file, content[: len(content) // 2])
        if self.is_full:
            raise FULL
        return self._write(file, content)


async def test_serving_requests_are_refused_while_the_journal_cannot_be_written(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        size = server.service.journal.size
        disk.is_full = True
        step = {"model_id": model, "seq_id": 2, "adam_params": {}}
        base = {"session_id": one.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        for path, body in {
            "create_session": {},
            "create_sampling_session": base,
            "optim_step": step,
            f"sessions/{one.session_id}/finish": {},
        }.items():
            with pytest.raises(ApiFailure, match=r"500: .*No space left on device"):
                await one.send(path, body)
        with pytest.raises(ApiFailure, match=r"500: .*No space left on device"):
            await one.submit(model, [simple()], seq=1)
        assert server.service.journal.size == size
        disk.is_full = False
        before, _ = await one.forward_backward(model, [simple()], seq=1)  # the session has not ended
        await one.send("optim_step", step)
        after, _ = await one.forward_backward(model, [simple()], seq=3)
        assert after < before
    assert len(Journal(tmp_path / "journal").records) == 9  # a session, and four requests with their outcomes


async def test_serving_clean_up_continues_after_an_error(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "CLEAN_UP_S", 0.001)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        disk, finished = FullDisk(monkeypatch), asyncio.Event()
        disk.is_full = True
        finish, calls = server.service.finish_session, 0

        async def count(session: Any) -> None:
            nonlocal calls
            calls += 1
            disk.is_full = calls < 3
            await finish(session)
            finished.set()

        monkeypatch.setattr(server.service, "finish_session", count)
        server.service.sessions.find(one.session_id, "alice").last_seen = float("-inf")  # it has expired
        await asyncio.wait_for(finished.wait(), 30)
        assert calls == 3
        with pytest.raises(ApiFailure, match="410"):
            await one.send("session_heartbeat", {"session_id": one.session_id})


def test_serving_journal_is_unchanged_if_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(4):
        journal.add_request("alice", Submission(path="x", body=bytes(1000), request_id=f"id-{number}"))
    with monkeypatch.context() as patch:
        FullDisk(patch).is_full = True
        with pytest.raises(OSError, match="No space"):
            journal.compact(lambda record: True)
    assert [each.name for each in tmp_path.iterdir()] == ["journal"] and len(list(journal._read())) == 4
    assert journal.should_compact(2000) and not journal.should_compact(10_000)
    journal.compact(lambda record: record.request_id != "id-0")
    assert len(list(journal._read())) == 3
    assert not journal.should_compact(2000)  # all of it is needed
    journal.add_outcome("id-1", Result(body=bytes(4000)))
    assert journal.should_compact(2000)
    journal.close()
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


async def test_serving_state_is_stored_after_the_outcomes_that_it_includes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a server that continues after a power cut would not know the outcome, and not compute it again."""
    monkeypatch.setattr(states, "STEPS_PER_STATE", 1)
    synced = 0
    sync = os.fdatasync

    def note(file: int) -> None:
        nonlocal synced
        size = os.fstat(file).st_size
        sync(file)
        synced = max(synced, size)

    monkeypatch.setattr(journal_module.os, "fdatasync", note)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        checkpoints, found = server.service._checkpoints, []
        save = checkpoints.save

        def check(*args: Any, **options: Any) -> Any:
            unsynced = (tmp_path / "journal").read_bytes()[synced:]
            found.append((options["name"], unsynced.count(b'"kind": "outcome"')))
            return save(*args, **options)

        monkeypatch.setattr(checkpoints, "save", check)
        model = await one.create_model()
        promises = []
        for seq in (1, 3, 5):  # sent ahead, so that no answer is waited for in between
            promises.append(await one.submit(model, [simple(seq)], seq=seq))
            promises.append(await one.send("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": {}}))
        for promise in promises:
            await one.result(promise)
        await one.result(await one.send("save_weights", {"model_id": model, "seq_id": 7, "path": "mine"}))
    assert found == [*[(".state", 0)] * 3, ("mine", 0)]


async def test_serving_ended_session_frees_its_memory(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        session = server.service.sessions.find(one.session_id, "alice")
        sampler = await one.snapshot(await one.create_model(), 0)
        await one.sample(sampler, 0, TOKENS)
        assert session.samples and session.sampling and session.kept
        await one.send(f"sessions/{one.session_id}/finish", {})
        assert not (session.samples or session.sampling or session.kept or session.models._known)
