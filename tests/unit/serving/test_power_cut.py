"""Answers follow the sync of their records to disk, so a power cut at any moment loses no acknowledged request."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import ApiFailure, client, datum, gather, read_sequences, serving

from roll.serving import journal as journal_module
from roll.serving.journal import Journal
from roll.serving.submissions import Submission

TOKENS = list(range(10, 30))


def simple(seed: int = 0) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(TOKENS))
    return datum(TOKENS, targets, weights=np.ones(len(TOKENS)))


class Disk:
    """A replacement of `os.fdatasync` that can be held back, and notes what the disk has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.entered = threading.Event(), threading.Event()
        self.go_on.set()
        self.num_calls = self.size = 0
        self.error: OSError | None = None
        monkeypatch.setattr(journal_module.os, "fdatasync", self.sync)

    def sync(self, file: int) -> None:
        self.num_calls += 1
        size = os.fstat(file).st_size  # later writes may be lost
        self.entered.set()
        self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        self.size = max(self.size, size)


async def test_serving_responses_wait_for_the_journal_sync(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        journal = server.service.journal
        model = await one.create_model()
        assert disk.size == journal.size
        disk.entered.clear()
        disk.go_on.clear()
        posts = [asyncio.ensure_future(one.submit(model, [simple(seq)], seq=seq)) for seq in range(1, 21)]
        while not disk.entered.is_set() or len(journal_paths(journal)) < 20:
            await asyncio.sleep(0)
        assert not any(each.done() for each in posts)
        before = disk.num_calls
        disk.go_on.set()
        promises = await gather(*posts)
        assert disk.num_calls - before <= 5  # one sync for many requests
        for promise in promises:  # a result is shown when the disk has it
            await one.result(promise)
            record = promise["request_id"].encode()
            assert (tmp_path / "journal").read_bytes()[: disk.size].count(b'"' + record + b'"') == 2


def journal_paths(journal: Journal) -> list[str]:
    return [each.request_id for each in journal._read() if each.path == "forward_backward"]


async def test_serving_power_cut_loses_no_acknowledged_request(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        losses = []
        for number in range(3):
            losses.append((await one.forward_backward(model, [simple(number)]))[0])
            await one.step(model)
        sampler = await one.snapshot(model, 0)
        tokens = read_sequences(await one.sample(sampler, 0, TOKENS))[0][0]
        promise = await one.submit(model, [simple(9)])
        disk.go_on.clear()  # the power is cut: what happens from here on is lost
        size, seq = disk.size, dict(one.seq)
        lost = asyncio.ensure_future(one.step(model))
        while b'"optim_step"' not in (tmp_path / "journal").read_bytes()[size:]:
            await asyncio.sleep(0)
        assert not lost.done()
        lost.cancel()
        disk.go_on.set()
    os.truncate(tmp_path / "journal", size)
    async with serving(tiny_model, tmp_path) as server, client(server) as two:
        two.session_id, two.seq = one.session_id, seq
        assert isinstance(await two.result(promise), bytes)
        assert read_sequences(await two.sample(sampler, 0, TOKENS))[0][0] == tokens
        await two.step(model)
        again = (await two.forward_backward(model, [simple(0)]))[0]
        assert np.isfinite(again) and again < losses[0]


async def test_serving_failed_sync_fails_all_later_responses(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        model = await one.create_model()
        disk.error = OSError(5, "Input/output error")
        with pytest.raises(ApiFailure, match=r"500.*Input/output error"):
            await one.submit(model, [simple()])
        disk.error = None  # a later sync would succeed, although the disk lacks the earlier record
        with pytest.raises(ApiFailure, match=r"500.*Input/output error"):
            await one.submit(model, [simple()], seq=2)
        assert await one.get("healthz") == {"status": "ok"}


async def test_serving_journal_syncs_records_added_during_compaction(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    await journal.sync()
    for number in range(3):
        journal.add_request("alice", Submission(path="x", body=b"{}", request_id=f"id-{number}"))
        waiting = asyncio.ensure_future(journal.sync())
        await asyncio.sleep(0)
        journal.compact(lambda record: True)
        await waiting
    assert journal._num_synced == journal._num_written > 0
    journal.close()
    await journal.sync()
    assert len(Journal(tmp_path / "journal").records) == 3
