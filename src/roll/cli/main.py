"""Runs a command, and converts its outcome to a message and an exit code.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed: a message, and the file with the details |
| 2 | a mistake that the user can correct: one message, nothing was overwritten |
| 3 | an alarm stopped the run; everything is saved |
| 129, 130, 143 | interrupted (SIGHUP, Ctrl-C, SIGTERM); a run saves its state first |
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import click

from roll.cli.commands import CommandState, roll
from roll.errors import AlarmError, RollError, UserError, iterate_leaf_errors, shorten
from roll.tracking.escape import escape_controls

__all__ = ["exit_process", "run", "run_guarded"]

END_TIMEOUT_S = 1.0
"""Timeout for threads to notice that their processes were ended, and to clean up."""
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def run(arguments: Sequence[str], *, own_process: bool = False) -> int:
    """Run `roll` with these arguments, and print any exception as a message.

    Args:
        arguments: the command line, without `roll`.
        own_process: whether this process runs nothing else, so that a command may change its global state.

    Returns:
        The exit code.
    """
    state = CommandState(own_process=own_process)
    return run_guarded(
        lambda: roll.main(args=list(arguments), prog_name="roll", standalone_mode=False, obj=state), state
    )


def exit_process(code: int) -> NoReturn:
    """End this process, even if threads are still running.

    Another interrupt while this function waits for threads ends the process immediately.
    """
    # A normal exit joins all threads: it would wait for a tracker whose server does not respond, or for a computation
    # that a canceled start has left running.
    try:
        can_exit_normally = not _has_leftover_threads()
    except KeyboardInterrupt:
        can_exit_normally = False
    if can_exit_normally:
        sys.exit(code)
    # `os._exit` skips exit hooks and buffers, so logs and streams are flushed here.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _has_leftover_threads() -> bool:
    """Return whether threads or processes that the command started are still running."""
    # Looked up in `sys.modules`, since a module that the command did not import has started no threads.
    sinks, running = sys.modules.get("roll.tracking.sinks"), sys.modules.get("roll.running")
    if sinks is not None and sinks.has_detached_threads():
        return True
    return running is not None and running.has_detached_threads(END_TIMEOUT_S)


def run_guarded(action: Callable[[], object], state: CommandState) -> int:
    """Run `action`, and print any exception as a message on stderr.

    Returns:
        The exit code: after success, the return value of `action` if it is an integer, otherwise 0.
    """
    try:
        result = action()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _print_error(_describe_interrupt(state))
        return 130
    except Exception as error:
        return _report_failure(_convert_sandbox_error(error), state)


def _convert_sandbox_error(error: Exception) -> Exception:
    """Convert an error of the sandbox package to one of ROLL; return any other error unchanged."""
    if "roll_sandbox.errors" not in sys.modules:
        return error
    from roll.sandbox_errors import translate_error

    found = translate_error(error)
    assert isinstance(found, Exception)
    return found


def _describe_interrupt(state: CommandState) -> str:
    if state.run_dir is not None and (state.run_dir / "checkpoints").is_dir():
        return f"Interrupted. Continue with: roll resume {state.run_dir}"
    return "Interrupted."


def _report_failure(error: Exception, state: CommandState) -> int:
    signal_name = next((leaf.signal_name for leaf in iterate_leaf_errors(error) if hasattr(leaf, "signal_name")), None)
    if signal_name is not None:
        _print_error(_describe_interrupt(state))
        return 128 + signal.Signals[signal_name]
    user = next((leaf for leaf in iterate_leaf_errors(error) if isinstance(leaf, UserError)), None)
    if user is not None:
        _print_error(f"Error: {user}")
        return 2
    files = [leaf for leaf in iterate_leaf_errors(error) if isinstance(leaf, OSError)]
    too_long = next((leaf for leaf in files if leaf.errno == errno.ENAMETOOLONG), None)
    if too_long is not None:
        _print_error(f"Error: the file name {shorten(too_long.filename)} is too long.")
        return 2
    disk = next((leaf for leaf in files if leaf.errno in _DISK_ERRORS), None)
    if disk is not None:
        place = f" '{disk.filename}'" if disk.filename else ""
        _print_error(f"Error: cannot write{place}: {disk.strerror}. Free disk space or check permissions.")
        return 2
    alarm = next((leaf for leaf in iterate_leaf_errors(error) if isinstance(leaf, AlarmError)), None)
    if alarm is not None:
        _print_error(f"Stopped by an alarm: {alarm}. Continue with: roll resume {state.run_dir}")
        return 3
    known = next((leaf for leaf in iterate_leaf_errors(error) if isinstance(leaf, RollError)), None)
    report = _write_traceback(error, state)
    what = str(known) if known is not None else f"unexpected {type(error).__name__}: {_get_first_line(error)}"
    _print_error(f"Error: {what}")
    _print_error(f"Details: {report}" if report else traceback.format_exc())
    if state.run_dir is not None and any((state.run_dir / "checkpoints").glob("step-*")):
        _print_error(f"Continue from the newest checkpoint with: roll resume {state.run_dir}")
    return 1


def _print_error(text: str) -> None:
    """Print text to stderr, with control characters escaped; do nothing if stderr is closed."""
    with contextlib.suppress(OSError):
        click.echo(escape_controls(text), err=True)


def _get_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _write_traceback(error: Exception, state: CommandState) -> Path | None:
    """Write the traceback to the run's logs, or to the system's temporary directory if there are none.

    Returns:
        The file; `None` if it could not be written.
    """
    logs = state.run_dir / "logs" if state.run_dir is not None else None
    name = f"error-{datetime.now():%Y%m%d-%H%M%S}.log"
    text = "".join(traceback.format_exception(error))
    for directory in (logs, Path(tempfile.gettempdir())):
        if directory is None or not directory.is_dir():
            continue
        try:
            path = directory / (name if directory == logs else f"roll-{name}")
            path.write_text(text, encoding="utf-8")
        except OSError:
            continue
        return path
    return None
