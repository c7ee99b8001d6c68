"""A restarted server continues: each accepted request is applied once, and results do not change."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import ADAM, ApiFailure, Client, client, datum, decode_outputs, read_sequences, serving

from roll.errors import ConfigError
from roll.serving import states
from roll.serving.failures import RequestFailure
from roll.serving.journal import Journal, Record
from roll.serving.submissions import Result, Submission

pytestmark = pytest.mark.integration

TOKENS = list(range(10, 30))


def simple(seed: int = 0) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(TOKENS))
    return datum(TOKENS, targets, weights=np.ones(len(TOKENS)))


def request(number: int, body: bytes = b"{}") -> Submission:
    return Submission(path="optim_step", body=body, request_id=f"id-{number}")


def test_serving_journal_truncates_an_incomplete_record(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    journal = Journal(file)
    journal.add_request("alice", request(1, b"\x00\n\xff"))
    journal.add_outcome("id-1", Result(body=b"a\nb", content_type="x/y"))
    journal.add_outcome("id-2", RequestFailure("no.", "server", was_skipped=True))
    with pytest.raises(ConfigError, match="is in use by another server"):
        Journal(file)
    journal.close()
    journal.add_request("alice", request(9))  # a server that stops records nothing more
    whole = file.read_bytes()
    size = len(whole)
    # The ends of the three records, from the format: a line of JSON, the content, a line break.
    ends, start = [], 0
    for content in (3, 3, 0):
        start = whole.index(b"\n", start) + 1 + content + 1
        ends.append(start)
    assert ends[-1] == size
    for cut in range(0, size + 1, 7):
        file.write_bytes(whole[:cut])
        journal = Journal(file)
        complete = sum(end <= cut for end in ends)
        assert len(journal.records) == complete and file.stat().st_size == ([0, *ends])[complete]
        journal.add_request("bob", request(3))
        journal.close()
        reopened = Journal(file)
        assert [each.owner for each in reopened.records if each.kind == "request"][-1] == "bob"
        reopened.close()
    file.write_bytes(whole)
    journal = Journal(file)
    first, second, third = journal.records
    assert (first.owner, first.path, first.content) == ("alice", "optim_step", b"\x00\n\xff")
    assert second.outcome == Result(body=b"a\nb", content_type="x/y")
    failure = third.outcome
    assert isinstance(failure, RequestFailure) and failure.was_skipped and failure.category == "server"
    journal.compact(lambda record: record.request_id == "id-2")
    journal.add_request("alice", request(4))
    journal.close()
    reopened = Journal(file)
    assert [each.request_id for each in reopened.records] == ["id-2", "id-4"]
    reopened.close()


def test_serving_journal_ends_at_a_corrupt_record(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    good = Record(kind="request", request_id="a", content=b"body", owner="alice", path="x").encode()
    for bad in (good.replace(b"body", b"bodz"), b"{}\n\n", b"[1]\n", b'{"size": "x", "crc": 0}\n', b"\xff\xfe\n"):
        file.write_bytes(good + bad + good)
        journal = Journal(file)
        assert len(journal.records) == 1 and file.stat().st_size == len(good)
        journal.close()


class Killed:
    """A copy of a server's directory at a moment, as a kill -9 at that moment leaves it."""

    def __init__(self, directory: Path, target: Path) -> None:
        shutil.copytree(directory, target)
        self.directory = target

    @asynccontextmanager
    async def restart(self, model: Path, one: Client, **changes: Any) -> AsyncIterator[Client]:
        """A new server, and a client that continues to use the IDs of `one`."""
        async with serving(model, self.directory, **changes) as server, client(server) as other:
            other.session_id, other.seq = one.session_id, dict(one.seq)
            yield other


async def train(one: Client, model: str, first: int, count: int = 3) -> list[float]:
    losses = []
    for number in range(first, first + count):
        losses.append((await one.forward_backward(model, [simple(number)]))[0])
        await one.step(model)
    return losses


@pytest.mark.parametrize("steps_per_state", [1, 2, 100])
async def test_serving_recovery_at_any_moment_gives_the_same_results(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_state: int
) -> None:
    monkeypatch.setattr(states, "STEPS_PER_STATE", steps_per_state)
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        model = await one.create_model()
        before = await train(one, model, 0)
        sampler = await one.snapshot(model, 0)
        saved = await one.save(model, "mine")
        first = read_sequences(await one.sample(sampler, 0, TOKENS, 2, params={"seed": None}))
        half, _ = await one.forward_backward(model, [simple(7)])  # a gradient without an update
        last = one.seq[model]
        early = await one.submit(model, [simple(8)], seq=last + 2)  # waits for a request that is on its way
        killed = Killed(tmp_path / "a", tmp_path / "b")
        await one.step(model, seq=last + 1)
        expected = decode_outputs(await one.result(early))[0]
        one.seq[model] = last + 2
        after = await train(one, model, 10)
    async with killed.restart(tiny_model, one) as two:
        assert await two.submit(model, [simple(8)], seq=last + 2) == early  # sent again: the same promise
        await two.step(model, seq=last + 1)
        assert decode_outputs(await two.result(early))[0] == expected
        two.seq[model] = last + 2
        assert await train(two, model, 10) == after
        assert read_sequences(await two.sample(sampler, 1, TOKENS, 2, params={"seed": 3}))
        with pytest.raises(ApiFailure, match="exists already"):
            await two.save(model, "mine")
        assert (await two.send("weights_info", {"tinker_path": saved}))["lora_rank"] == 4
    assert len(before) == 3 and half > 0 and first


async def test_serving_recovery_returns_known_results_and_runs_pending_requests(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "roll.serving.startup")
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        model = await one.create_model(seed=None)  # the seed is the server's choice
        promise = await one.submit(model, [simple()])
        answered = await one.result(promise)
        saving = {"model_id": model, "seq_id": one.next_seq(model), "sampling_session_seq_id": 0}
        snapshot = await one.send("save_weights_for_sampler", saving)
        body = {
            "sampling_session_id": (await one.result(snapshot))["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            "sampling_params": {"max_tokens": 60},  # without a seed
        }
        sampled = await one.send("asample", body)
        tokens = await one.result(sampled)
        bad = await one.submit(model, [datum([999], [5], weights=[1.0])])
        with pytest.raises(ApiFailure, match="token 999"):
            await one.result(bad)
    # What the journal has without the outcomes is computed again, and is the same.
    journal = tmp_path / "a" / "journal"
    for keeps_outcomes in (True, False):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        killed = Killed(tmp_path / "a", tmp_path / "b")
        if not keeps_outcomes:
            opened = Journal(killed.directory / "journal")
            # that of the snapshot was known before the request for samples could be sent
            opened.compact(lambda each: each.kind == "request" or each.request_id == snapshot["request_id"])
            opened.close()
        async with killed.restart(tiny_model, one) as two:
            assert "Restoring the sessions of an earlier server (6 requests in its journal)" in caplog.text
            assert await two.result(promise) == answered
            assert await two.result(sampled) == tokens
            assert await two.send("asample", body) == sampled
            with pytest.raises(ApiFailure, match="token 999"):
                await two.result(bad)
            with pytest.raises(ApiFailure, match="optim_step was rejected"):  # its gradient is discarded still
                await two.step(model)
            await two.forward_backward(model, [simple()])
            await two.step(model)
    assert journal.stat().st_size > 0


async def test_serving_recovery_does_not_run_skipped_requests(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path / "a", gap_timeout_s=0.05) as server, client(server) as one:
        model = await one.create_model()
        with pytest.raises(ApiFailure, match="did not arrive"):
            await one.result(await one.submit(model, [simple(1)], seq=2))
        with pytest.raises(ApiFailure, match="arrived after"):
            await one.result(await one.submit(model, [simple(5)], seq=1))
        with pytest.raises(ApiFailure, match="optim_step was rejected"):
            await one.step(model, seq=3)
        await one.forward_backward(model, [simple(2)], seq=4)
        killed = Killed(tmp_path / "a", tmp_path / "b")
        await one.step(model, seq=5)
        expected, _ = await one.forward_backward(model, [simple(1)], seq=6)
    async with killed.restart(tiny_model, one, gap_timeout_s=60) as two:
        await two.step(model, seq=5)
        assert (await two.forward_backward(model, [simple(1)], seq=6))[0] == expected


async def test_serving_recovery_does_not_wait_for_rejected_requests(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        model = await one.create_model()
        with pytest.raises(ApiFailure, match="400"):
            await one.step(model, seq=2, beta1=1.0)
        waiting = await one.submit(model, [simple()], seq=3)
        service = server.service
        service.promises._promises.clear()  # as if the results had expired
        service.journal.compact(lambda record: record.request_id in service._list_needed())
        killed = Killed(tmp_path / "a", tmp_path / "b")
    async with killed.restart(tiny_model, one) as two:
        await two.forward_backward(model, [simple()], seq=1)
        assert isinstance(await two.result(waiting), bytes)


async def test_serving_recovery_does_not_repeat_server_failures(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        model, group = await one.create_model(), server.service.trainer._group
        with monkeypatch.context() as patch:

            async def fail(*_: Any) -> Any:
                raise RuntimeError("no memory is left")

            patch.setattr(group, "forward_backward", fail)
            with pytest.raises(ApiFailure, match="no memory is left") as failure:
                await one.forward_backward(model, [simple(1)])
        assert failure.value.content["category"] == "server"
        with pytest.raises(ApiFailure, match=r"optim_step was rejected .* no memory is left"):
            await one.step(model)
        await train(one, model, 2, 1)
        killed = Killed(tmp_path / "a", tmp_path / "b")
        expected = await train(one, model, 3, 2)
    async with killed.restart(tiny_model, one) as two:
        two.seq[model] = 4
        assert await train(two, model, 3, 2) == expected


async def test_serving_recovery_finds_unconfirmed_checkpoints(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        model = await one.create_model()
        promise = await one.send("save_weights", {"model_id": model, "seq_id": one.next_seq(model), "path": "mine"})
        saved = (await one.result(promise))["path"]
        fresh = {"session_id": one.session_id, "path": saved, "optimizer": True, "model_seq_id": 5}
        loaded = (await one.result(await one.send("load_weights", fresh)))["model_id"]
    opened = Journal(tmp_path / "a" / "journal")
    opened.compact(lambda record: record.kind == "request")
    opened.close()
    shutil.rmtree(tmp_path / "a" / loaded)  # the model's state was not written
    async with Killed(tmp_path / "a", tmp_path / "b").restart(tiny_model, one) as two:
        assert (await two.result(promise))["path"] == saved
        assert (await two.forward_backward(loaded, [simple()]))[0] > 0


@pytest.mark.parametrize("compacts", [True, False])
async def test_serving_recovery_does_not_restore_ended_sessions(
    tiny_model: Path, tmp_path: Path, compacts: bool
) -> None:
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one, client(server) as other:
        model, kept = await one.create_model(), await other.create_model()
        await train(one, model, 0, 1)
        sampler = await one.snapshot(model, 0)
        await one.send(f"sessions/{one.session_id}/finish", {})
        await other.snapshot(kept, 0)
        if compacts:
            server.service.journal.compact(lambda record: record.request_id in server.service._list_needed())
    killed = Killed(tmp_path / "a", tmp_path / "b")
    hidden = killed.directory / model / "sampler_weights" / ".snapshot-9"  # left by a kill while the session ended
    hidden.mkdir(parents=True)
    async with killed.restart(tiny_model, one) as two:
        for path, body in {
            "get_info": {"model_id": model},
            "session_heartbeat": {"session_id": one.session_id},
        }.items():
            with pytest.raises(ApiFailure, match="404"):
                await two.send(path, body)
        with pytest.raises(ApiFailure, match="404"):
            await two.sample(sampler, 0, TOKENS)
        assert not hidden.exists()
        assert (await two.send("get_info", {"model_id": kept}))["lora_rank"] == 4
        assert list((killed.directory / kept / "sampler_weights").glob(".snapshot-*"))


async def test_serving_clients_continue_after_the_server_restarts(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path, poll_s=60.0) as server, client(server) as one:
        model = await one.create_model()
        promise = await one.submit(model, [simple()], seq=2)  # waits for request 1
        poll = asyncio.ensure_future(one.send("retrieve_future", promise))
        while not server.service.promises._promises[promise["request_id"]].done._waiters:  # until the poll is held
            await asyncio.sleep(0)
        await server.service.close()
        assert (await poll)["type"] == "try_again"
        with pytest.raises(ApiFailure, match="503"):
            await one.send("optim_step", {"model_id": model, "seq_id": 1, "adam_params": ADAM})
    assert os.path.getsize(tmp_path / "journal") > 0


async def test_serving_idle_models_are_offloaded_and_reloaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path / "a", idle_timeout_s=1e-9) as server, client(server) as one:
        store, group = server.service.models, server.service.trainer._group
        deleted: list[str] = []
        original = group.call

        async def call(name: str, *arguments: Any) -> Any:
            if name == "delete_adapter":
                deleted.append(arguments[0])
            return await original(name, *arguments)

        monkeypatch.setattr(group, "call", call)
        model, busy, straight = [await one.create_model(number) for number in range(3)]
        for each in (model, straight):
            await train(one, each, 0, 2)
        await one.forward_backward(busy, [simple(3)])  # a gradient without an update
        await server.service.clean_up()
        while len(deleted) < 2 or any(each.order._idle_work is not None for each in store):
            await asyncio.sleep(0)
        assert sorted(deleted) == sorted([model, straight])
        losses = await train(one, model, 2, 2)
        saved = await one.save(straight, "mine")  # read from disk, too
        assert (await one.send("weights_info", {"tinker_path": saved}))["lora_rank"] == 4
        await one.step(busy)
    async with serving(tiny_model, tmp_path / "c") as server, client(server) as one:
        model = await one.create_model(0)
        await train(one, model, 0, 2)
        assert await train(one, model, 2, 2) == losses  # as if it had stayed
