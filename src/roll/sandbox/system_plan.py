"""What of the host a sandbox sees: its programs and libraries, read-only; nothing of its users.

A plan is a sequence of steps, each ("bind", source, target), ("copy", source, target) for what is small, ("directory",
path), ("file", path, bytes) or ("link", content, path). The spawner builds it where it is root (`host/image.py`), bwrap
itself otherwise.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from roll.sandbox.errors import SandboxUnavailableError
from roll.sandbox.types import Mount

__all__ = ["HOME", "Plan", "bwrap_arguments", "environment", "interpreter", "system_plan"]

HOME = "/home/user"
Plan: TypeAlias = tuple[tuple[Any, ...], ...]

_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCOUNTS = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "/etc/group": b"root:x:0:\nuser:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}


@functools.cache
def interpreter() -> Path:
    """The Python that runs in sandboxes: this one, without its virtual environment."""
    return Path(getattr(sys, "_base_executable", "") or sys.executable).resolve()


def environment() -> dict[str, str]:
    """The variables that every program gets."""
    return {
        "PATH": f"{interpreter().parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@functools.cache
def system_plan(mounts: tuple[Mount, ...]) -> Plan:
    """The steps for a system with these additions.

    Raises:
        SandboxUnavailableError: a mount's source does not exist, or a path is not absolute.
    """
    steps: list[tuple[Any, ...]] = [("directory", path) for path in ("/proc", "/dev/pts", "/dev/shm", "/tmp", "/home")]
    steps.append(("bind", "/usr", "/usr"))
    for name in _TOP_LEVEL:
        path = f"/{name}"
        if os.path.islink(path):
            steps.append(("link", os.readlink(path), path))
        elif os.path.isdir(path):
            steps.append(("bind", path, path))
    steps += [("copy", f"/etc/{name}", f"/etc/{name}") for name in _ETC if os.path.exists(f"/etc/{name}")]
    steps += [("file", path, content) for path, content in _ACCOUNTS.items()]
    steps += [("bind", f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    steps += [("link", "/proc/self/fd", "/dev/fd"), ("link", "pts/ptmx", "/dev/ptmx")]
    steps += [
        ("link", f"/proc/self/fd/{number}", f"/dev/{name}") for number, name in enumerate(("stdin", "stdout", "stderr"))
    ]
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        steps.append(("bind", str(prefix), str(prefix)))
    for mount in mounts:
        if not os.path.exists(mount.source) or not mount.source.startswith("/") or not mount.target.startswith("/"):
            raise SandboxUnavailableError(
                f"sandbox mount of '{mount.source}' at '{mount.target}': the source must exist, both must be absolute."
            )
        steps.append(("bind", os.path.realpath(mount.source), mount.target))
    return tuple(steps)


def bwrap_arguments(plan: Plan) -> list[str]:
    """The same for a bwrap without a spawner that is root. Small files go through a directory that `close` removes."""
    arguments = ["--tmpfs", "/"]
    files = Path(tempfile.mkdtemp(prefix=f"roll-sandbox-files-{os.getpid()}-"))
    for step, *rest in plan:
        if step == "directory":
            arguments += ["--dir", rest[0]]
        elif step == "link":
            arguments += ["--symlink", *rest]
        elif step == "file":
            copy = files / rest[0].strip("/").replace("/", "-")
            copy.write_bytes(rest[1])
            arguments += ["--ro-bind", str(copy), rest[0]]
        else:
            arguments += ["--dev-bind" if rest[0].startswith("/dev/") else "--ro-bind", *rest]
    return [*arguments, "--remount-ro", "/", "--proc", "/proc"]
