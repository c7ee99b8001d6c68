"""`roll check`: the report on a configuration, printed."""

from __future__ import annotations

import sys

import click

from roll.config.load import load_config
from roll.errors import UserError
from roll.pipelines.registry import CHECKS
from roll.process_environment import prepare_environment

__all__ = ["check"]


def check(file: str, overrides: tuple[str, ...], *, own_process: bool) -> None:
    """Print the report on a configuration.

    Args:
        file: the configuration.
        overrides: `key=value` changes.
        own_process: nothing else runs in this process, so torch may be kept from loading (it takes seconds).

    Raises:
        UserError: the run could not start.
    """
    config = load_config(file, overrides)
    prepare_environment()
    if own_process and not config.model.trust_remote_code:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's way to say: not to be imported
    report = CHECKS.get(config.pipeline)(config)
    click.echo(str(report))
    if report.problems:
        raise UserError("\n".join(["this run cannot start:", *(f"  {problem}" for problem in report.problems)]))
