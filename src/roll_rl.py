"""The console script's first step, outside the package `roll`: is `roll` ours at all?

The distribution is `roll-rl`, because the name `roll` on the package index belongs to a web framework. That one is
imported as `roll` as well: in one environment, each overwrites files of the other. This module has a name that nothing
else has, so it is found whichever of the two wins, and can say what is wrong.

Modules that import many others are imported late: no file of the current directory must take the place of one of these.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

__all__ = ["hidden", "main", "namesake"]


def namesake() -> str | None:
    """Return a message if another distribution has installed a package `roll` too; `None` otherwise."""
    from importlib import metadata

    try:
        other = metadata.distribution("roll")
    except metadata.PackageNotFoundError:
        return None
    if not any(file.as_posix() == "roll/__init__.py" for file in other.files or ()):
        return None
    return (
        f"the package 'roll' {other.version} is installed in this environment ({sys.prefix}) as well: it is another "
        "project, and both are imported as 'roll', so that only one of them can work. Install ROLL into an environment "
        "of its own, or remove the other: `pip uninstall roll`, then `pip install --force-reinstall --no-deps roll-rl`."
    )


def hidden() -> str | None:
    """What to tell the user whose Python finds another package or file `roll` first; `None` where it finds ours."""
    from importlib.util import find_spec

    found, ours = find_spec("roll"), Path(__file__).with_name("roll")
    place = Path(found.origin) if found is not None and found.origin else None
    if place is not None and (place.parent / "cli").is_dir():
        return None
    if place is not None and place.parent == ours:
        return (
            f"ROLL is imported from the archive '{ours.parent}', and it reads files of its own that Python does not "
            "find in there: unpack it, or install it (`pip install roll-rl`)."
        )
    return (
        f"Python finds another 'roll', {place or 'a directory without __init__.py'}, before ROLL's package ({ours}): "
        "rename or move it, or take its directory off PYTHONPATH."
    )


def main() -> None:
    """Entry point of the console script `roll`."""
    try:
        _look_in_the_current_directory_last()
        _write_what_cannot_be_encoded()
        problem = namesake() or hidden()
        if problem is not None:
            print(f"Error: {problem}", file=sys.stderr)
            sys.exit(2)
        from roll.cli import main as run

        run()
    except KeyboardInterrupt:  # before a command began, or after it ended: while a command runs, it says more
        print("Interrupted.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)


def _look_in_the_current_directory_last() -> None:
    """Let no file of the current directory take the place of an imported module: `python -m roll` looks there first.

    A directory that `PYTHONPATH` names, and that of this file, stay where they are.
    """
    here = os.getcwd()
    named = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if sys.path[0] in ("", here) and here not in (*named, str(Path(__file__).resolve().parent)):
        sys.path.append(sys.path.pop(0) or here)


def _write_what_cannot_be_encoded() -> None:
    """Where the terminal's encoding lacks a character (`PYTHONIOENCODING=latin1`), write `?` instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
