"""Plans of a sandbox's file system, which contains parts of the host, read-only and without data of the host's users.

A plan is a sequence of steps: ("bind", source, target), ("copy", source, target) for small files, ("directory", path),
("file", path, bytes), ("link", content, path) or ("layer", source, target) for a layer of an image. A spawner that is
root builds the file system (`host/image.py`); otherwise bwrap does.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, TypeAlias

from roll_sandbox.errors import SandboxUnavailableError
from roll_sandbox.types import Mount

__all__ = [
    "HOME",
    "Plan",
    "find_interpreter",
    "format_bwrap_arguments",
    "make_environment",
    "make_system_plan",
    "plan_devices",
    "plan_host",
    "resolve_mounts",
]

HOME = "/home/user"
Plan: TypeAlias = tuple[tuple[Any, ...], ...]

_TOP_LEVEL_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_FILES = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCOUNT_FILES = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "/etc/group": b"root:x:0:\nuser:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}


@functools.cache
def find_interpreter() -> Path:
    """Return the path of the Python interpreter for sandboxes: the current interpreter, outside its virtual
    environment.
    """
    # The interpreter of a virtual environment needs its pyvenv.cfg, which sandboxes do not see.
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


def make_environment() -> dict[str, str]:
    """Return the environment variables of every program in a sandbox without an image."""
    return {
        "PATH": f"{find_interpreter().parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@functools.cache
def make_system_plan(mounts: tuple[Mount, ...]) -> Plan:
    """Return the plan of the file system for sandboxes without an image and with these mounts.

    Raises:
        SandboxUnavailableError: a mount's source does not exist, or a path is not absolute.
    """
    steps: list[tuple[Any, ...]] = [("directory", path) for path in ("/proc", "/dev/shm", "/tmp", "/home")]
    steps += plan_host("", python=str(Path(sys.base_prefix).resolve()))
    steps += [("file", path, content) for path, content in _ACCOUNT_FILES.items()]
    steps += plan_devices()
    steps += [("bind", mount.source, mount.target) for mount in resolve_mounts(mounts)]
    return tuple(steps)


def plan_host(root: str, *, python: str) -> list[tuple[Any, ...]]:
    """Return the steps that bind this machine's programs and libraries below a directory.

    Args:
        root: the directory; empty for the root directory.
        python: target for the interpreter's prefix, if the prefix is not below /usr.
    """
    steps: list[tuple[Any, ...]] = [("bind", "/usr", f"{root}/usr")]
    for name in _TOP_LEVEL_DIRECTORIES:
        path = f"/{name}"
        if os.path.islink(path):
            steps.append(("link", os.readlink(path), root + path))
        elif os.path.isdir(path):
            steps.append(("bind", path, root + path))
    steps += [("copy", f"/etc/{name}", f"{root}/etc/{name}") for name in _ETC_FILES if os.path.exists(f"/etc/{name}")]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        steps.append(("bind", str(prefix), python))
    return steps


def plan_devices() -> list[tuple[Any, ...]]:
    """Return the steps that provide /dev."""
    steps: list[tuple[Any, ...]] = [("directory", path) for path in ("/dev/pts", "/dev/shm")]
    steps += [("bind", f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    steps += [("link", "/proc/self/fd", "/dev/fd"), ("link", "pts/ptmx", "/dev/ptmx")]
    steps += [
        ("link", f"/proc/self/fd/{number}", f"/dev/{name}") for number, name in enumerate(("stdin", "stdout", "stderr"))
    ]
    return steps


def resolve_mounts(mounts: tuple[Mount, ...]) -> tuple[Mount, ...]:
    """Check the mounts, and return them with symbolic links in their sources resolved.

    Raises:
        SandboxUnavailableError: a source does not exist, or a path is not absolute.
    """
    for mount in mounts:
        plain = os.path.normpath(mount.target) == mount.target and not mount.target.startswith("//")
        if not os.path.exists(mount.source) or not mount.source.startswith("/"):
            raise SandboxUnavailableError(
                f"invalid mount source '{mount.source}': it must be an existing absolute path."
            )
        if not mount.target.startswith("/") or mount.target == "/" or not plain:
            raise SandboxUnavailableError(
                f"invalid mount target '{mount.target}' of '{mount.source}': it must be an absolute path other than "
                "'/', without '..'."
            )
    return tuple(Mount(source=os.path.realpath(mount.source), target=mount.target) for mount in mounts)


def format_bwrap_arguments(plan: Plan, files: Path) -> list[str]:
    """Return arguments with which bwrap builds the file system of a plan.

    The small files of the plan are written to the empty directory `files`, from which bwrap mounts them.
    """
    # bwrap applies arguments in their order (bwrap(1)), so the root becomes read-only after everything is in it.
    arguments = ["--tmpfs", "/"]
    for step, *rest in plan:
        if step == "directory":
            arguments += ["--dir", rest[0]]
        elif step == "link":
            arguments += ["--symlink", *rest]
        elif step == "layer":
            arguments += ["--ro-bind", *rest]
        elif step == "file":
            copy = files / rest[0].strip("/").replace("/", "-")
            copy.write_bytes(rest[1])
            arguments += ["--ro-bind", str(copy), rest[0]]
        else:
            arguments += ["--dev-bind" if rest[0].startswith("/dev/") else "--ro-bind", *rest]
    return [*arguments, "--remount-ro", "/", "--proc", "/proc"]
