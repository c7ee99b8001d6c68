"""The hf engine generates from audio and video as the thinker in transformers computes them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from worlds.omni_models import OMNI_MODELS, OmniWorld, write_omni_model

from roll.errors import DataError
from roll.inference import EngineSpec, build_engine
from roll.types import GenerationRequest, MediaSpan, SamplingParams

# The third video has fractional positions in Qwen3-Omni.
PROMPTS = ("{audio 0} and {video 2}, what", "{audio 1}{video 0}", "{image 0} {audio 2}", "nothing", "{video 2}")


@pytest.fixture(scope="module", name="worlds")
def _worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OmniWorld]:
    directory = tmp_path_factory.mktemp("omni")
    return {
        name: OmniWorld.create(write_omni_model(directory / name, name), directory / f"{name} media")
        for name in OMNI_MODELS
    }


def spec(world: OmniWorld, **settings: Any) -> EngineSpec:
    return EngineSpec(
        engine_id="e",
        kind="hf",
        model_path=str(world.model),
        dtype="float32",
        max_context=250,
        media_dir=world.store.directory,
        **settings,
    )


def ask(number: int, tokens: np.ndarray, media: tuple[MediaSpan, ...]) -> GenerationRequest:
    sampling = SamplingParams(max_new_tokens=5, seed=number)
    return GenerationRequest(request_id=str(number), token_ids=tokens, media=media, sampling=sampling)


@pytest.mark.parametrize("name", OMNI_MODELS)
async def test_hf_engine_omni_log_probs_are_those_of_transformers(worlds: dict[str, OmniWorld], name: str) -> None:
    world = worlds[name]
    prompts = [world.prompt(text) for text in PROMPTS]
    tokens, media = prompts[-1]
    prompts.append((tokens[: media[0].end], media))  # ends with a feature
    # Equal tokens with other frames must not share their prefill.
    tokens, media = world.prompt("{video 0}, what")
    prompts += [(tokens, media), (tokens, (dataclasses.replace(media[0], digest=world.digests["video"][2]),))]
    asked = [ask(number, *prompts[number % len(prompts)]) for number in range(2 * len(prompts))]
    engine = build_engine(spec(world))
    await engine.start()
    try:
        answers = await asyncio.gather(*map(engine.generate, asked))
        whole = [np.concatenate([a.token_ids, b.token_ids]) for a, b in zip(asked, answers, strict=True)]
        scored = await engine.logprobs(whole, [request.media for request in asked])
    finally:
        await engine.close()
    reference = transformers.AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    banned = list(world.processor.replaced_tokens)
    assert len(banned) == 7  # three kinds of feature tokens, and those around media
    for request, answer, sequence, own in zip(asked, answers, whole, scored, strict=True):
        with torch.no_grad():
            expected = world.reference_logprobs(reference, sequence, request.media).numpy()
            drawn = world.reference_logprobs(reference, sequence, request.media, banned=banned).numpy()
        np.testing.assert_allclose(answer.logprobs, drawn[len(request.token_ids) - 1 :], atol=1e-5)
        np.testing.assert_allclose(own[1:], expected, atol=1e-5)
        assert not np.isin(answer.token_ids, banned).any()


async def test_hf_engine_omni_a_cut_span_is_reported(worlds: dict[str, OmniWorld]) -> None:
    world = worlds["qwen2.5-omni"]
    tokens, media = world.prompt("{audio 0}, what")
    cut = (dataclasses.replace(media[0], end=media[0].end - 1),)
    engine = build_engine(spec(world))
    await engine.start()
    with pytest.raises(
        DataError, match=r"request 0 has audio .* rendered for another model, or was cut inside the audio"
    ):
        await engine.generate(ask(0, tokens, cut))
    await engine.close()
