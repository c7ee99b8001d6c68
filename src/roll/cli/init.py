"""`roll init`: writes the examples of the package as the user's own files."""

from __future__ import annotations

from pathlib import Path

import click

from roll.cli.completing import directories
from roll.errors import UserError

__all__ = ["init", "shipped_examples"]


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", shell_complete=directories)
def init(directory: str) -> None:
    """Write the examples to DIR/examples: configurations, and the rewards, environments and agents that they use.

    \b
    roll init work
    cd work
    roll train examples/quickstart.yaml

    They are this version's, and yours to change: a file that differs from ours is never overwritten.
    """
    source, target = shipped_examples(), Path(directory) / "examples"
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if _is_one(path)]
    changed = [name for name in files if _differs(source / name, target / name)]
    if changed:
        raise UserError(
            f"{len(changed)} of {len(files)} files in '{target}' differ from this version's examples, first "
            f"'{changed[0]}': nothing was written. Give another directory, or move them."
        )
    try:
        for name in files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((source / name).read_bytes())
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written: {error.strerror}. Give another directory.") from None
    click.echo(f"{len(files)} files in {target}. Next:\n")
    if directory != ".":
        click.echo(f"  cd {directory}")
    click.echo("  roll check examples/quickstart.yaml\n  roll train examples/quickstart.yaml")


def shipped_examples() -> Path:
    """Return the directory of examples: in the installed package, or in the source tree."""
    package = Path(__file__).parents[1]
    places = (package / "_examples", package.parents[1] / "examples")
    found = next((place for place in places if (place / "quickstart.yaml").is_file()), None)
    if found is None:
        raise UserError(f"this installation has no examples ({places[0]}): install it again.")
    return found


def _is_one(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _differs(ours: Path, theirs: Path) -> bool:
    return theirs.exists() and (not theirs.is_file() or theirs.read_bytes() != ours.read_bytes())
