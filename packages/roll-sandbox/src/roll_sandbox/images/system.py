"""The file system of a sandbox with an image: the image's layers, and a small system at `/.roll` for the agent.

A sandbox starts in a small system with this machine's programs and libraries at `/.roll`, devices, and the layers at
`/.layers/N`. Then `agent/layers.py` mounts an overlay of the layers as the root of the agent, and another one as the
root of each fresh program; `/.roll` and the devices are bound into the overlays. So the agent and `PythonCode` need
nothing from the image.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from roll_sandbox.errors import SandboxUnavailableError
from roll_sandbox.images.accounts import make_account_files
from roll_sandbox.images.cache import ImageCache
from roll_sandbox.images.image import DEFAULT_PATH, Image
from roll_sandbox.images.merge import merge
from roll_sandbox.system_plan import HOME, Plan, find_interpreter, plan_devices, plan_host, resolve_mounts
from roll_sandbox.types import Mount

__all__ = ["find_python_command", "make_agent_image", "make_image_environment", "make_image_plan"]

_HOSTS_FILE = b"127.0.0.1 localhost sandbox\n::1 localhost\n"
_SYSTEM_ROOT = "/.roll"
_RESERVED_PATHS = (_SYSTEM_ROOT, "/.image", "/.space", "/.layers", "/proc", "/dev")


def make_image_plan(cache: ImageCache, image: Image, mounts: tuple[Mount, ...], *, merged: bool) -> Plan:
    """Return the plan (see `system_plan`) of the file system for sandboxes with this image and these mounts.

    Args:
        cache: the cache that contains the image.
        image: the image.
        mounts: mounts to add.
        merged: if true, merge the layers into one, for machines on which sandboxes cannot mount overlays.

    Raises:
        SandboxUnavailableError: a mount's source does not exist, or a path is not absolute.
    """
    mounts = resolve_mounts(mounts)
    for mount in mounts:
        if mount.target.startswith(_RESERVED_PATHS):
            raise SandboxUnavailableError(
                f"cannot mount at '{mount.target}': this path is reserved in sandboxes with an image. Choose another "
                "target."
            )
    top_layer = _make_top_layer(cache, image, mounts)
    layers = [top_layer, *reversed(cache.list_layer_directories(image))]
    if merged:
        layers = [cache.make_root(f"{os.path.basename(top_layer)}-merged", lambda root: merge(reversed(layers), root))]
    steps: list[tuple[Any, ...]] = [("directory", path) for path in ("/proc", "/.image", "/.space", "/.layers")]
    steps += plan_host(_SYSTEM_ROOT, python=_get_sandbox_python_home())
    steps += plan_devices()
    kind = "bind" if merged else "layer"
    steps += [(kind, layer, f"/.layers/{number}") for number, layer in enumerate(layers)]
    steps += [("bind", mount.source, mount.target) for mount in mounts]
    return tuple(steps)


def make_agent_image(image: Image, mounts: tuple[Mount, ...], *, merged: bool) -> dict[str, Any]:
    """Return the part of the agent's settings that describes the image."""
    binds = ["/dev", _SYSTEM_ROOT, *(mount.target for mount in mounts)]
    return {
        "layers": 1 if merged else len(image.layers) + 1,
        "binds": binds,
        "cwd": image.cwd,
        "bash": _find_bash_command(),
    }


def make_image_environment(image: Image) -> dict[str, str]:
    """Return the environment variables of every program in a sandbox with this image."""
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **image.env, "HOME": HOME}


def _make_top_layer(cache: ImageCache, image: Image, mounts: tuple[Mount, ...]) -> str:
    """Create the topmost layer, with mount points and the files that are the same in every sandbox; return its path."""
    files = {
        "/etc/hosts": _HOSTS_FILE,
        **make_account_files(image.uid, image.gid, HOME, cache.list_layer_directories(image)),
    }
    directories = ["/proc", "/dev", "/tmp", HOME, _SYSTEM_ROOT]
    for mount in mounts:
        if os.path.isdir(mount.source):
            directories.append(mount.target)
        else:
            files[mount.target] = b""
    key = hashlib.sha256(repr((directories, files)).encode()).hexdigest()[:16]

    def fill_root(root: str) -> None:
        for path in directories:
            Path(root + path).mkdir(mode=0o755, parents=True, exist_ok=True)
        for path, content in files.items():
            Path(root + path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            Path(root + path).write_bytes(content)
        # Modes must not depend on the umask of the caller.
        for path in (Path(root), *Path(root).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.chmod(root + "/tmp", 0o1777)

    return cache.make_root(f"{image.digest.replace(':', '-')}-{key}", fill_root)


@functools.cache
def find_python_command() -> list[str]:
    """Return the command that runs this machine's Python interpreter, mounted below `/.roll`, in a sandbox."""
    return [
        *_make_loader_prefix(),
        _get_sandbox_python_home() + str(find_interpreter()).removeprefix(str(Path(sys.base_prefix).resolve())),
    ]


@functools.cache
def _find_bash_command() -> list[str]:
    return [*_make_loader_prefix(), _SYSTEM_ROOT + os.path.realpath(shutil.which("bash") or "/bin/bash")]


def _make_loader_prefix() -> list[str]:
    """Return the command prefix with which a program of this machine runs in an image: the loader and its options."""
    # The image may have another C library, or none, so the loader of this machine gets the paths of its libraries.
    loader = _find_loader()
    return [] if loader is None else [_SYSTEM_ROOT + loader, "--library-path", ":".join(_list_library_paths(loader))]


def _get_sandbox_python_home() -> str:
    """Return the directory in the sandbox at which the interpreter's prefix is mounted."""
    prefix = Path(sys.base_prefix).resolve()
    return f"{_SYSTEM_ROOT}{prefix}" if prefix.is_relative_to("/usr") else f"{_SYSTEM_ROOT}/python"


def _find_loader() -> str | None:
    """Return the path of the interpreter's loader (the PT_INTERP segment of the ELF file); `None` for a static
    interpreter.
    """
    with open(find_interpreter(), "rb") as file:
        match = re.search(rb"\0(/[\w/.-]*/ld[\w.-]*\.so[\w.]*)\0", file.read(2**16))
    return os.path.realpath(match[1].decode()) if match else None


def _list_library_paths(loader: str) -> list[str]:
    places = [os.path.dirname(loader), "/usr/local/lib", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    real = dict.fromkeys(os.path.realpath(place) for place in places if os.path.isdir(place))
    return [_get_sandbox_python_home() + "/lib", *(_SYSTEM_ROOT + place for place in real)]
