"""What the commands of `roll sandbox` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from roll.errors import ConfigError
from roll.version import install_extra

if TYPE_CHECKING:
    from roll.sandbox.service.store import Store

__all__ = ["database_option", "missing_packages", "opened_store"]

database_option = click.option(
    "--database", metavar="URL", default=None, help="As SQLAlchemy has them; else a SQLite file of this user."
)


def missing_packages(error: ImportError) -> ConfigError:
    return ConfigError(f"`roll sandbox` needs packages that are not installed ({error}): {install_extra('sandbox')}")


def opened_store(database: str | None) -> Store:
    """A service's database, with the tables of this version."""
    try:
        from roll.sandbox.service.settings import default_database
        from roll.sandbox.service.store import Store
    except ImportError as error:
        raise missing_packages(error) from None
    store = Store(database or default_database())
    store.migrate()
    return store
