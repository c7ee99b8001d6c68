"""The console script's first step, outside the package `roll`: is `roll` ours at all?

The distribution is `roll-rl`, because the name `roll` on the package index belongs to a web framework. That one is
imported as `roll` as well: in one environment, each overwrites files of the other. This module has a name that nothing
else has, so it is found whichever of the two wins, and can say what is wrong.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["hidden", "main", "namesake"]


def namesake() -> str | None:
    """What to tell the user where another distribution has put a package `roll` beside this one; `None` otherwise."""
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
    found, ours = find_spec("roll"), Path(__file__).with_name("roll")
    place = Path(found.origin) if found is not None and found.origin else None
    if place is not None and (place.parent / "cli").is_dir():
        return None
    return (
        f"Python finds another 'roll', {place or 'a directory without __init__.py'}, before ROLL's package ({ours}): "
        "rename or move it, or take its directory off PYTHONPATH."
    )


def main() -> None:
    """Entry point of the console script `roll`."""
    problem = namesake() or hidden()
    if problem is not None:
        print(f"Error: {problem}", file=sys.stderr)
        sys.exit(2)
    from roll.cli import main as run

    run()
