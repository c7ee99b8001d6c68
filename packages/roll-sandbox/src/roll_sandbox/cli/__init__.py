"""`roll-sandbox`: a service that runs sandboxes for others, and the commands to use it."""

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
"""The module of each command."""


class _Commands(click.Group):
    """A group that imports a command only when it is used, so that no other command of `roll` waits for the import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, for help and completion."""
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command and return it; `None` if no command has this name."""
        if cmd_name not in _MODULES:
            return None
        return cast("click.Command", getattr(import_module(f"{__name__}.{_MODULES[cmd_name]}"), cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command line's command; for an unknown name, the error suggests the nearest one."""
        if args[0] not in _MODULES and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'.{suggest_nearest(args[0], list(_MODULES))}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands)
def sandbox() -> None:
    """Run sandboxes for others, as a service.

    \b
    roll-sandbox token create trainer      a token for an owner named trainer; it is shown once
    roll-sandbox serve                     answer on this machine
    roll-sandbox workers                   the machines that run sandboxes for it
    roll-sandbox run -- python3 -V         a program in a sandbox of a service
    roll-sandbox shell                     a person in one
    """
