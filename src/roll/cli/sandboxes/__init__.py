"""`roll sandbox`: a service that runs sandboxes for others, and what a person does with it."""

from __future__ import annotations

import click

from roll.cli.sandboxes.images import image
from roll.cli.sandboxes.looking import logs, ls, stop, top
from roll.cli.sandboxes.quotas import quota
from roll.cli.sandboxes.running import run, shell
from roll.cli.sandboxes.serving import serve, worker
from roll.cli.sandboxes.tokens import token
from roll.cli.sandboxes.workers import drain, undrain, workers

__all__ = ["sandbox"]


@click.group()
def sandbox() -> None:
    """Run sandboxes for others, as a service.

    \b
    roll sandbox token create trainer      a token for an owner named trainer; it is shown once
    roll sandbox serve                     answer on this machine
    roll sandbox workers                   the machines that run sandboxes for it
    roll sandbox run -- python3 -V         a program in a sandbox of a service
    roll sandbox shell                     a person in one
    """


for command in (serve, worker, workers, drain, undrain, token, quota, image, run, shell, ls, logs, stop, top):
    sandbox.add_command(command)
