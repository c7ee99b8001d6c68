"""Images of agents while workers die and disks are full: the rollout is repeated, and the policy is not to blame."""

from __future__ import annotations

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
        assert status == 503 and "an image cannot be stored right now" in str(reply)
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
        assert status == 400 and "needs more memory to decode than a worker may use" in str(reply)
