"""Merges layers into one directory, for machines on which sandboxes cannot mount overlays."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable

__all__ = ["merge"]


def merge(layers: Iterable[str], target: str) -> None:
    """Fill a directory with the content of an overlay of these layers, lowest first. Files are hard-linked."""
    for layer in layers:
        _merge_directory(layer, target)


def _merge_directory(source: str, target: str) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            place = os.path.join(target, entry.name)
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                # An opaque directory hides lower directories of its name, and a directory replaces a file
                # (overlayfs.rst).
                if _is_opaque(entry.path) or not _is_directory(place):
                    _remove_existing(place)
                    os.mkdir(place)
                _merge_directory(entry.path, place)
                os.chmod(place, stat.S_IMODE(status.st_mode))
                continue
            _remove_existing(place)
            if not stat.S_ISCHR(status.st_mode):  # a whiteout: the layer removes this name
                os.link(entry.path, place, follow_symlinks=False)


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _remove_existing(path: str) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
