"""Images of hostile agents: none ends a run, keeps its workers busy or fills its memory, and each is reported."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from unit.agents.test_agent_images import BODIES, ONE, ImageWorld, openai_part, url
from worlds.vision_models import VisionWorld, picture, write_vision_model

import roll.media.store
from roll.agents import session_images
from roll.media.images import decode_image


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> ImageWorld:
    directory = tmp_path_factory.mktemp("vision")
    return ImageWorld(VisionWorld.create(write_vision_model(directory / "model", "smolvlm"), directory / "media"))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each image that is decoded."""
    found: list[str] = []

    def count(data: bytes, what: str, limits: Any = None) -> Image.Image:
        found.append(what)
        return decode_image(data, what, limits)

    monkeypatch.setattr(roll.media.store, "decode_image", count)
    return found


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


def bomb(width: int, height: int) -> dict[str, Any]:
    """A small file with many pixels."""
    encoded = io.BytesIO()
    Image.new("1", (width, height)).save(encoded, "PNG")
    part = openai_part(ONE)
    part["image_url"]["url"] = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
    return part


async def test_hostile_images_with_too_many_pixels_are_refused_by_their_header(world: ImageWorld) -> None:
    async with world.session() as (post, session):
        status, reply = await post("chat/completions", chat(bomb(8192, 4097)))
        assert status == 400 and "8192 × 4097 pixels, but at most 33,554,432 are allowed" in str(reply)
        assert not session.failed.done() and session.calls == []


@pytest.mark.parametrize("path", BODIES)
async def test_hostile_images_with_too_much_base64_are_refused_before_decoding(
    world: ImageWorld, decoded: list[str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("roll.agents.message_parts._MAX_BASE64", 1000)
    async with world.session() as (post, _):
        status, reply = await post(path, BODIES[path](lambda image: [image(picture(4, 30, 30))]))
        assert status == 400 and "base64 characters, but at most 1,000 are allowed" in str(reply)
        assert decoded == []


async def test_hostile_images_are_decoded_only_until_the_context_is_full(world: ImageWorld, decoded: list[str]) -> None:
    images = [picture(1000 + number, 8, 8) for number in range(300)]
    each = len(world.inputs.get_without_inputs(world.world.store.add_image(images[0])).token_ids)
    async with world.session() as (post, session):
        status, reply = await post("chat/completions", chat(*map(openai_part, images)))
        assert status == 400 and "the images have more tokens" in str(reply)
        assert len(decoded) == session.max_context // each + 1
        status, _ = await post("chat/completions", chat(openai_part(images[0])))
        assert status == 200


@pytest.mark.parametrize("name", ["MAX_DISTINCT_IMAGES", "MAX_STORED_BYTES"])
async def test_hostile_images_of_one_session_are_bounded_in_all(
    world: ImageWorld, decoded: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = 2000 if name == "MAX_DISTINCT_IMAGES" else 3000  # the store knows the images of the other case
    images = [picture(first + number, 24, 24) for number in range(3)]
    sizes = [len(url(image)) * 3 // 4 for image in images]
    monkeypatch.setattr(session_images, name, 2 if name == "MAX_DISTINCT_IMAGES" else sizes[0] + sizes[1])
    async with world.session("a", "b", "c") as (post, session):
        for image in (*images[:2], images[0]):  # an image that was sent before costs nothing
            assert (await post("chat/completions", chat(openai_part(image))))[0] == 200
        status, reply = await post("chat/completions", chat(openai_part(images[2])))
        assert status == 403 and "a session must not send more than" in str(reply)
        assert len(decoded) == 2
        assert any("403 a session must not" in text for text in session.rejected_requests)


@pytest.mark.parametrize("path", ["messages/count_tokens", "responses/input_tokens", "chat/completions"])
async def test_hostile_images_after_the_deadline_are_not_decoded(
    world: ImageWorld, decoded: list[str], path: str
) -> None:
    async with world.session() as (post, session):
        session._deadline = 0.0
        kind = path if path in BODIES else path.partition("/")[0]
        body = BODIES[kind](lambda image: [image(ONE)])
        status, reply = await post(path, body)
        assert status == 403 and "budget" in str(reply)
        assert decoded == []


async def test_hostile_images_requests_at_once_are_bounded_before_their_bodies_are_read(
    world: ImageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.session(*["Fine."] * 20) as (post, session):
        limit = session.admission._limit
        images, release = session._images, asyncio.Event()
        assert images is not None
        store = images.store

        async def wait(messages: Any) -> Any:
            await release.wait()
            return await store(messages)

        monkeypatch.setattr(images, "store", wait)
        asking = [asyncio.create_task(post("chat/completions", chat(openai_part(ONE)))) for _ in range(limit + 3)]
        ended = asyncio.as_completed(asking)
        assert [(await next(ended))[0] for _ in range(3)] == [429] * 3
        release.set()
        statuses = [status for status, _ in await asyncio.gather(*asking)]
        assert sorted(statuses) == [200] * limit + [429] * 3


SCALARS: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    "",
    "text",
    "data:",
    "data:image/png;base64",
    "data:;base64,AAAA",
    "\0",
)


def nest(rng: random.Random, depth: int) -> Any:
    """A part of a message of no API, with the names that the APIs use."""
    names = ("type", "image_url", "url", "source", "data", "content", "image", "digest", "text", "file", "media_type")
    kinds = ("image", "image_url", "input_image", "text", "tool_result", "document", "computer_screenshot", "file")
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(SCALARS)
    if kind < 0.4:
        return [nest(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    fields = {name: nest(rng, depth - 1) for name in rng.sample(names, rng.randint(0, 4))}
    return fields | ({"type": rng.choice(kinds)} if rng.random() < 0.8 else {})


@pytest.mark.parametrize("path", BODIES)
async def test_hostile_images_nested_parts_cause_no_internal_error(world: ImageWorld, path: str) -> None:
    rng = random.Random(0)
    async with world.session(*["Fine."] * 400) as (post, session):
        for _ in range(150):
            parts = [nest(rng, 4) for _ in range(rng.randint(1, 3))]
            status, reply = await post(path, BODIES[path](lambda _, parts=parts: parts))
            assert status in (200, 400, 403), (parts, reply)
            assert status == 200 or reply["error"]["message"]
        assert not session.failed.done()


async def test_hostile_images_whose_type_is_another_are_judged_by_their_content(world: ImageWorld) -> None:
    part = openai_part(ONE)
    part["image_url"]["url"] = part["image_url"]["url"].replace("image/png", "text/html")
    async with world.session() as (post, session):
        assert (await post("chat/completions", chat(part)))[0] == 200
        world.check(session.calls[0], [ONE])


def test_hostile_images_long_animations_are_refused_without_counting_their_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from PIL.GifImagePlugin import GifImageFile

    from roll.errors import DataError

    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (0, 128, 255)]
    encoded = io.BytesIO()
    frames[0].save(encoded, "GIF", save_all=True, append_images=frames[1:])

    def count(_: Any) -> int:
        raise AssertionError("counts all frames")

    monkeypatch.setattr(GifImageFile, "n_frames", property(count))
    with pytest.raises(DataError, match="is animated"):
        decode_image(encoded.getvalue(), "the image")
