"""ROLL's own files in sandboxes, wherever these run.

A mount of the client's directory would need the same path on the machine of a service, and leave to it what is read.
`roll:PLACE@DIGEST` names a directory of the installed package instead: a worker shows its own, if that is the same.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from roll_sandbox.errors import SandboxRequestError

__all__ = ["library_source", "resolved_source"]

_ROOT = Path(__file__).parents[1]
_SCHEME = "roll:"


def library_source(place: str) -> str:
    """What a mount for a service has as its source.

    Args:
        place: a directory below the package, such as `rewards/code/inside`.
    """
    return f"{_SCHEME}{place}@{_digest(_ROOT / place)}"


def resolved_source(source: str) -> str | None:
    """The directory here that such a source names; `None` for a path.

    Raises:
        SandboxRequestError: there is none, or its content is another.
    """
    if not source.startswith(_SCHEME):
        return None
    place, _, digest = source.removeprefix(_SCHEME).partition("@")
    path = (_ROOT / place).resolve()
    if not path.is_relative_to(_ROOT.resolve()) or not path.is_dir():
        raise SandboxRequestError(f"a mount of '{source[:200]}': ROLL has no such directory.")
    if _digest(path) != digest:
        raise SandboxRequestError(
            f"a mount of ROLL's '{place}': this worker has another version of it. Install the same version of ROLL on "
            "both machines."
        )
    return str(path)


@functools.cache
def _digest(directory: Path) -> str:
    """Of the names and contents of its Python files."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(directory)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:32]
