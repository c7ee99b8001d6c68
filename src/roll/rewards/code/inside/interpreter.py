"""Running Python source in a forked interpreter, as `python file` would."""

from __future__ import annotations

import builtins
import os
import sys
import traceback

FILE = "solution.py"


def namespace(name):
    """A fresh module's variables; it can be imported under its name."""
    module = type(sys)(name)
    module.__builtins__ = builtins
    module.__file__ = FILE
    sys.modules[name] = module
    return module.__dict__


def run_main(code):
    """Execute as `__main__`, and end the process: threads waited for, exit functions run, output flushed."""
    status = 0
    variables = namespace("__main__")
    sys.argv = [FILE]
    try:
        exec(code, variables)
    except SystemExit as error:
        status = _status(error.code)
    except BaseException as error:
        report(error)
        status = 1
    leave(status)


def leave(status):
    """End this process."""
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit = sys.modules.get("atexit")
        if atexit is not None:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # whatever the program did to them: its output is lost
        status = status or 120
    os._exit(status)


def report(error):
    """The trace without our own frames, to standard error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _status(value):
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(str(value) + "\n")
    return 1
