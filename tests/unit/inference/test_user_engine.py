"""Engines of the user's own that are wrong: each message names the engine and what to change."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from roll.errors import ConfigError, EngineDiedError, EngineError
from roll.inference.user_engine import UserEngine
from roll.protocols import InferenceEngine, SupportsReadback
from roll.types import Generation, GenerationRequest, SamplingParams

PROMPT = np.array([1, 2], np.int32)
REQUEST = GenerationRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=2))
MADE = Generation(
    request_id="r",
    token_ids=PROMPT,
    logprobs=np.zeros(2, np.float32),
    policy_versions=np.zeros(2, np.int32),
    finish_reason="length",
)


class Echo:
    """Answers everything with `answer`, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def start(self, *_: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    generate = logprobs = abort = pause = resume = update_weights = sleep = wake = close = start

    def load(self) -> Any:
        return self.answer


def own(answer: Any) -> UserEngine:
    return UserEngine("mine.py:Echo", "engine-0", lambda: Echo(answer))


def test_user_engine_is_an_engine_that_passes_on_what_it_is_told() -> None:
    engine = own(MADE)
    assert isinstance(engine, InferenceEngine) and isinstance(engine, SupportsReadback)
    assert asyncio.run(engine.generate(REQUEST)) is MADE
    assert asyncio.run(engine.applied_checksums()) is None


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: object(),
            "methods start, generate, logprobs, abort, pause, resume, update_weights, sleep, wake, load",
        ),
        (lambda: None, r"does not implement the methods .* of roll\.protocols\.InferenceEngine"),
        (lambda: 1 / 0, r"cannot be created with an EngineSpec \(.*test_user_engine.py:\d+\): ZeroDivisionError"),
    ],
)
def test_user_engine_that_cannot_be_built_is_refused_by_name(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"engine 'mine.py:Echo' .*{words}"):
        UserEngine("mine.py:Echo", "engine-0", build)


@pytest.mark.parametrize(
    ("answer", "call", "words"),
    [
        ("hello", lambda engine: engine.generate(REQUEST), "generate must return Generation, got str"),
        (
            dataclasses.replace(MADE, logprobs=np.zeros(1, np.float32)),
            lambda engine: engine.generate(REQUEST),
            r"arrays of equal length, got shapes \[\(2,\), \(1,\), \(2,\)\]",
        ),
        ([0.0], lambda engine: engine.logprobs([PROMPT]), r"a list of arrays with the sequences' lengths \[2\]"),
        (None, lambda engine: engine.update_weights(None), "update_weights must return WeightReceipt, got NoneType"),
        (KeyError("x"), lambda engine: engine.start(), r"start failed at .*test_user_engine.py:\d+: KeyError: 'x'"),
    ],
)
def test_user_engine_that_fails_is_named_with_the_method(
    answer: Any, call: Callable[[UserEngine], Coroutine[Any, Any, Any]], words: str
) -> None:
    with pytest.raises(EngineError, match=f"engine 'mine.py:Echo': .*{words}"):
        asyncio.run(call(own(answer)))


def test_user_engine_without_async_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "wake", lambda self: None)
    with pytest.raises(EngineError, match="wake must be a coroutine function: write `async def wake`"):
        asyncio.run(own(None).wake())


def test_user_engine_may_say_that_it_died() -> None:
    with pytest.raises(EngineDiedError):
        asyncio.run(own(EngineDiedError("engine-0", "its device is gone")).generate(REQUEST))
