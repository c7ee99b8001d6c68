"""The commands. Each imports what it needs when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

__all__ = ["Session", "roll"]


@dataclass
class Session:
    """What `main` must know of a command that failed or was interrupted."""

    run_dir: Path | None = None


_overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
_file = click.argument("file", metavar="FILE")


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from roll.version import __version__

        click.echo(f"roll {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def roll() -> None:
    """Reinforcement-learning post-training of language models.

    \b
    roll train examples/quickstart.yaml                         train
    roll train examples/quickstart.yaml training.num_steps=20   with a changed value
    roll check examples/quickstart.yaml                         look before training
    """


@roll.command()
@_file
@_overrides
@click.pass_obj
def train(session: Session, file: str, overrides: tuple[str, ...]) -> None:
    """Train the model that FILE configures."""
    from roll.api import train as start
    from roll.config.load import load_config

    config = load_config(file, overrides)
    session.run_dir = config.run_dir
    start(config)
