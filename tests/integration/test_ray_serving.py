"""`roll serve run.yaml` on Ray: two trainer ranks and two engines, each in a process of its own, that may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1] / "unit" / "serving"))
from api_client import KEY, Client, client, datum, read_sequences, serving

from roll.errors import WorkerDiedError
from roll.serving import ServeSettings
from roll.serving.run_settings import read_run_settings
from roll.serving.startup import open_server

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = list(range(10, 22))


def write_config(tmp_path: Path, model: Path) -> Path:
    content: dict[str, Any] = {
        "pipeline": "rlvr",
        "name": "run",
        "model": {"path": str(model), "dtype": "float32", "lora": {"rank": 8}},
        "data": [{"source": "arithmetic", "reward": [{"type": "math"}]}],
        "rollout": {"max_new_tokens": 8},
        "training": {"num_steps": 1, "num_threads": 1, "learning_rate": 1e-3},
        "inference": {"engine": "hf", "max_context": 96},
        "cluster": {
            "type": "ray",
            "devices_per_node": 4,
            "device_mapping": {"actor_train": [0, 1], "actor_infer": [2, 3]},
        },
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def learn(seed: int) -> Any:
    targets = np.random.default_rng(seed).integers(4, 260, len(PROMPT))
    return datum(PROMPT, targets, weights=np.ones(len(PROMPT)))


async def train(one: Client, number: int, seed: int) -> tuple[str, list[float], list[str]]:
    """Train a model in two chunks per update; the losses, and a sampling session after each update."""
    model = await one.create_model(number, seed=seed)
    losses, sessions = [], []
    for step in range(2):
        for chunk in range(2):
            data = [learn(10 * step + 3 * chunk + index + seed) for index in range(3)]
            losses.append((await one.forward_backward(model, data))[0])
        await one.step(model, learning_rate=0.05)
        sessions.append(await one.snapshot(model, 10 * number + step))
    return model, losses, sessions


async def sample(one: Client, session: str, seq: int) -> list[list[int]]:
    return [tokens for tokens, *_ in read_sequences(await one.sample(session, seq, PROMPT, 2, prompt_logprobs=True))]


async def test_serving_on_ray_equals_one_process_and_survives_kills(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path / "local") as server, client(server) as one:
        expected = [await train(one, number, number) for number in range(2)]
        sampled = [await sample(one, session, 0) for _, _, sessions in expected for session in sessions]
    chosen = read_run_settings(write_config(tmp_path, tiny_model))
    settings = ServeSettings(name="tiny", directory=tmp_path / "ray", port=0, keys={KEY: "alice"}, **chosen)
    async with open_server(settings) as server, client(server) as one:
        assert server.service.trainer._group.num_ranks == 2
        found = await asyncio.gather(*(train(one, number, number) for number in range(2)))
        for (_, losses, _), (_, known, _) in zip(found, expected, strict=True):
            assert losses == pytest.approx(known, rel=1e-5)
        sessions = [session for _, _, own in found for session in own]
        assert await asyncio.gather(*(sample(one, session, 0) for session in sessions)) == sampled

        engines = server.service._sampler._engines.members
        os.kill(engines[0]._running.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert await asyncio.gather(*(sample(one, session, 1) for session in sessions)) == sampled
        assert [each.num_restarts for each in engines] in ([1, 0], [0, 0])  # or it is being started again

        # A rank that dies ends the server; the request has no outcome, and a later server runs it.
        model, losses, _ = found[0]
        promise = await one.submit(model, [learn(7)])
        before, _ = await one.forward_backward(model, [learn(8)], forward_only=True)
        pids = await server.service.trainer._group._call_all_ranks(
            lambda: [
                actor.__ray_call__.remote(lambda _: os.getpid()) for actor in server.service.trainer._group._actors
            ]
        )
        os.kill(pids[1], signal.SIGKILL)
        waiting = await one.submit(model, [learn(9)])
        with pytest.raises(WorkerDiedError, match="its process ended"):
            await server.service.trainer.died
        seq = dict(one.seq)
    async with open_server(settings) as server, client(server) as two:
        two.session_id, two.seq = one.session_id, seq
        for each in (promise, waiting):
            assert isinstance(await two.result(each), bytes)
        await two.step(model)
        assert (await two.forward_backward(model, [learn(8)], forward_only=True))[0] != before
