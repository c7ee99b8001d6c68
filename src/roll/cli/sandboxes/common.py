"""What the commands of `roll sandbox` share."""

from __future__ import annotations

import click

from roll.errors import ConfigError
from roll.version import install_extra

__all__ = ["database_option", "missing_packages"]

database_option = click.option(
    "--database", metavar="URL", default=None, help="As SQLAlchemy has them; else a SQLite file of this user."
)


def missing_packages(error: ImportError) -> ConfigError:
    return ConfigError(f"`roll sandbox` needs packages that are not installed ({error}): {install_extra('sandbox')}")
