"""`roll serve --engine vllm`: sampling with several snapshots and the base model at once, against the trainer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serving"))
from api_client import Client, client, datum, read_sequences, serving

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TOKENS = list(range(10, 30))


async def train(one: Client, model: str, token: int) -> None:
    data = datum(TOKENS, [token] * len(TOKENS), weights=np.ones(len(TOKENS)))
    for _ in range(3):
        await one.forward_backward(model, [data])
        await one.step(model, learning_rate=0.02)


async def check(one: Client, model: str | None, session: str, number: int) -> float:
    """Sample, and compare the log-probs with those of the trainer; the largest difference."""
    reply = await one.sample(session, number, TOKENS, 2, params={"max_tokens": 6}, prompt_logprobs=True)
    rows = [(tokens, logprobs) for tokens, logprobs, _ in read_sequences(reply)]
    data: list[Any] = []
    for tokens, logprobs in rows:
        whole, skipped = TOKENS + tokens, np.zeros(len(TOKENS) - 1)
        known = np.concatenate([skipped, logprobs])
        data.append(datum(whole[:-1], whole[1:], logprobs=known, advantages=np.ones(len(known))))
    assert model is not None
    _, found = await one.forward_backward(model, data, "importance_sampling", forward_only=True)
    differences = [
        np.abs(mine[-len(tokens) :] - logprobs).max() for mine, (tokens, logprobs) in zip(found, rows, strict=True)
    ]
    prompt = np.frombuffer(reply.prompt_logprobs, "<f4")
    differences.append(np.abs(prompt[1:] - found[0][: len(TOKENS) - 1]).max())
    return float(max(differences))


async def test_serving_vllm_samples_from_snapshots_and_the_base_model_at_once(
    servable_model: Path, tmp_path: Path
) -> None:
    changes = {"engine": "vllm", "max_context": 64, "max_adapters": 2}
    async with serving(servable_model, tmp_path, **changes) as server, client(server) as one:
        base = await one.create_model(0)  # B is 0: the base model
        first, second = await one.create_model(1, rank=2), await one.create_model(2, rank=8)
        await train(one, first, 100)
        await train(one, second, 200)
        sessions = [(first, await one.snapshot(first, 1)), (second, await one.snapshot(second, 2))]
        body = {"session_id": one.session_id, "sampling_session_seq_id": 9, "base_model": "tiny"}
        sessions.append((base, (await one.send("create_sampling_session", body))["sampling_session_id"]))
        found = await asyncio.gather(
            *(check(one, model, session, number) for number in range(3) for model, session in sessions)
        )
        assert max(found) < 1e-4
        # a third snapshot replaces one of the two in the engine, and the first comes back afterwards
        await train(one, first, 50)
        assert await check(one, first, await one.snapshot(first, 3), 0) < 1e-4
        assert await check(one, second, sessions[1][1], 9) < 1e-4


async def test_serving_vllm_replaces_killed_processes_during_sampling(servable_model: Path, tmp_path: Path) -> None:
    changes = {"engine": "vllm", "max_context": 256, "max_adapters": 2}
    async with serving(servable_model, tmp_path, **changes) as server, client(server) as one:
        model = await one.create_model(0)
        sessions = []
        for number in range(2):
            await train(one, model, 100 + number)
            sessions.append(await one.snapshot(model, number))

        def sample(number: int) -> Any:
            params = {"max_tokens": 200, "stop": []}
            return asyncio.gather(*(one.sample(session, number, TOKENS, 2, params=params) for session in sessions))

        expected = await sample(0)
        (served,) = server.service._sampler._engines.members
        engine = served._running.engine
        asked = asyncio.ensure_future(sample(1))
        while engine.load().num_running < 4:
            await asyncio.sleep(0)
        for process in engine.processes:  # type: ignore[attr-defined]
            process.kill()
        for before, after in zip(expected, await asked, strict=True):
            for (tokens, logprobs, _), (again, same, _) in zip(
                read_sequences(before), read_sequences(after), strict=True
            ):
                assert len(tokens) == 200 and again == tokens
                np.testing.assert_allclose(same, logprobs, atol=1e-4)
        assert served.num_restarts == 1
        assert await check(one, model, sessions[1], 9) < 1e-4  # the new engine has the current weights
