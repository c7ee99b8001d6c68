"""The controller's end of an engine that is an actor; here, no process is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from roll.cluster import ray_engines
from roll.cluster.ray_engines import RayEngine
from roll.inference import EngineSpec
from roll.types import EngineLoad, EngineStepSpan


async def test_ray_engine_an_engine_whose_close_is_cancelled_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    actor = SimpleNamespace(call=SimpleNamespace(remote=lambda name: asyncio.sleep(60)))
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    monkeypatch.setattr(ray_engines.ray, "remote", lambda _: options)
    monkeypatch.setattr(ray_engines.ray, "kill", lambda actor, no_restart: ended.append(actor))
    engine = RayEngine(EngineSpec(engine_id="engine-0", kind="hf", model_path="", max_context=8), {})
    engine.pid = 1
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.close()
    assert ended == [actor]


async def test_ray_engine_an_engine_that_has_not_started_is_ended_without_asking_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    actor = SimpleNamespace()  # answers nothing, as one that loads its model
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    monkeypatch.setattr(ray_engines.ray, "remote", lambda _: options)
    monkeypatch.setattr(ray_engines.ray, "kill", lambda actor, no_restart: ended.append(actor))
    await RayEngine(EngineSpec(engine_id="engine-0", kind="hf", model_path="", max_context=8), {}).close()
    assert ended == [actor]


async def test_ray_engine_reports_no_steps_if_its_engine_does_not_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: SimpleNamespace()))
    monkeypatch.setattr(ray_engines.ray, "remote", lambda _: options)
    engine = RayEngine(EngineSpec(engine_id="engine-0", kind="hf", model_path="", max_context=8), {})
    assert engine.load().num_steps == 0  # an actor that never reports hangs
    engine._reported = EngineLoad(num_running=1, num_waiting=0, kv_used=0.0, capacity=1)
    assert engine.load().num_steps is None  # with 0, the engine would be replaced after 10 minutes of requests


async def test_ray_engine_returns_the_steps_that_came_with_its_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [
        EngineStepSpan(
            began_s=1.8e9 + second,
            duration_s=1.0,
            num_steps=4,
            num_decoding=2,
            num_started=0,
            num_prefilled=0,
            context_tokens=9.0,
        )
        for second in range(3)
    ]
    load = EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=4)
    answers = [("first", load, spans[:2]), ("second", load, []), ("third", load, spans[2:])]

    async def answer(value: Any) -> Any:
        return value

    actor = SimpleNamespace(
        generate=SimpleNamespace(remote=lambda _: answer(answers.pop(0))),
        load=SimpleNamespace(remote=lambda: answer(load)),
    )
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    monkeypatch.setattr(ray_engines.ray, "remote", lambda _: options)
    monkeypatch.setattr(ray_engines, "await_result", lambda reference, _: reference)
    engine = RayEngine(EngineSpec(engine_id="engine-0", kind="hf", model_path="", max_context=8), {})
    request: Any = None
    assert [await engine.generate(request) for _ in range(2)] == ["first", "second"]
    assert engine.take_steps() == spans[:2]
    assert not engine.take_steps()
    assert await engine.generate(request) == "third"
    assert engine.take_steps() == spans[2:]
