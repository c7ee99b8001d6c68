"""Run Python source in a forked interpreter, as `python file` would."""

from __future__ import annotations

import builtins
import os
import sys
import traceback

SOURCE_FILE = "solution.py"
JUDGE_IMPORTS = """
from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect, bisect_left, bisect_right, insort
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from copy import copy, deepcopy
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import *
from itertools import *
from math import ceil, comb, cos, exp, fabs, factorial, floor, gcd, inf, isqrt, lcm, log, log2, log10, pi
from math import sin, sqrt, tan
"""
"""The imports that online judges make before they call a function (LeetCode, and the testers of APPS and
LiveCodeBench)."""


def make_namespace(name):
    """Return the variables of a new module, which can be imported under `name`."""
    module = type(sys)(name)
    module.__builtins__ = builtins
    module.__file__ = SOURCE_FILE
    sys.modules[name] = module
    return module.__dict__


def run_main(code):
    """Execute code as `__main__`, then end the process: join threads, run exit functions, flush output."""
    status = 0
    variables = make_namespace("__main__")
    sys.argv = [SOURCE_FILE]
    try:
        exec(code, variables)
    except SystemExit as error:
        status = _get_exit_status(error.code)
    except BaseException as error:
        print_traceback(error)
        status = 1
    exit_process(status)


def exit_process(status):
    """End this process as Python does at the end of a program: join threads, run exit functions, flush output."""
    try:
        # `os._exit` skips threads and exit functions, while `sys.exit` would return into the code that forked this
        # process.
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit = sys.modules.get("atexit")
        if atexit is not None:
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # the program may have replaced its streams: the output is lost
        status = status or 120
    os._exit(status)


def print_traceback(error):
    """Print the traceback, without ROLL's frames, to standard error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE_FILE:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _get_exit_status(value):
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(str(value) + "\n")
    return 1


def find_entry(name, variables, as_online_judge):
    """Return the function that a case calls.

    Args:
        name: An expression; empty for the only function that the code defines.
        variables: The module's variables, after its code has run.
        as_online_judge: If True, `f` also finds a method of a class `Solution`, and `Solution().f` also finds a plain
            function `f`.
    """
    solution = variables.get("Solution")
    if not name:
        return _find_only_function(solution, variables)
    method = name.removeprefix("Solution().")
    if not as_online_judge or name in variables or not method.isidentifier():
        return eval(name, variables)
    if isinstance(solution, type) and hasattr(solution, method):
        return getattr(solution(), method)
    return eval(method if solution is None else name, variables)


def _find_only_function(solution, variables):
    """Return the only public method of a class `Solution`, or else the only public function that the code defines."""
    owner = vars(solution) if isinstance(solution, type) else variables
    names = [name for name, value in owner.items() if name[:1] != "_" and _is_defined_in_code(value)]
    if len(names) != 1:
        raise NameError(f"the tests do not name a function, and the answer defines {len(names)} functions")
    return getattr(solution(), names[0]) if isinstance(solution, type) else variables[names[0]]


def _is_defined_in_code(value):
    function = getattr(value, "__func__", value)
    return getattr(getattr(function, "__code__", None), "co_filename", "") == SOURCE_FILE
