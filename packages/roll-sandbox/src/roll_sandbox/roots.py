"""The root file systems of sandboxes of the bubblewrap runtime. Each is built once and shared.

The root of an image locks the image, so that the cache does not remove it. If there are too many roots of images that
no sandbox uses, the least recently used ones are dropped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from roll_sandbox.images import Image, ImageCache, ImageLock
from roll_sandbox.images.system import make_image_plan
from roll_sandbox.spawner import SpawnerClient
from roll_sandbox.system_plan import Plan, format_bwrap_arguments, make_system_plan
from roll_sandbox.types import Mount, SandboxSpec

__all__ = ["RootFileSystem", "RootFileSystems"]

MAX_UNUSED_ROOTS = 16
"""Maximum number of unused roots of images to keep."""


@dataclass(eq=False)
class RootFileSystem:
    """A file system in which sandboxes start."""

    arguments: list[str]
    """Arguments for bwrap."""
    name: str = ""
    tree: str = ""
    """Directory in which the spawner built the file system, if the spawner is root."""
    layers: list[tuple[str, str]] = field(default_factory=list)
    """Layers of the image: the directory on this machine, and the path at which it is mounted for a sandbox."""
    image_lock: ImageLock | None = None
    files: Path | None = None
    """Directory of the small files that bwrap binds into the sandbox, if the spawner is not root."""
    users: int = 0


class RootFileSystems:
    """Builds, shares and removes root file systems."""

    def __init__(self, cache: ImageCache) -> None:
        self._cache = cache
        self._known: dict[tuple[str | None, tuple[Mount, ...], bool], RootFileSystem] = {}
        self._build_lock = asyncio.Lock()
        self._num_built = 0
        self._spawner: SpawnerClient | None = None

    async def acquire(
        self, spawner: SpawnerClient, spec: SandboxSpec, image: Image | None, *, merged: bool
    ) -> RootFileSystem:
        """Return the root for this spec, built if necessary; call `release` when the sandbox that uses it has ended.

        Raises:
            SandboxError: the file system cannot be built.
            UnknownImageError: the image was removed in the meantime.
        """
        key = (None if image is None else image.digest, spec.mounts, merged)
        async with self._build_lock:
            if self._spawner is not spawner:
                # The trees existed in the mount namespace of the spawner that built them.
                self.clear()
                self._spawner = spawner
            root = self._known.pop(key, None) or await self._build_image_root(spawner, spec, image, merged)
            self._known[key] = root  # keeps the most recently used one last
            root.users += 1
        return root

    async def _build_image_root(
        self, spawner: SpawnerClient, spec: SandboxSpec, image: Image | None, merged: bool
    ) -> RootFileSystem:
        if image is None:
            return await self._build(spawner, make_system_plan(spec.mounts))
        image_lock = await asyncio.to_thread(self._cache.lock_image, image)
        try:
            plan = await asyncio.to_thread(make_image_plan, self._cache, image, spec.mounts, merged=merged)
            root = await self._build(spawner, plan)
        except BaseException:
            image_lock.release()
            raise
        root.image_lock = image_lock
        return root

    async def _build(self, spawner: SpawnerClient, plan: Plan) -> RootFileSystem:
        spawner.check_running()
        if not spawner.facts["root"]:
            files = Path(tempfile.mkdtemp(prefix=f"roll-sandbox-files-{os.getpid()}-"))
            return RootFileSystem(format_bwrap_arguments(plan, files), files=files)
        self._num_built += 1
        name = f"image-{self._num_built}"
        try:
            tree = await spawner.build_tree(name, plan)
        except BaseException:
            spawner.send(("forget", name))
            raise
        layers = [(step[1], tree + step[2]) for step in plan if step[0] == "layer"]
        return RootFileSystem(["--dev-bind", tree, "/", "--proc", "/proc"], name, tree, layers)

    def release(self, root: RootFileSystem) -> None:
        """Record that a sandbox no longer uses `root`; drop unused image roots beyond `MAX_UNUSED_ROOTS`."""
        root.users -= 1
        unused = [key for key, each in self._known.items() if each.image_lock is not None and each.users == 0]
        for key in unused[:-MAX_UNUSED_ROOTS]:
            self._drop_root(self._known.pop(key))

    def _drop_root(self, root: RootFileSystem) -> None:
        if root.tree and self._spawner is not None:
            self._spawner.send(("forget", root.name))
        _release_files(root)

    def clear(self) -> None:
        """Drop all roots after the spawner that built them has ended."""
        for root in self._known.values():
            _release_files(root)
        self._known.clear()


def _release_files(root: RootFileSystem) -> None:
    if root.image_lock is not None:
        root.image_lock.release()
    if root.files is not None:
        shutil.rmtree(root.files, ignore_errors=True)
