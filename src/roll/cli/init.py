"""`roll init`: the files of a new run, or the examples that are shipped with the package."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from roll.cli.completion import complete_directories
from roll.cli.scaffold import OWN_CODE, PIPELINES, REWARDS, SAMPLE_DATA, NewRun, build_files, read_column_names
from roll.errors import UserError

__all__ = ["find_shipped_examples", "init"]

DEFAULT_MODEL = "smollm2-135m-instruct"


class RewardOption(click.ParamType):
    """A key of `REWARDS`, or `FILE.py:FUNCTION` of an existing file."""

    name = "reward"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` if it is valid.

        Raises:
            click.BadParameter: `value` is not a known reward, or the file does not exist.
        """
        if value in REWARDS:
            return value
        file, separator, function = value.rpartition(":")
        if not (separator and file.endswith(".py") and function.isidentifier()):
            self.fail(f"'{value}' is not a reward: use one of {', '.join(REWARDS)}, or FILE.py:FUNCTION.", param, ctx)
        if not Path(file).is_file():
            self.fail(f"file '{file}' does not exist.", param, ctx)
        return value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the text for the option's value in the help."""
        return "REWARD"


@click.command()
@click.argument("directory", metavar="[DIR]", default=".", shell_complete=complete_directories)
@click.option("--pipeline", type=click.Choice(list(PIPELINES)), help="Pipeline of the run; by default rlvr.")
@click.option("--model", help=f"Model directory, Hub ID or name from the catalog; by default {DEFAULT_MODEL}.")
@click.option(
    "--data", metavar="FILE", help=f"JSONL or Parquet file with your rows; `{SAMPLE_DATA}` writes a small file."
)
@click.option(
    "--reward",
    type=RewardOption(),
    help=f"Reward of an answer: {', '.join(REWARDS)}, or FILE.py:FUNCTION; `{OWN_CODE}` writes a reward.py.",
)
@click.option("--teacher", help="Teacher model, for pipelines that distill.")
@click.option("--environment", help=f"Environment id of an agentic run; `{OWN_CODE}` writes an environment.py.")
@click.option("--examples", is_flag=True, help="Write the shipped examples to DIR/examples instead.")
@click.option("--yes", is_flag=True, help="Do not prompt: use the defaults of all options that are not specified.")
@click.pass_context
def init(context: click.Context, directory: str, examples: bool, yes: bool, **options: str | None) -> None:
    """Create a run in DIR: write a commented configuration and the files that it needs, and check the run.

    \b
    roll init work                                                  prompt for all options
    roll init work --pipeline rlvr --data rows.jsonl --reward own   prompt for the other options
    roll init work --examples                                       write the shipped examples to work/examples

    Existing files are never overwritten.
    """
    if examples:
        if unused := [f"--{name}" for name, value in options.items() if value is not None]:
            raise UserError(f"{', '.join(unused)} cannot be combined with --examples, which writes the shipped files.")
        return _write_examples(directory)
    target = Path(directory)
    run = _choose_options(target, options, interactive=not yes and sys.stdin.isatty())
    files = build_files(run)
    _write_files(target, files)
    roll = context.find_root().command
    check = roll.get_command(context, "check") if isinstance(roll, click.Group) else None
    assert check is not None
    click.echo("\nroll check config.yaml\n")
    # Relative paths of a configuration refer to the directory in which the run is started.
    with contextlib.chdir(target):
        context.invoke(check, file="config.yaml", overrides=(), dry_run=False)
    click.echo("\nNext:\n")
    if directory != ".":
        click.echo(f"  cd {directory}")
    for stub in ("reward.py", "environment.py"):
        if stub in files:
            click.echo(f"  # edit {stub} first: it is only an example")
    click.echo(f"  {_get_command()} train config.yaml")


def _choose_options(target: Path, arguments: Mapping[str, str | None], *, interactive: bool) -> NewRun:
    """Return the options of a new run: from `arguments`, else from prompts if `interactive`, else the defaults.

    Raises:
        UserError: an option without a default is missing, or an option does not apply to the pipeline.
    """

    def choose_option(
        name: str,
        question: str,
        default: str | None,
        choices: Mapping[str, str] | None = None,
        value_type: click.ParamType | None = None,
    ) -> str:
        value = arguments.get(name)
        if value is None and interactive:
            for kind, meaning in (choices or {}).items():
                click.echo(f"  {kind:<20}{meaning}")
            kind_of_value = value_type or (click.Choice(list(choices)) if choices else str)
            value = click.prompt(question, default=default, type=kind_of_value, show_choices=False)
        if value is None and default is None:
            raise UserError(f"--{name} is required: {question}")
        return value if value is not None else str(default)

    pipeline = choose_option("pipeline", "What should the run do?", "rlvr", PIPELINES)
    options: dict[str, Any] = {"pipeline": pipeline, "model": choose_option("model", "Which model?", DEFAULT_MODEL)}
    options["name"] = target.resolve().name or "run"
    empty = NewRun(**options)
    if empty.needs_data:
        file = choose_option("data", f"Which JSONL or Parquet file? ({SAMPLE_DATA} writes a small one)", SAMPLE_DATA)
        options["data"] = file
        if file != SAMPLE_DATA:
            options["columns"] = read_column_names(Path(file))
            options["data"] = str(_make_relative(target, Path(file)))
    if empty.needs_reward:
        scored = {**REWARDS, "FILE.py:FUNCTION": "an existing function"}
        reward = choose_option("reward", "How are answers scored?", "math", scored, RewardOption())
        if reward not in REWARDS:
            file, _, function = reward.rpartition(":")
            reward = f"{_make_relative(target, Path(file))}:{function}"
        options["reward"] = reward
    if empty.needs_teacher:
        options["teacher"] = choose_option("teacher", "Which teacher model? (a run, a directory or a Hub ID)", None)
    if not empty.needs_data:
        options["environment"] = choose_option("environment", f"Which environment? ({OWN_CODE} writes one)", OWN_CODE)
    if unused := [f"--{name}" for name, value in arguments.items() if value is not None and name not in options]:
        raise UserError(f"the pipeline '{pipeline}' does not support {', '.join(unused)}: remove the option.")
    return NewRun(**options)


def _make_relative(target: Path, file: Path) -> Path:
    """Return the path of `file` relative to the directory `target` if the file is inside it, otherwise absolute."""
    file, target = file.resolve(), target.resolve()
    return file.relative_to(target) if file.is_relative_to(target) else file


def _write_files(target: Path, files: Mapping[str, str]) -> None:
    """Write `files` into `target`; write none of them if one already exists.

    Raises:
        UserError: a file already exists, or cannot be written.
    """
    if there := [name for name in files if (target / name).exists()]:
        raise UserError(
            f"'{target / there[0]}' already exists: nothing was written. Choose another directory, or move the file."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")
            click.echo(f"wrote {target / name}")
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written: {error.strerror}. Choose another directory.") from None


def _write_examples(directory: str) -> None:
    """Write the shipped examples to `directory`/examples; write nothing if a file there differs.

    Raises:
        UserError: an existing file differs from the example, or a file cannot be written.
    """
    source, target = find_shipped_examples(), Path(directory) / "examples"
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if _is_example(path)]
    changed = [name for name in files if _is_different(source / name, target / name)]
    if changed:
        raise UserError(
            f"{len(changed)} of {len(files)} files in '{target}' differ from this version's examples, for example "
            f"'{changed[0]}': nothing was written. Choose another directory, or move the files."
        )
    try:
        for name in files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((source / name).read_bytes())
    except OSError as error:
        raise UserError(f"'{error.filename}' cannot be written: {error.strerror}. Choose another directory.") from None
    click.echo(f"{len(files)} files in {target}. Next:\n")
    if directory != ".":
        click.echo(f"  cd {directory}")
    command = _get_command()
    click.echo(f"  {command} check examples/quickstart.yaml\n  {command} train examples/quickstart.yaml")


def _get_command() -> str:
    """Return the command `roll`, with its path if it is not on the PATH (virtual environment not activated)."""
    return "roll" if shutil.which("roll") else shlex.quote(str(Path(sys.argv[0]).absolute()))


def find_shipped_examples() -> Path:
    """Return the directory of examples: in the installed package, or in the source tree.

    Raises:
        UserError: the installation has no examples.
    """
    package = Path(__file__).parents[1]
    places = (package / "_examples", package.parents[1] / "examples")
    found = next((place for place in places if (place / "quickstart.yaml").is_file()), None)
    if found is None:
        raise UserError(f"the examples are missing from this installation of ROLL ({places[0]}): reinstall ROLL.")
    return found


def _is_example(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _is_different(shipped: Path, path: Path) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != shipped.read_bytes())
