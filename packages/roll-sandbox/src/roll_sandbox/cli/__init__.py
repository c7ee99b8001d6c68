"""The commands of `roll-sandbox`: run a sandbox service, and use it."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import click

from roll_sandbox.names import suggest_nearest

__all__ = ["sandbox"]

_MODULES = {
    **dict.fromkeys(("serve", "worker"), "serve"),
    **dict.fromkeys(("workers", "drain", "undrain"), "workers"),
    **dict.fromkeys(("run", "shell"), "run"),
    **dict.fromkeys(("ls", "logs", "stop", "top"), "inspection"),
    "token": "tokens",
    "quota": "quotas",
    "image": "images",
}
"""Module that defines each command."""


class _Commands(click.Group):
    """A group that imports a command only when it is used, so that the import does not slow down other commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, for the help text and completion."""
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; `None` if no command has this name."""
        if cmd_name not in _MODULES:
            return None
        return cast("click.Command", getattr(import_module(f"{__name__}.{_MODULES[cmd_name]}"), cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command that the command line names; the error for an unknown name suggests the nearest one."""
        if args[0] not in _MODULES and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'.{suggest_nearest(args[0], list(_MODULES))}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands)
def sandbox() -> None:
    """Run a sandbox service, or programs in its sandboxes.

    \b
    roll-sandbox token create trainer      create a token for the owner 'trainer', and print it once
    roll-sandbox serve                     serve sandboxes on this machine
    roll-sandbox workers                   list the machines that run sandboxes for the service
    roll-sandbox run -- python3 -V         run a program in a sandbox of the service
    roll-sandbox shell                     open a shell in a sandbox of the service
    """
