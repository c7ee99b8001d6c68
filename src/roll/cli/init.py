"""`roll init`: the files of a new run, or the examples that are shipped with the package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from roll.cli.completing import directories
from roll.cli.scaffold import OWN, PIPELINES, REWARDS, SAMPLE, NewRun, column_names, files_of_run
from roll.errors import UserError

__all__ = ["init", "shipped_examples"]

MODEL = "smollm2-135m-instruct"


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", shell_complete=directories)
@click.option("--pipeline", type=click.Choice(list(PIPELINES)), help="What the run does; rlvr by default.")
@click.option("--model", help=f"A directory, a hub id, or a name that ROLL knows; {MODEL} by default.")
@click.option("--data", metavar="FILE", help=f"A JSONL or Parquet file of your rows; `{SAMPLE}` writes a small one.")
@click.option("--reward", type=click.Choice(list(REWARDS)), help=f"How answers are scored; `{OWN}` writes a reward.py.")
@click.option("--teacher", help="The model that teaches, where the pipeline distills.")
@click.option("--environment", help=f"What an agentic run plays, by its id; `{OWN}` writes an environment.py.")
@click.option("--examples", is_flag=True, help="Write the shipped examples to DIR/examples instead.")
@click.option("--yes", is_flag=True, help="Ask nothing: take the default of every option that is not given.")
@click.pass_context
def init(context: click.Context, directory: str, examples: bool, yes: bool, **given: str | None) -> None:
    """Start a new run in DIR: write a configuration with comments, and what it needs, and check it.

    \b
    roll init work                                                  asks what to train
    roll init work --pipeline rlvr --data rows.jsonl --reward own   asks for the rest
    roll init work --examples                                       writes the shipped examples to work/examples

    A file that exists is never overwritten.
    """
    if examples:
        if unused := [f"--{name}" for name, value in given.items() if value is not None]:
            raise UserError(f"--examples writes the shipped examples, which {', '.join(unused)} cannot change.")
        return _write_examples(directory)
    target = Path(directory)
    run = _choose(target, given, asks=not yes and sys.stdin.isatty())
    _write_new(target, files_of_run(run))
    roll = context.find_root().command
    check = roll.get_command(context, "check") if isinstance(roll, click.Group) else None
    assert check is not None
    click.echo("\nroll check config.yaml\n")
    with contextlib.chdir(target):
        context.invoke(check, file="config.yaml", overrides=(), dry_run=False)
    click.echo("\nNext:\n")
    if directory != ".":
        click.echo(f"  cd {directory}")
    click.echo("  roll train config.yaml")


def _choose(target: Path, given: Mapping[str, str | None], *, asks: bool) -> NewRun:
    """Return what the options say, the user answers, or the defaults are, in this order.

    Raises:
        UserError: an option is missing that has no default, or does not belong to the pipeline.
    """

    def choice(name: str, question: str, default: str | None, kinds: Mapping[str, str] | None = None) -> str:
        value = given.get(name)
        if value is None and asks:
            for kind, meaning in (kinds or {}).items():
                click.echo(f"  {kind:<20}{meaning}")
            value = click.prompt(
                question, default=default, type=click.Choice(list(kinds)) if kinds else str, show_choices=False
            )
        if value is None and default is None:
            raise UserError(f"--{name} is missing: {question}")
        return value if value is not None else str(default)

    pipeline = choice("pipeline", "What should the run do?", "rlvr", PIPELINES)
    options: dict[str, Any] = {"pipeline": pipeline, "model": choice("model", "Which model?", MODEL)}
    options["name"] = target.resolve().name or "run"
    empty = NewRun(**options)
    if empty.needs_data:
        file = choice("data", f"Which JSONL or Parquet file? ({SAMPLE} writes a small one)", SAMPLE)
        options["data"] = file
        if file != SAMPLE:
            options["columns"] = column_names(Path(file))
            options["data"] = str(_from(target, Path(file)))
    if empty.needs_reward:
        options["reward"] = choice("reward", "How are answers scored?", "math", REWARDS)
    if empty.needs_teacher:
        options["teacher"] = choice("teacher", "Which model teaches? (a run, a directory or a hub id)", None)
    if not empty.needs_data:
        options["environment"] = choice("environment", f"Which environment? ({OWN} writes one)", OWN)
    if unused := [f"--{name}" for name, value in given.items() if value is not None and name not in options]:
        raise UserError(f"the pipeline '{pipeline}' has no use for {', '.join(unused)}: leave it out.")
    return NewRun(**options)


def _from(target: Path, file: Path) -> Path:
    """Return the path of `file` as seen from the directory of the configuration."""
    file, target = file.resolve(), target.resolve()
    return file.relative_to(target) if file.is_relative_to(target) else file


def _write_new(target: Path, files: Mapping[str, str]) -> None:
    """Write `files` into `target`, all or none.

    Raises:
        UserError: one exists, or cannot be written.
    """
    if there := [name for name in files if (target / name).exists()]:
        raise UserError(f"'{target / there[0]}' exists: nothing was written. Give another directory, or move it.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")
            click.echo(f"wrote {target / name}")
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written: {error.strerror}. Give another directory.") from None


def _write_examples(directory: str) -> None:
    """Write the shipped examples to `directory`/examples; a file that differs from the shipped one stays as it is.

    Raises:
        UserError: a file differs, or cannot be written.
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
    """Return the directory of examples: in the installed package, or in the source tree.

    Raises:
        UserError: this installation has none.
    """
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
