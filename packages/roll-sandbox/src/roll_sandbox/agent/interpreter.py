"""Runs Python source as a program, in a fork of the agent's interpreter."""

from __future__ import annotations

import _sitebuiltins
import builtins
import os
import sys

from roll_sandbox.agent import kernel


def prepare_interpreter():
    """Prepare a fork of the agent's interpreter for running a program; a second call does nothing."""
    if _kept_modules:
        return
    kernel.set_malloc_perturb(False)  # only now, since the agent's frames held data of the last program
    _kept_modules.extend(
        sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "roll_sandbox"
    )
    end = "Ctrl-D (i.e. EOF)"
    builtins.quit, builtins.exit = _sitebuiltins.Quitter("quit", end), _sitebuiltins.Quitter("exit", end)


compile("", "program.py", "exec")  # the first call creates the AST classes, which would take 1 ms in every fork
_kept_modules = []
"""Keeps the agent's modules alive in a program, since freeing them would take time."""


def run_python(source, argv):
    """Run source code as `__main__`, like `python file`, and end the process.

    Must be called at the top of the stack. A complete shutdown of the interpreter would take longer than most programs,
    so only the steps that a program can observe are executed: threads are joined, exit functions run, the program's
    variables are deleted (which closes files), and output is flushed.
    """
    prepare_interpreter()
    main = type(sys)("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.argv = ["program.py", *argv]
    sys.path.insert(0, os.getcwd())
    sys.excepthook = _print_exception
    code = 0
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = _get_exit_code(error.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    # As in Python, the exit code is 120 if output cannot be written.
    code = _shut_down_interpreter(main) or code
    os._exit(code)


def _get_exit_code(value):
    """Return the exit code for `sys.exit(value)`; print `value` to stderr, as Python does, if it is a message."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(str(value) + "\n")
    return 1


def _shut_down_interpreter(main):
    """Shut the interpreter down without freeing everything; return the exit code, which is not 0 if output was lost."""
    threading = sys.modules.get("threading")
    if threading is not None:
        threading._shutdown()  # joins the threads that are not daemons
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()
    main.__dict__.clear()
    lost = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            lost = 120
    return lost


def _print_exception(kind, error, trace):
    """Print an exception, with a traceback that leaves out the frames of the agent."""
    while trace is not None and trace.tb_frame.f_code.co_filename != "program.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
