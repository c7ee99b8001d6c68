"""The root file systems in which sandboxes of the bubblewrap runtime start, each built once and shared.

The root of an image holds the image, so that the cache does not remove it; least recently used roots of images are
dropped when no sandbox is in them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from roll_sandbox.images import Hold, Image, ImageCache
from roll_sandbox.images.system import make_image_plan
from roll_sandbox.spawner import SpawnerClient
from roll_sandbox.system_plan import Plan, format_bwrap_arguments, make_system_plan
from roll_sandbox.types import Mount, SandboxSpec

__all__ = ["Root", "Roots"]

MAX_UNUSED = 16
"""Most unused roots of images to keep."""


@dataclass(eq=False)
class Root:
    """One file system that sandboxes start in."""

    arguments: list[str]
    """Arguments of bwrap."""
    name: str = ""
    tree: str = ""
    """Directory in which the spawner built it, if that is root."""
    layers: list[tuple[str, str]] = field(default_factory=list)
    """Source of each layer of its image, and the target at which each sandbox's user owns it."""
    hold: Hold | None = None
    files: Path | None = None
    """Directory of the small files that bwrap shows, if the spawner is not root."""
    users: int = 0


class Roots:
    """The known file systems; see the module."""

    def __init__(self, cache: ImageCache) -> None:
        self._cache = cache
        self._known: dict[tuple[str | None, tuple[Mount, ...], bool], Root] = {}
        self._build_lock = asyncio.Lock()
        self._num_built = 0
        self._spawner: SpawnerClient | None = None

    async def acquire(self, spawner: SpawnerClient, spec: SandboxSpec, image: Image | None, *, merged: bool) -> Root:
        """Return the root for this spec; call `release` when its sandbox has ended.

        Raises:
            SandboxError: it cannot be built.
            UnknownImageError: the image was removed meanwhile.
        """
        key = (None if image is None else image.digest, spec.mounts, merged)
        async with self._build_lock:
            if self._spawner is not spawner:
                self.clear()
                self._spawner = spawner
            root = self._known.pop(key, None) or await self._build_image_root(spawner, spec, image, merged)
            self._known[key] = root  # keeps the most recently used one last
            root.users += 1
        return root

    async def _build_image_root(
        self, spawner: SpawnerClient, spec: SandboxSpec, image: Image | None, merged: bool
    ) -> Root:
        if image is None:
            return await self._build(spawner, make_system_plan(spec.mounts))
        hold = await asyncio.to_thread(self._cache.hold, image)
        try:
            plan = await asyncio.to_thread(make_image_plan, self._cache, image, spec.mounts, merged=merged)
            root = await self._build(spawner, plan)
        except BaseException:
            hold.release()
            raise
        root.hold = hold
        return root

    async def _build(self, spawner: SpawnerClient, plan: Plan) -> Root:
        spawner.check_running()
        if not spawner.facts["root"]:
            files = Path(tempfile.mkdtemp(prefix=f"roll-sandbox-files-{os.getpid()}-"))
            return Root(format_bwrap_arguments(plan, files), files=files)
        self._num_built += 1
        name = f"image-{self._num_built}"
        try:
            tree = await spawner.build_image(name, plan)
        except BaseException:
            spawner.send(("forget", name))
            raise
        layers = [(step[1], tree + step[2]) for step in plan if step[0] == "layer"]
        return Root(["--dev-bind", tree, "/", "--proc", "/proc"], name, tree, layers)

    def release(self, root: Root) -> None:
        """Release a root whose sandbox has ended, or was not started."""
        root.users -= 1
        unused = [key for key, each in self._known.items() if each.hold is not None and each.users == 0]
        for key in unused[:-MAX_UNUSED]:
            self._drop(self._known.pop(key))

    def _drop(self, root: Root) -> None:
        if root.tree and self._spawner is not None:
            self._spawner.send(("forget", root.name))
        _release_files(root)

    def clear(self) -> None:
        """Drop all roots after the spawner that built them has ended."""
        for root in self._known.values():
            _release_files(root)
        self._known.clear()


def _release_files(root: Root) -> None:
    if root.hold is not None:
        root.hold.release()
    if root.files is not None:
        shutil.rmtree(root.files, ignore_errors=True)
