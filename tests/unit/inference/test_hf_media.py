"""The hf engine generates from images as transformers computes them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from worlds.vision_models import VISION_MODELS, VisionWorld, write_vision_model

from roll.errors import DataError, EngineDiedError, UnsupportedError
from roll.inference import EngineSpec, build_engine
from roll.types import Generation, GenerationRequest, SamplingParams

FAST = ("smolvlm", "qwen3-vl", "gemma3")
REST = (pytest.mark.matrix, pytest.mark.slow)
FAMILIES = [pytest.param(name, marks=() if name in FAST else REST) for name in VISION_MODELS]
PROMPTS = (("{} and {}, what", (0, 1)), ("{} and {}, what", (1, 0)), ("no image", ()), ("last: {}", (2,)))


def spec(world: VisionWorld, **settings: Any) -> EngineSpec:
    return EngineSpec(
        engine_id="e",
        kind="hf",
        model_path=str(world.model),
        dtype="float32",
        max_context=200,
        media_dir=world.store.directory,
        **settings,
    )


def requests(world: VisionWorld, repeats: int = 2) -> list[GenerationRequest]:
    made = []
    for number, (text, images) in enumerate(PROMPTS * repeats):
        tokens, media = world.prompt(text, *images)
        sampling = SamplingParams(max_new_tokens=6, seed=number)
        made.append(GenerationRequest(request_id=str(number), token_ids=tokens, media=media, sampling=sampling))
    return made


@pytest.mark.parametrize("name", FAMILIES)
async def test_hf_engine_images_log_probs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", name), tmp_path / "media")
    engine = build_engine(spec(world))
    await engine.start()
    try:
        asked = requests(world)
        answers = await asyncio.gather(*map(engine.generate, asked))
        whole = [np.concatenate([a.token_ids, b.token_ids]) for a, b in zip(asked, answers, strict=True)]
        scored = await engine.logprobs(whole, [request.media for request in asked])
    finally:
        await engine.close()
    reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    for request, answer, tokens, own in zip(asked, answers, whole, scored, strict=True):
        with torch.no_grad():
            expected = world.reference_logprobs(reference, tokens, request.media).numpy()
            drawn = world.reference_logprobs(reference, tokens, request.media, sampled=True).numpy()
        np.testing.assert_allclose(answer.logprobs, drawn[len(request.token_ids) - 1 :], atol=1e-5)
        np.testing.assert_allclose(own[1:], expected, atol=1e-5)


async def test_hf_engine_images_a_prompt_may_end_with_one(tmp_path: Path) -> None:
    """Its last feature is the first input of decoding, and in Gemma 3 earlier tokens of the image attend to it."""
    for name in ("llava", "qwen2.5-vl"):
        world = VisionWorld.create(write_vision_model(tmp_path / name, name), tmp_path / f"{name} media")
        tokens, media = world.prompt("last: {}", 3)
        tokens = tokens[: media[0].end]
        engine = build_engine(spec(world))
        await engine.start()
        sampling = SamplingParams(max_new_tokens=4, seed=0)
        asked = [GenerationRequest(request_id=i, token_ids=tokens, media=media, sampling=sampling) for i in "ab"]
        answers = await asyncio.gather(*map(engine.generate, asked))
        await engine.close()
        reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
        for answer in answers:
            whole = np.concatenate([tokens, answer.token_ids])
            with torch.no_grad():
                expected = world.reference_logprobs(reference, whole, media, sampled=True).numpy()
            np.testing.assert_allclose(answer.logprobs, expected[len(tokens) - 1 :], atol=1e-5)


async def test_hf_engine_images_bad_requests_end_alone(tmp_path: Path) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", "llava"), tmp_path / "media")
    engine = build_engine(spec(world))
    await engine.start()
    good = requests(world, 1)[0]
    gone = dataclasses.replace(good.media[0], digest="ab" * 32)
    lost = dataclasses.replace(good, request_id="lost", media=(gone, *good.media[1:]))
    results = await asyncio.gather(engine.generate(lost), engine.generate(good), return_exceptions=True)
    assert isinstance(results[0], DataError)
    assert "not in the run's media store" in str(results[0])
    assert len(results[1].token_ids) == 6
    await engine.close()


async def test_hf_engine_images_are_refused_without_a_store(tmp_path: Path) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", "llava"), tmp_path / "media")
    engine = build_engine(dataclasses.replace(spec(world), media_dir=None))
    await engine.start()
    with pytest.raises(UnsupportedError, match="supports text only, but a sequence has a part of kind 'image'"):
        await engine.generate(requests(world, 1)[0])
    await engine.close()


def hold_checks(engine: Any, monkeypatch: pytest.MonkeyPatch, *held: str) -> tuple[threading.Event, threading.Event]:
    """Let the engine read the media of some requests only after the second event; the first is set when one waits."""
    begun, may_end = threading.Event(), threading.Event()
    check = engine._decoder.check_media

    def wait(request: GenerationRequest) -> None:
        if request.request_id in held:
            begun.set()
            may_end.wait(30)
        check(request)

    monkeypatch.setattr(engine._decoder, "check_media", wait)
    return begun, may_end


async def test_hf_engine_images_a_request_whose_images_are_read_when_the_engine_dies_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", "llava"), tmp_path / "media")
    engine: Any = build_engine(spec(world))
    await engine.start()
    begun, may_end = hold_checks(engine, monkeypatch, "0")
    task = asyncio.create_task(engine.generate(requests(world, 1)[0]))
    await asyncio.to_thread(begun.wait, 30)
    engine._mark_dead("a test ends it")
    may_end.set()
    with pytest.raises(EngineDiedError, match="a test ends it"):
        await asyncio.wait_for(task, 30)
    await engine.close()


async def test_hf_engine_images_waves_do_not_depend_on_the_time_to_read_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", "llava"), tmp_path / "media")
    engine: Any = build_engine(spec(world))
    await engine.start()
    admitted: list[list[str]] = []
    admit = engine._decoder.admit

    def record(rows: Any) -> None:
        admitted.append([row.request.request_id for row in rows])
        admit(rows)

    monkeypatch.setattr(engine._decoder, "admit", record)
    begun, may_end = hold_checks(engine, monkeypatch, "0")
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests(world, 1)]
    await asyncio.to_thread(begun.wait, 30)
    for _ in range(50):  # the other requests have arrived
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*tasks)
    assert admitted == [["0", "1", "2", "3"]]
    await engine.close()


async def test_hf_engine_images_a_file_that_is_deleted_during_the_run_fails_only_its_request(tmp_path: Path) -> None:
    world = VisionWorld.create(write_vision_model(tmp_path / "model", "llava"), tmp_path / "media")
    engine: Any = build_engine(spec(world))
    await engine.start()
    good, other = requests(world, 1)[0], requests(world, 1)[3]
    await engine.generate(good)
    inputs = engine._decoder._media.inputs
    inputs._cache.clear()  # as if other images had taken its place
    inputs.store._cache.clear()
    for span in good.media:
        world.store._get_path(span.digest).unlink()
    again = dataclasses.replace(good, request_id="again")
    results = await asyncio.gather(engine.generate(again), engine.generate(other), return_exceptions=True)
    assert isinstance(results[0], DataError) and "not in the run's media store" in str(results[0])
    assert isinstance(results[1], Generation) and len(results[1].token_ids) == 6
    await engine.close()
