"""Mount installed Python packages and their requirements read-only into a sandbox."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from roll.errors import ConfigError
from roll_sandbox import Mount

__all__ = ["build_package_mounts"]


def build_package_mounts(names: Iterable[str], target: str) -> tuple[Mount, ...]:
    """Return mounts below the directory `target` for packages and, recursively, their requirements.

    Raises:
        ConfigError: A package is not installed.
    """
    directories: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, asked_for = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if asked_for:
                raise ConfigError(
                    f"sandboxes require the Python package '{name}', which is not installed: install it, or remove it "
                    "from sandbox.packages."
                ) from None
            continue  # a requirement for another platform or an extra
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".pth")):
                directories[top] = Path(str(distribution.locate_file(top))).resolve()
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement and _is_for_this_platform(requirement):
                waiting.append((re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0], False))
    return tuple(Mount(source=str(path), target=f"{target}/{top}") for top, path in sorted(directories.items()))


def _is_for_this_platform(requirement: str) -> bool:
    """Return whether a requirement applies to this platform; only the two most common markers are read."""
    _, _, marker = requirement.partition(";")
    return not ("sys_platform" in marker and "win32" in marker and sys.platform != "win32")
