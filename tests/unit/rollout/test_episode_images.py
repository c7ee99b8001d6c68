"""Episodes whose observations have images: contexts, requests and training samples agree on every image."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from worlds.episodes import MAX_NEW_TOKENS, Engine
from worlds.vision_models import VisionWorld, write_vision_model

from roll.data import ChatRenderer
from roll.data.media_text import MediaText
from roll.data.samples import build_samples
from roll.envs.episode_program import serve
from roll.envs.hosting import EnvHosts
from roll.envs.image_storage import ImageStorage
from roll.envs.registration import ENVS, EnvSpec
from roll.errors import DataError, InfraError, RollError
from roll.models import load_tokenizer
from roll.models.multimodal import MediaInputs
from roll.rollout.episode import play_episode
from roll.rollout.episode_start import EpisodePlan
from roll.types import (
    EnvironmentSettings,
    GenerationRequest,
    History,
    ImageData,
    IntArray,
    MediaSpan,
    Message,
    Prompt,
    PromptDraw,
    Rollout,
    SamplingParams,
    parse_content,
)

SCREEN = "gui:Click-v0-hard"
SMALL = {"width": 56, "height": 40, "rows": 4, "columns": 5, "max_turns": 4}


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> VisionWorld:
    directory = tmp_path_factory.mktemp("vision")
    return VisionWorld.create(write_vision_model(directory / "model", "smolvlm"), directory / "media")


@pytest.fixture(scope="module", name="inputs")
def _inputs(world: VisionWorld) -> MediaInputs:
    return MediaInputs(world.store, world.processor)


def run_episode(
    world: VisionWorld, inputs: MediaInputs, settings: EnvironmentSettings, **plan: Any
) -> tuple[Rollout, Engine]:
    renderer = ChatRenderer(load_tokenizer(world.model), MediaText(inputs))
    end = renderer.tokenize("<|im_end|>").tolist()
    engine = Engine([renderer.tokenize("click(1, 1)").tolist() + end], tuple(end))
    prompt = Prompt(
        uid="p",
        domain="d",
        messages=(Message(role="user", content="{prompt}"),),
        environment=settings,
        turns=4,
    )
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=1, stop_token_ids=tuple(end))
    draw = PromptDraw(draw_id=0, prompt=prompt, token_ids=np.zeros(0, np.int32))
    first = GenerationRequest(request_id="train-0.0", token_ids=draw.token_ids, sampling=sampling)
    hosts = EnvHosts(images=ImageStorage(inputs))
    done = play_episode(draw, 0, first, engine.generate, renderer, hosts=hosts, plan=EpisodePlan(**plan))
    return asyncio.run(done), engine


def check_spans(world: VisionWorld, inputs: MediaInputs, tokens: IntArray, media: Sequence[MediaSpan]) -> None:
    """Every feature token is in the span of an image, and every span has the tokens of its image."""
    outside = np.ones(len(tokens), np.bool_)
    for span in media:
        assert tokens[span.start : span.end].tolist() == inputs.get_without_inputs(span.digest).token_ids.tolist()
        outside[span.start : span.end] = False
    assert not (tokens[outside] == world.processor.feature_ids["image"]).any()


@pytest.mark.parametrize(
    ("history", "images"),
    [
        (History(), [1, 2, 3, 4]),
        (History(kind="window", turns=1), [1, 2, 3, 3]),
        (History(kind="stepwise"), [1, 2, 2, 2]),
    ],
)
def test_episode_images_are_where_the_engine_and_the_trainer_expect_them(
    world: VisionWorld, inputs: MediaInputs, history: History, images: list[int]
) -> None:
    settings = EnvironmentSettings(name=SCREEN, options=SMALL, opening="Play. {prompt}", seed=3)
    rollout, engine = run_episode(world, inputs, settings, history=history)
    assert [len(request.media) for request, _ in engine.seen] == images
    for request, _ in engine.seen:
        check_spans(world, inputs, request.token_ids, request.media)
    samples = build_samples(rollout, max_new_tokens=MAX_NEW_TOKENS)
    assert len(samples) == (1 if history.kind == "full" else len(rollout.branches) + 1)
    for sample in samples:
        check_spans(world, inputs, sample.token_ids, sample.media)
        assert not any(sample.loss_mask[span.start : span.end].any() for span in sample.media)
    trained = [token for sample in samples for token in sample.token_ids[sample.loss_mask].tolist()]
    assert trained == [token for _, answer in engine.seen for token in answer.token_ids.tolist()]


def test_episode_images_the_text_is_cut_but_no_image(world: VisionWorld, inputs: MediaInputs) -> None:
    settings = EnvironmentSettings(name=SCREEN, options=SMALL, opening="Play. {prompt}", seed=3)
    whole, _ = run_episode(world, inputs, settings)
    longest = len(whole.prompt_token_ids) + len(whole.token_ids)
    for limit in range(longest - 60, len(whole.prompt_token_ids) + 60, -23):
        rollout, engine = run_episode(world, inputs, settings, max_context=limit)
        for request, _ in engine.seen:
            assert len(request.token_ids) < limit
            check_spans(world, inputs, request.token_ids, request.media)
        assert rollout.finish_reason in ("context", "stop")


def huge_png() -> bytes:
    """The header of a PNG of 50,000 × 50,000 pixels, without pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT", b"IEND"]
    packed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, kind)
    return encoded.getvalue()


class Shows:
    """An environment that shows one thing."""

    shown: Any = ""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return Shows.shown, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


@pytest.fixture(name="shows")
def _shows(monkeypatch: pytest.MonkeyPatch) -> EnvironmentSettings:
    monkeypatch.setitem(ENVS, "shows", EnvSpec(id="shows", entry_point=Shows, options={}))
    return EnvironmentSettings(name="shows", opening="{prompt}")


NOISE = np.random.default_rng(0).integers(0, 255, (30, 30, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "shown",
    [
        NOISE,
        Image.fromarray(NOISE),
        encode(Image.fromarray(NOISE)),
        ("Look:", NOISE, "and here:", Image.fromarray(NOISE)),
        [{"type": "text", "text": "Look:"}, ImageData.from_bytes(encode(Image.fromarray(NOISE)))],
    ],
)
def test_episode_images_may_be_arrays_bytes_and_pillow_images(
    world: VisionWorld, inputs: MediaInputs, shows: EnvironmentSettings, shown: Any
) -> None:
    Shows.shown = shown
    rollout, _ = run_episode(world, inputs, shows)
    assert {span.digest for span in rollout.prompt_media} == {world.store.add_image(Image.fromarray(NOISE))}
    check_spans(world, inputs, rollout.prompt_token_ids, rollout.prompt_media)


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (None, "the observation None"),
        (Path("a.png"), "the observation PosixPath"),
        (NOISE.astype(np.float32), "an array of float32"),
        (NOISE[:0], "it has no pixels"),
        (("Look", NOISE.astype(np.int64)), "an array of int64"),
        (("Look", None), "a part of message content must be"),
        (encode(Image.fromarray(NOISE))[:200], "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image in a supported format"),
        (huge_png(), "pixels"),
        ([{"type": "image", "data": "no base64!"}], "must be base64"),
        ([{"type": "image", "digest": "00ff"}], "is not in the run's media store"),
        ([{"type": "image", "url": "http://example.org/a.png"}], "a part of message content must be"),
    ],
)
def test_episode_images_that_cannot_be_read_end_the_rollout(
    world: VisionWorld, inputs: MediaInputs, shows: EnvironmentSettings, shown: Any, message: str
) -> None:
    Shows.shown = shown
    with pytest.raises(InfraError) as raised:
        run_episode(world, inputs, shows)
    assert message in str(raised.value) and "shows" in str(raised.value)


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_episode_media_of_other_kinds_are_refused(
    world: VisionWorld, inputs: MediaInputs, shows: EnvironmentSettings, kind: str
) -> None:
    Shows.shown = [{"type": kind, "digest": "00ff"}]
    with pytest.raises(DataError, match=f"'{kind}', but this model supports only text and images"):
        run_episode(world, inputs, shows)


def test_episode_images_are_refused_for_a_model_that_reads_text(shows: EnvironmentSettings) -> None:
    Shows.shown = NOISE

    async def collect() -> None:
        hosts = EnvHosts()
        async with hosts.open(shows) as env:
            await hosts.store_images(await env.reset(0), shows.name)

    with pytest.raises(RollError, match="supports only text:"):
        asyncio.run(collect())


def test_episode_images_pass_through_a_pipe_as_json() -> None:
    lines: list[str] = []
    options = {"width": 56, "height": 40}
    serve(
        [
            json.dumps({"call": "start", "name": "gui:Click-v0-easy", "options": options, "wrappers": []}),
            json.dumps({"call": "reset", "seed": 1}),
        ],
        lines.append,
    )
    observation, _ = json.loads(lines[1])["value"]
    image = parse_content(observation)[0]
    assert isinstance(image, ImageData)
    assert Image.open(io.BytesIO(image.data)).size == (56, 40)
