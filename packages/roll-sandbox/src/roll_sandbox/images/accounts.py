"""Determines the user that runs an image's programs, from the account files of the image."""

from __future__ import annotations

import os
from collections.abc import Sequence

from roll_sandbox.errors import BadImageError

__all__ = ["DEFAULT_ACCOUNT", "make_account_files", "resolve_account"]

DEFAULT_ACCOUNT = (1000, 1000)
"""UID and GID of programs in sandboxes without an image."""
_MAX_BYTES = 2**20
_MAX_ID = 2**31
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def resolve_account(user: str, layers: Sequence[str]) -> tuple[int, int]:
    """Return the UID and GID of an image's user, or `DEFAULT_ACCOUNT` if that is root.

    All files of an image belong to this user, so programs can change them without being root. As root, programs could
    access the agent through /proc, where the files of processes that are not dumpable belong to root.

    Args:
        user: the user in the image's configuration, such as `name`, `number` or `name:group`.
        layers: directories of the layers, lowest first.

    Raises:
        BadImageError: the image has no such user.
    """
    name, _, group = user.partition(":")
    users, groups = (_parse_entries(_read_account_file(layers, file)) for file in ("passwd", "group"))
    entry = next((each for each in users if name in (each[0], each[2])), None)
    if name and entry is None and not _is_number(name):
        raise BadImageError(f"the image's user '{user[:80]}' is not in the image's /etc/passwd.")
    uid = int(entry[2]) if entry else int(name or 0)
    gid = int(entry[3]) if entry and len(entry) > 3 and _is_number(entry[3]) else 0
    if group:
        other = next((each for each in groups if group in (each[0], each[2])), None)
        if other is None and not _is_number(group):
            raise BadImageError(f"the image's group '{group[:80]}' is not in the image's /etc/group.")
        gid = int(other[2]) if other else int(group)
    return (uid, gid) if uid else DEFAULT_ACCOUNT


def make_account_files(uid: int, gid: int, home: str, layers: Sequence[str]) -> dict[str, bytes]:
    """Return the content, by path, of the account files to add, so that the UID and the GID have names.

    A file is omitted if the image's file already has an entry for the UID or GID.
    """
    texts = {file: _read_account_file(layers, file) for file in ("passwd", "group")}
    lines = {"passwd": f"user:x:{uid}:{gid}:user:{home}:/bin/sh\n", "group": f"user:x:{gid}:\n"}
    if gid == 0:
        lines["group"] = "root:x:0:\n"
    missing = {}
    for file, number in (("passwd", uid), ("group", gid)):
        if not any(each[2] == str(number) for each in _parse_entries(texts[file])):
            text = texts[file]
            missing[f"/etc/{file}"] = (
                text + (b"\n" if text and not text.endswith(b"\n") else b"") + lines[file].encode()
            )
    return missing


def _parse_entries(text: bytes) -> list[list[str]]:
    """Parse an account file: return the fields of every entry whose third field, the UID or GID, is a valid number."""
    lines = (line.split(":") for line in text.decode(errors="surrogateescape").splitlines())
    return [fields for fields in lines if len(fields) > 2 and _is_number(fields[2])]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < _MAX_ID


def _read_account_file(layers: Sequence[str], file: str) -> bytes:
    """Read a file of /etc from the highest layer that has the file, without following links; empty if there is none."""
    for layer in reversed(layers):
        try:
            directory = os.open(os.path.join(layer, "etc"), _DIRECTORY_FLAGS)
        except OSError:
            continue
        try:
            # O_NONBLOCK, since opening a FIFO named `passwd` would wait for a writer.
            opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            continue
        except OSError:
            return b""
        finally:
            os.close(directory)
        with os.fdopen(opened, "rb") as content:
            return content.read(_MAX_BYTES)
    return b""
