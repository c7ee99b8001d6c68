"""Runs a command, and converts every way in which it can end to a message and an exit code.

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
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import click

from roll.cli.commands import Session, roll
from roll.errors import AlarmError, RollError, UserError, leaves, short
from roll.tracking.visible import printable

__all__ = ["end", "guarded", "run"]

END_TIMEOUT_S = 1.0
"""Timeout for threads to notice that their processes were ended, and to clean up."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def run(arguments: Sequence[str], *, own_process: bool = False) -> int:
    """Run the command line `arguments`; `own_process` means that this process does nothing else.

    Returns:
        The exit code.
    """
    session = Session(own_process=own_process)
    return guarded(
        lambda: roll.main(args=list(arguments), prog_name="roll", standalone_mode=False, obj=session), session
    )


def end(code: int) -> NoReturn:
    """End this process, whatever threads are left.

    Otherwise a tracker's client would wait for a server that does not respond, and Python for a thread that still
    computes for a start that was canceled. Another interrupt during the wait ends the process immediately.
    """
    try:
        waits_for_nothing = not any(_leftover_threads())
    except KeyboardInterrupt:
        waits_for_nothing = False
    if waits_for_nothing:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _leftover_threads() -> Iterator[bool]:
    """Yield whether each imported module that can leave threads or processes behind did so."""
    if sinks := sys.modules.get("roll.tracking.sinks"):
        yield sinks.has_detached_threads()
    if running := sys.modules.get("roll.running"):
        yield running.has_detached_threads(END_TIMEOUT_S)


def guarded(action: Callable[[], object], session: Session) -> int:
    """Run `action`, and print any exception as a message on stderr.

    Returns:
        The exit code: the return value of `action`, if it is a number.
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
        _print_error(_interrupted(session))
        return 130
    except Exception as error:
        return _failed(_of_roll(error), session)


def _of_roll(error: Exception) -> Exception:
    """Return the error, converted to ROLL's hierarchy if it is a sandbox's."""
    if "roll_sandbox.errors" not in sys.modules:
        return error
    from roll.sandbox_errors import translate_error

    found = translate_error(error)
    assert isinstance(found, Exception)
    return found


def _interrupted(session: Session) -> str:
    if session.run_dir is not None and (session.run_dir / "checkpoints").is_dir():
        return f"Interrupted. Continue with: roll resume {session.run_dir}"
    return "Interrupted."


def _failed(error: Exception, session: Session) -> int:
    signal_name = next((leaf.signal_name for leaf in leaves(error) if hasattr(leaf, "signal_name")), None)
    if signal_name is not None:
        _print_error(_interrupted(session))
        return 128 + signal.Signals[signal_name]
    user = next((leaf for leaf in leaves(error) if isinstance(leaf, UserError)), None)
    if user is not None:
        _print_error(f"Error: {user}")
        return 2
    files = [leaf for leaf in leaves(error) if isinstance(leaf, OSError)]
    too_long = next((leaf for leaf in files if leaf.errno == errno.ENAMETOOLONG), None)
    if too_long is not None:
        _print_error(f"Error: {short(too_long.filename)} is longer than a file's name may be.")
        return 2
    disk = next((leaf for leaf in files if leaf.errno in _DISK), None)
    if disk is not None:
        place = f" '{disk.filename}'" if disk.filename else ""
        _print_error(f"Error: cannot use{place}: {disk.strerror}. Free space or check permissions.")
        return 2
    alarm = next((leaf for leaf in leaves(error) if isinstance(leaf, AlarmError)), None)
    if alarm is not None:
        _print_error(f"Stopped by an alarm: {alarm}. Continue with: roll resume {session.run_dir}")
        return 3
    known = next((leaf for leaf in leaves(error) if isinstance(leaf, RollError)), None)
    report = _report(error, session)
    what = str(known) if known is not None else f"unexpected {type(error).__name__}: {_first_line(error)}"
    _print_error(f"Error: {what}")
    _print_error(f"Details: {report}" if report else traceback.format_exc())
    if session.run_dir is not None and any((session.run_dir / "checkpoints").glob("step-*")):
        _print_error(f"What was saved goes on with: roll resume {session.run_dir}")
    return 1


def _print_error(text: str) -> None:
    """Print to stderr if it is still open, with control characters made harmless."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), err=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _report(error: Exception, session: Session) -> Path | None:
    """Write the traceback to the run's logs, or to a temporary directory before they exist."""
    logs = session.run_dir / "logs" if session.run_dir is not None else None
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
