"""Engines that die are restarted and samples continue; several engines share the requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_client import ApiFailure, Client, client, datum, gather, read_sequences, serving

from roll.errors import EngineDiedError, InfraError
from roll.inference import hf
from roll.inference.hf import HFEngine
from roll.rollout import engine_connection
from roll.rollout.hang_detector import HangDetector
from roll.serving.sampling import MAX_DEATHS
from roll.serving.server import TrainingServer

PROMPT = list(range(10, 22))


def learn(seed: int) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(PROMPT))
    return datum(PROMPT, targets, weights=np.ones(len(PROMPT)))


async def open_samplers(one: Client) -> list[str]:
    """Sampling sessions for two different snapshots and the base model."""
    model, sessions = await one.create_model(), []
    for number in range(2):
        await one.forward_backward(model, [learn(number)])
        await one.step(model, learning_rate=0.05)
        sessions.append(await one.snapshot(model, number))
    body = {"session_id": one.session_id, "sampling_session_seq_id": 99, "base_model": "tiny"}
    return [*sessions, (await one.send("create_sampling_session", body))["sampling_session_id"]]


async def sample_all(one: Client, sessions: Sequence[str], seq: int, **more: Any) -> list[list[list[int]]]:
    """The tokens of two sequences of each session, sampled at once."""
    replies = await gather(*(one.sample(session, seq, PROMPT, 2, **more) for session in sessions))
    return [[tokens for tokens, *_ in read_sequences(reply)] for reply in replies]


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, died: list[str], after: Callable[[HFEngine], int | None]) -> Iterator[None]:
    """Engines fail in the step `after(engine)` of each start, if that is a number."""
    start = HFEngine.start

    async def start_and_count(engine: HFEngine) -> None:
        await start(engine)
        decoder, limit, count = engine._decoder, after(engine), 0
        assert decoder is not None
        step = decoder.step

        def count_step() -> Any:
            nonlocal count
            count += 1
            if count == limit:
                died.append(engine.engine_id)
                raise RuntimeError("the device is gone")
            return step()

        decoder.step = count_step  # type: ignore[method-assign]

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "start", start_and_count)
        yield


async def test_serving_engines_restart_after_death_and_samples_continue(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        sessions = await open_samplers(one)
        expected = await sample_all(one, sessions, 0)
    with dying(monkeypatch, died, lambda engine: None if died else 5):
        async with serving(tiny_model, tmp_path / "b") as server, client(server) as one:
            sessions = await open_samplers(one)
            assert await sample_all(one, sessions, 0) == expected
            assert died == ["sampler-0"] and server.service._sampler._engines.members[0].num_restarts == 1
            assert await sample_all(one, sessions, 1) == expected
            model = await one.create_model(7)  # training does not notice
            assert (await one.forward_backward(model, [learn(0)]))[0] > 0
    assert len({str(each) for each in expected}) == 3


async def test_serving_engines_that_die_repeatedly_fail_the_request(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []
    with dying(monkeypatch, died, lambda engine: 2 if len(died) < MAX_DEATHS else None):
        async with serving(tiny_model, tmp_path) as server, client(server) as one:
            *_, base = await open_samplers(one)
            with pytest.raises(
                ApiFailure, match=r"died 3 times during this request.*Send the request again"
            ) as failure:
                await one.sample(base, 0, PROMPT)
            assert failure.value.content["category"] == "server" and len(died) == MAX_DEATHS
            assert read_sequences(await one.sample(base, 1, PROMPT))


async def test_serving_engines_that_cannot_restart_fail_requests_until_they_can(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[str] = []
    with dying(monkeypatch, died, lambda engine: None if died else 2):
        async with serving(tiny_model, tmp_path) as server, client(server) as one:
            sessions = await open_samplers(one)
            with monkeypatch.context() as patch:

                async def fail(engine: HFEngine) -> None:
                    raise InfraError("no memory is left")

                patch.setattr(HFEngine, "start", fail)
                with pytest.raises(ApiFailure, match=r"could not be restarted: .*no memory is left") as failure:
                    await one.sample(sessions[0], 0, PROMPT)
                assert failure.value.content["category"] == "server"
            assert read_sequences(await one.sample(sessions[0], 1, PROMPT))


async def test_serving_engines_keep_complete_sequences_after_death(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        *_, base = await open_samplers(one)
        expected = read_sequences(await one.sample(base, 0, PROMPT, 4))
        generate, asked = HFEngine.generate, []

        async def generate_or_die(engine: HFEngine, request: Any) -> Any:
            asked.append(request.sampling.seed)
            if len(asked) == 4:  # the last one, when the others are complete
                while len(done) < 3:
                    await asyncio.sleep(0)
                raise EngineDiedError(engine.engine_id, "it was killed")
            found = await generate(engine, request)
            done.append(request.sampling.seed)
            return found

        done: list[int] = []
        monkeypatch.setattr(HFEngine, "generate", generate_or_die)
        assert read_sequences(await one.sample(base, 1, PROMPT, 4))[0][0] == expected[0][0]
        assert len(asked) == 5 and asked[4] == asked[3] and len(set(asked)) == 4


@pytest.mark.parametrize("hanging", ["step", "logprobs", "update_weights"])
async def test_serving_engines_that_hang_are_restarted(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(engine_connection, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(hf, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(
        HangDetector, "observe", lambda detector, now, steps, *, delay_s: entered.is_set() and not go_on.is_set()
    )
    async with serving(tiny_model, tmp_path) as server, client(server) as one:
        session, other, base = await open_samplers(one)
        expected = read_sequences(await one.sample(session, 0, PROMPT, prompt_logprobs=True))[0][0]
        (engine,) = server.service._sampler._engines.members
        replace, decoder = engine._group.replace, engine._running.engine._decoder  # type: ignore[attr-defined]

        def hang(*_: Any) -> Any:
            entered.set()
            assert go_on.wait(60)
            raise RuntimeError("the engine was closed meanwhile")

        async def replace_and_go_on(engine_id: str) -> Any:
            fresh = await replace(engine_id)
            go_on.set()
            return fresh

        engine._group.replace = replace_and_go_on  # type: ignore[method-assign]
        setattr(decoder, hanging, hang)
        found = await gather(
            *(one.sample(each, 1, PROMPT, prompt_logprobs=True) for each in (session, other, base, session))
        )
        assert read_sequences(found[0])[0][0] == expected and engine.num_restarts == 1
        assert read_sequences(await one.sample(session, 2, PROMPT))[0][0] == expected


async def test_serving_engines_share_requests_and_load_every_snapshot(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model, tmp_path / "a") as server, client(server) as one:
        expected = await sample_all(one, await open_samplers(one), 0)
    used: list[str] = []
    generate = HFEngine.generate

    async def note(engine: HFEngine, request: Any) -> Any:
        used.append(engine.engine_id)
        return await generate(engine, request)

    monkeypatch.setattr(HFEngine, "generate", note)
    async with serving(tiny_model, tmp_path / "b", num_engines=2) as server, client(server) as one:
        sessions = await open_samplers(one)
        for number in range(4):
            assert await sample_all(one, sessions, number) == expected
        assert set(used) == {"sampler-0", "sampler-1"} and min(used.count(each) for each in set(used)) >= 4 * 2
        await kill_one(server, used, one, sessions, expected)


async def kill_one(
    server: TrainingServer, used: list[str], one: Client, sessions: Sequence[str], expected: list[list[list[int]]]
) -> None:
    """While one engine restarts, the requests go to the other one."""
    first, second = server.service._sampler._engines.members
    restarted = asyncio.Event()
    replace = first._group.replace

    async def wait_and_replace(engine_id: str) -> Any:
        await restarted.wait()
        return await replace(engine_id)

    first._group.replace = wait_and_replace  # type: ignore[method-assign]
    first._running.engine._mark_dead("it was killed")  # type: ignore[attr-defined]
    used.clear()
    assert await sample_all(one, sessions, 10) == expected
    assert used.count("sampler-1") == 6 and not first.is_ready and second.is_ready
    restarted.set()
    while not first.is_ready:
        await asyncio.sleep(0)
    used.clear()
    assert await sample_all(one, sessions, 11) == expected
    assert set(used) == {"sampler-0", "sampler-1"}
