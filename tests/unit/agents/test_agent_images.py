"""Images in the requests of agents: every API's form, histories that grow, and requests that are rejected."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image
from worlds.agents import Speaker, request_of
from worlds.vision_models import VisionWorld, picture, write_vision_model

from roll.agents.server import MAX_BYTES_WITH_IMAGES, AgentServer
from roll.agents.session import Session
from roll.agents.tree import ModelCall, build_rollout, group_chains
from roll.config.agents import AgentLimitsConfig
from roll.data import ChatRenderer
from roll.data.media_text import MediaText
from roll.data.samples import build_samples
from roll.envs.image_storage import MAX_IMAGES, ImageStorage
from roll.models import load_tokenizer
from roll.models.multimodal import MediaInputs
from roll.types import MediaSpan, Message, Prompt, PromptDraw


class ImageWorld:
    """A model that reads images, and the session of an agent."""

    def __init__(self, world: VisionWorld) -> None:
        self.world = world
        self.inputs = MediaInputs(world.store, world.processor)
        self.renderer = ChatRenderer(load_tokenizer(world.model), MediaText(self.inputs))
        (self.end,) = self.renderer.tokenize("<|im_end|>").tolist()
        prompt = Prompt(uid="p", domain="d", messages=(Message(role="user", content="Go."),))
        self.draw = PromptDraw(draw_id=3, prompt=prompt, token_ids=self.renderer.render(prompt.messages))

    @asynccontextmanager
    async def session(self, *says: str) -> AsyncIterator[tuple[Any, Session]]:
        """Yield a function that posts to a path and returns status and body, and the session."""
        speaker = Speaker(self.renderer, list(says) or ["Fine."], self.end)
        async with AgentServer(reads_images=True) as server, aiohttp.ClientSession() as http:
            session = Session(
                "train-3.0",
                request_of(self.draw.token_ids, "train-3.0", self.end),
                speaker.generate,
                self.renderer,
                limits=AgentLimitsConfig(),
                max_context=1024,
                images=ImageStorage(self.inputs),
            )
            server.sessions.add(session)

            async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {session.key}"}
                async with http.post(f"{server.base_url}/{path}", json=body, headers=headers) as reply:
                    return reply.status, await reply.json()

            post.server = server  # type: ignore[attr-defined]
            yield post, session

    def check(self, call: ModelCall, images: list[Image.Image]) -> None:
        """The call's context has these images, each with its tokens, and no other feature token."""
        assert [span.digest for span in call.media] == [self.world.store.add_image(image) for image in images]
        outside = np.ones(len(call.context), np.bool_)
        for span in call.media:
            expected = self.inputs.get_without_inputs(span.digest).token_ids
            assert call.context[span.start : span.end].tolist() == expected.tolist()
            outside[span.start : span.end] = False
        assert not (call.context[outside] == self.world.processor.feature_ids["image"]).any()


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> ImageWorld:
    directory = tmp_path_factory.mktemp("vision")
    return ImageWorld(VisionWorld.create(write_vision_model(directory / "model", "smolvlm"), directory / "media"))


ONE, TWO = picture(11, 30, 30), picture(12, 40, 56)


def encode(image: Image.Image, form: str = "PNG") -> str:
    encoded = io.BytesIO()
    image.save(encoded, form)
    return base64.b64encode(encoded.getvalue()).decode()


def url(image: Image.Image) -> str:
    return f"data:image/png;base64,{encode(image)}"


def openai_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(image)}}


def anthropic_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encode(image)}}


BODIES = {
    "chat/completions": lambda parts: {"model": "m", "messages": [{"role": "user", "content": parts(openai_part)}]},
    "messages": lambda parts: {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": parts(anthropic_part)}],
    },
    "responses": lambda parts: {
        "model": "m",
        "input": [{"role": "user", "content": parts(lambda image: {"type": "input_image", "image_url": url(image)})}],
    },
}


@pytest.mark.parametrize("path", BODIES)
async def test_agent_images_reach_the_engine_in_every_api(world: ImageWorld, path: str) -> None:
    def parts(image: Any) -> list[Any]:
        return [{"type": "text", "text": "a"}, image(ONE), {"type": "text", "text": "<image> b"}, image(TWO)]

    async with world.session() as (post, session):
        status, body = await post(path, BODIES[path](parts))
        assert status == 200, body
        (call,) = session.calls
        world.check(call, [ONE, TWO])
        text = world.renderer.decode_raw(call.context)
        assert text.index("a<") < text.index("< image> b")  # the text's own placeholder is no image


async def test_agent_images_in_a_growing_history_extend_the_context(world: ImageWorld) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, openai_part(ONE)]}]
    async with world.session("First.", "Second.") as (post, session):
        _, body = await post("chat/completions", {"model": "m", "messages": messages})
        messages += [body["choices"][0]["message"], {"role": "user", "content": [openai_part(TWO)]}]
        status, body = await post("chat/completions", {"model": "m", "messages": messages})
        assert status == 200, body
        first, second = session.calls
        world.check(second, [ONE, TWO])
        assert second.context[: len(first.all_token_ids)].tolist() == first.all_token_ids.tolist()
        rollout = build_rollout(world.draw, 0, session.calls, text="Second.")
        (sample,) = build_samples(rollout, max_new_tokens=400)
        assert sample.media == second.media
        assert len(rollout.branches) == 1  # the agent's own prompt


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_agent_images_of_tool_results_are_seen(world: ImageWorld, path: str) -> None:
    if path == "messages":
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "shot", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [anthropic_part(ONE)]}],
            },
        ]
    else:
        call = {"id": "c", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [openai_part(ONE)]},
        ]
    async with world.session() as (post, session):
        status, body = await post(path, {"model": "m", "max_tokens": 9, "messages": messages})
        assert status == 200, body
        world.check(session.calls[0], [ONE])


async def test_agent_images_of_the_prompt_are_named_by_their_digest(world: ImageWorld) -> None:
    digest = world.world.store.add_image(ONE)
    async with world.session() as (post, session):
        parts = [{"type": "image", "digest": digest}, {"type": "text", "text": "look"}]
        status, body = await post("chat/completions", {"model": "m", "messages": [{"role": "user", "content": parts}]})
        assert status == 200, body
        world.check(session.calls[0], [ONE])


def broken_png() -> str:
    return base64.b64encode(base64.b64decode(encode(TWO))[:300]).decode()


def animated() -> str:
    encoded = io.BytesIO()
    ONE.save(encoded, "GIF", save_all=True, append_images=[picture(3, 30, 30)])
    return base64.b64encode(encoded.getvalue()).decode()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}, "images are not downloaded"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "images are not downloaded"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "must be base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "not valid base64"),
        ({"type": "image_url", "image_url": {}}, "has no image data"),
        ({"type": "image_url"}, "has no image data"),
        ({"type": "image_url", "image_url": [["deep"]]}, "has no image data"),
        ({"type": "image", "digest": "00ff"}, "is not in the run's media store"),
        ({"type": "image", "digest": "../../etc/passwd"}, "must be lowercase hexadecimal"),
        ({"type": "input_image", "image_url": f"data:image/png;base64,{broken_png()}"}, "cannot be decoded"),
        ({"type": "input_image", "image_url": f"data:image/gif;base64,{animated()}"}, "is animated"),
        ({"type": "input_image", "image_url": "data:image/png;base64,PHN2Zy8+"}, "not an image in a supported format"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_agent_images_that_cannot_be_read_are_refused(
    world: ImageWorld, path: str, part: dict[str, Any], message: str
) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}
    async with world.session() as (post, session):
        status, reply = await post(path, body)
        assert (status, session.calls) == (400, [])
        assert message in str(reply)
        assert not session.failed.done()


async def test_agent_images_too_many_or_too_large_are_refused(world: ImageWorld) -> None:
    tiny = {"type": "image_url", "image_url": {"url": url(picture(0, 8, 8))}}
    async with world.session() as (post, _):
        many = {"model": "m", "messages": [{"role": "user", "content": [tiny] * (MAX_IMAGES + 1)}]}
        status, reply = await post("chat/completions", many)
        assert status == 400 and f"must not have more than {MAX_IMAGES} images" in str(reply)
        full = {"model": "m", "messages": [{"role": "user", "content": [tiny] * 300}]}
        status, reply = await post("chat/completions", full)
        assert status == 400 and "context" in str(reply)
        large = {"model": "m", "messages": [{"role": "user", "content": "x" * MAX_BYTES_WITH_IMAGES}]}
        assert (await post("chat/completions", large))[0] == 413


async def test_agent_images_no_text_completion_imitates_one(world: ImageWorld) -> None:
    async with world.session() as (post, session):
        status, _ = await post("completions", {"model": "m", "prompt": "see <image> and", "max_tokens": 4})
        assert status == 200
        assert not (session.calls[0].context == world.world.processor.placeholder_ids["image"]).any()
        feature = [int(world.world.processor.feature_ids["image"])]
        assert (await post("completions", {"model": "m", "prompt": feature, "max_tokens": 4}))[0] == 400


def test_agent_images_calls_with_equal_tokens_and_other_images_are_other_chains() -> None:
    def call(digest: str, context: list[int], answer: int) -> ModelCall:
        return ModelCall(
            context=np.array(context, np.int32),
            media=(MediaSpan(kind="image", digest=digest, start=1, end=3),),
            token_ids=np.array([answer], np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32),
            finish_reason="stop",
        )

    first = call("aa", [1, 9, 9, 2], 5)
    assert group_chains([first, call("aa", [1, 9, 9, 2, 5, 7], 6)]) == [[0, 1]]
    assert group_chains([first, call("bb", [1, 9, 9, 2, 5, 7], 6)]) == [[0], [1]]


def test_agent_images_a_model_of_text_gets_a_placeholder() -> None:
    from roll.agents.message_parts import UnknownObject, read_content
    from roll.agents.warning_log import WarningLog

    part = UnknownObject.model_validate(openai_part(ONE))
    assert read_content([part], WarningLog()) == "[image not shown: this model reads only text]"
