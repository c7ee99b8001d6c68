"""Merges layers into one directory, for machines whose sandboxes cannot mount overlays."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable

__all__ = ["merge"]


def merge(layers: Iterable[str], target: str) -> None:
    """Fill a directory with what an overlay of these layers, lowest first, would show. Files are hard-linked."""
    for layer in layers:
        _add(layer, target)


def _add(source: str, target: str) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            place = os.path.join(target, entry.name)
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                if _is_opaque(entry.path) or not _is_directory(place):
                    _clear(place)
                    os.mkdir(place)
                _add(entry.path, place)
                os.chmod(place, stat.S_IMODE(found.st_mode))
                continue
            _clear(place)
            if not stat.S_ISCHR(found.st_mode):  # a whiteout: the layer removes this name
                os.link(entry.path, place, follow_symlinks=False)


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _clear(path: str) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
