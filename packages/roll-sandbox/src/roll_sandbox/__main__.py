"""The command `roll-sandbox` (also `python -m roll_sandbox`), with these exit codes:

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure, with a message |
| 2 | an error that the caller can fix, with a message |
| 130 | interrupted (Ctrl-C) |
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

from roll_sandbox.cli import sandbox
from roll_sandbox.errors import RollSandboxError, UserError
from roll_sandbox.sanitize import escape_control_chars
from roll_sandbox.version import DISTRIBUTION

__all__ = ["main", "run"]


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`; errors are printed to stderr.

    Returns:
        The exit code.
    """
    try:
        result = sandbox.main(args=list(arguments), prog_name=DISTRIBUTION, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _print_error("Interrupted.")
        return 130
    except UserError as error:
        _print_error(f"Error: {error}")
        return 2
    except (RollSandboxError, OSError) as error:
        _print_error(f"Error: {error}")
        return 1
    except Exception as error:
        _print_error(f"Error: unexpected {type(error).__name__}: {error}\n{traceback.format_exc()}")
        return 1


def _print_error(text: str) -> None:
    """Write a message to stderr, with control characters escaped; ignore a closed stderr."""
    with suppress(OSError):
        click.echo(escape_control_chars(text), err=True)


def main() -> None:
    """Run the console script `roll-sandbox`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
