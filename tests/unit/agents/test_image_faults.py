"""Images of agents while workers die and disks are full: the rollout is repeated, and the policy is not to blame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from unit.agents.test_agent_images import BODIES, ONE, TWO, ImageWorld
from worlds.vision_models import VisionWorld, picture, write_vision_model

from roll.errors import InfraError, WorkerDiedError
from roll.media import MediaStore


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> ImageWorld:
    directory = tmp_path_factory.mktemp("vision")
    return ImageWorld(VisionWorld.create(write_vision_model(directory / "model", "smolvlm"), directory / "media"))


class DyingPool:
    """Runs functions in this process, as a pool whose workers die in the first calls."""

    def __init__(self, num_deaths: int) -> None:
        self.num_deaths = num_deaths

    async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
        if self.num_deaths:
            self.num_deaths -= 1
            raise WorkerDiedError("a pool worker (process 1) ended with signal SIGKILL")
        return function(*args)


@pytest.mark.parametrize("path", BODIES)
async def test_agent_images_a_full_disk_fails_the_session_and_not_the_request(
    world: ImageWorld, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(*_: Any) -> None:
        raise InfraError("medium 0 cannot be written to the media store: No space left on device")

    monkeypatch.setattr(MediaStore, "_write", fail)
    async with world.session() as (post, session):
        status, reply = await post(path, BODIES[path](lambda image: [image(picture(900, 30, 30))]))
        assert status == 503 and "an image cannot be stored" in str(reply)
        with pytest.raises(InfraError, match="No space left on device"):
            await session.failed


async def test_agent_images_are_decoded_again_if_a_worker_dies(world: ImageWorld) -> None:
    async with world.session() as (post, session):
        assert session._images is not None
        storage = session._images._storage
        object.__setattr__(storage, "pool", DyingPool(2))
        status, _ = await post("chat/completions", BODIES["chat/completions"](lambda image: [image(ONE)]))
        assert status == 200
        world.check(session.calls[0], [ONE])
        object.__setattr__(storage, "pool", DyingPool(3))  # the image ends every worker
        status, reply = await post("chat/completions", BODIES["chat/completions"](lambda image: [image(TWO)]))
        assert status == 400 and "ended with signal SIGKILL" in str(reply)
        assert not session.failed.done()


async def test_agent_images_that_exceed_the_memory_of_a_worker_are_rejected(world: ImageWorld) -> None:
    class FullPool:
        async def submit(self, *_: Any, **__: Any) -> Any:
            raise MemoryError

    async with world.session() as (post, session):
        assert session._images is not None
        object.__setattr__(session._images._storage, "pool", FullPool())
        image = picture(901, 30, 30)
        status, reply = await post("chat/completions", BODIES["chat/completions"](lambda encode: [encode(image)]))
        assert status == 400 and "requires more memory to decode than the limit of a worker" in str(reply)


async def test_agent_images_that_arrive_slowly_do_not_outlive_their_session(world: ImageWorld) -> None:
    """An agent that is stopped while it sends a data URL keeps no memory and no request."""
    async with world.session() as (post, session):
        server = post.server
        reader, writer = await asyncio.open_connection("127.0.0.1", server._port)
        body = json.dumps(BODIES["chat/completions"](lambda image: [image(ONE)])).encode()
        headers = (
            f"Authorization: Bearer {session.key}\r\nContent-Length: {len(body)}\r\nContent-Type: application/json"
        )
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n".encode() + body[:100])
        async with asyncio.timeout(20):
            while not session.admission._reads:
                await asyncio.sleep(0)
            server.sessions.end(session)
            assert (await reader.readline()).split()[1] == b"401"
        assert session.admission._num_open == 0
        assert "the agent ended or was stopped" in (await reader.readuntil(b"}}")).decode()
        writer.close()
