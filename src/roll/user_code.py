"""Import user-defined functions, and find their source files.

    rewards.py:score ──► the file itself ──► its imports: installed modules first, then files in its directory

The directory of a file and the current directory are appended to the end of `sys.path`, so that a user's
`tokenizers.py` or `random.py` does not shadow a module that a library imports. If a file imports such a name, a warning
reports which module is imported.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from roll.errors import ConfigError, find_raise_location, one_line_error
from roll.registry import did_you_mean, format_search_directory, import_object

__all__ = [
    "START_DIRECTORY_VARIABLE",
    "check_call",
    "check_factory",
    "compute_code_fingerprint",
    "find_source_files",
    "list_loaded_modules",
    "load_function",
]

logger = logging.getLogger(__name__)

START_DIRECTORY_VARIABLE = "ROLL_BEGUN_IN"
"""Environment variable with the parent's directory, for processes started in another directory (Ray workers)."""
_loaded_files: set[Path] = set()
"""User files that were imported."""


def load_function(path: str, kind: str) -> Callable[..., Any]:
    """Import a user's function: `package.module:name`, or `path/to/file.py:name`.

    Files and modules are searched first in the current directory, then in the directory in which the run was started. A
    file may import other files of its directory.

    Args:
        path: Import path of the function.
        kind: Type of function, for messages: `reward function`.

    Raises:
        ConfigError: The function cannot be imported, or is not a function.
    """
    return _load(path, kind, os.getcwd())


def check_call(function: Callable[..., Any], description: str, *arguments: str) -> None:
    """Check that a user's function accepts the arguments by position.

    A function without a signature, such as one written in C, passes.

    Args:
        function: The function, or a class whose constructor is called.
        description: Description of the function, for messages: `loss 'mine.py:loss'`.
        arguments: Names of the arguments, for messages.

    Raises:
        ConfigError: The function does not accept the arguments.
    """
    if not callable(function):
        raise ConfigError(f"{description} must be a function or a class, got {type(function).__name__}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        taken = str(signature) if len(str(signature)) <= 100 else "its signature"
        raise ConfigError(
            f"{description} is called with ({', '.join(arguments)}), which {taken} does not accept: {error}."
        ) from None


def check_factory(factory: Callable[..., Any], description: str, methods: Iterable[str], *arguments: str) -> None:
    """Check that a user's class accepts the arguments and has the methods. For a function, check only the arguments.

    Args:
        factory: The class or function.
        description: Description of the factory, for messages: `inference.engine 'mine.py:Engine'`.
        methods: Names of the methods that a class must have; the object that a function builds is not checked.
        arguments: Names of the arguments with which the factory is called, for messages.

    Raises:
        ConfigError: The factory does not accept the arguments, or lacks a method.
    """
    check_call(factory, description, *arguments)
    lacking = [name for name in methods if not callable(getattr(factory, name, None))]
    if isinstance(factory, type) and lacking:
        raise ConfigError(
            f"{description} does not define {', '.join(lacking)}: docs/python.md describes the required methods."
        )


@functools.cache
def _load(path: str, kind: str, directory: str) -> Callable[..., Any]:
    place, _, name = path.rpartition(":")
    file = Path(place).expanduser() if place.endswith(".py") else None
    start_directory = os.environ.get(START_DIRECTORY_VARIABLE, directory)
    if file is not None and not file.is_file() and (there := Path(start_directory) / file).is_file():
        file = there
    if file is not None and not file.is_file():
        raise ConfigError(f"{kind}: file '{file}' does not exist{format_search_directory(file)}.")
    for each in (*([] if file is None else [str(file.resolve().parent)]), directory, start_directory):
        if each not in sys.path:
            sys.path.append(each)
    try:
        function = import_object(path) if file is None else _load_from_file(file, name, kind)
    except ConfigError as error:
        _warn_about_shadowed_import(path, directory)
        raise error from error.__cause__
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise any error on import
        _warn_about_shadowed_import(path, directory)
        raise ConfigError(
            f"{kind} '{path}' cannot be imported ({find_raise_location(error)}): {one_line_error(error)}"
        ) from error
    finally:
        _restore_directory(directory, path)
    _warn_about_shadowed_import(path, directory)
    _loaded_files.update(find_source_files(path, directory))
    if not callable(function):
        raise ConfigError(f"{kind} '{path}' must be a function or a class, got {type(function).__name__}.")
    return function


def _restore_directory(directory: str, path: str) -> None:
    """Change back to `directory` if the user's module changed the current directory, since the configuration's paths
    are relative to `directory`.
    """
    with contextlib.suppress(OSError):  # the new directory no longer exists
        if os.getcwd() == directory:
            return
    os.chdir(directory)
    logger.warning(
        "'%s' changes the current directory while it is imported: the previous directory was restored.", path
    )


def list_loaded_modules() -> list[ModuleType]:
    """Return the user modules that this process has imported: files named in a configuration, and local modules that
    these files import. Other processes cannot import these modules by name.
    """
    modules = list(sys.modules.values())
    return [
        each for each in modules if (file := getattr(each, "__file__", None)) and Path(file).resolve() in _loaded_files
    ]


def _load_from_file(file: Path, name: str, kind: str) -> object:
    place = hashlib.blake2b(os.fsencode(file.resolve()), digest_size=4).hexdigest()  # two files may have one name
    spec = importlib.util.spec_from_file_location(f"roll_user_{file.stem}_{place}", file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles in it look their module up
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        known = [entry for entry, value in vars(module).items() if not entry.startswith("_") and callable(value)]
        raise ConfigError(f"{kind}: '{file}' has no '{name}'.{did_you_mean(name, known)}")
    return getattr(module, name)


def _warn_about_shadowed_import(path: str, directory: str) -> None:
    """Warn if the user's code imports a name that matches a file next to it, but Python loads a different module."""
    for file in find_source_files(path, directory):
        for name in sorted({name.partition(".")[0] for name in _list_imports(file)}):
            here = _find_module_file(file.parent, name) or _find_module_file(Path(directory), name)
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if here is None or here == file or (loaded is None and name not in sys.builtin_module_names):
                continue
            if loaded is None or Path(loaded).resolve() != here:
                logger.warning(
                    "'%s' imports '%s', which is %s and not '%s': modules of Python and of installed packages come "
                    "first. To import the file, rename it.",
                    file,
                    name,
                    f"'{loaded}'" if loaded else "built into Python",
                    here,
                )


def find_source_files(path: str, directory: str | None = None) -> list[Path]:
    """Return the source files of a user's function: the file that defines it, and all local files that this file
    imports, directly or indirectly.

    Args:
        path: See `load_function`.
        directory: Directory in which modules are searched; by default the current one.

    Returns:
        Absolute paths, in a fixed order; empty for a function of an installed package.
    """
    top = Path(directory or os.getcwd()).resolve()
    place = path.rpartition(":")[0]
    if place.endswith(".py"):
        first = Path(place).expanduser()
        waiting = [Path(os.path.realpath(top / first))]  # also handles circular links
    else:
        waiting = list(_find_local_modules(place, top, top))
    found: dict[Path, None] = {}
    while waiting:
        file = waiting.pop(0)
        if file in found or not file.is_file():
            continue
        found[file] = None
        for name in _list_imports(file):
            if name.partition(".")[0] in sys.stdlib_module_names:
                continue
            waiting += _find_local_modules(name, file.parent, top)
    return list(found)


def compute_code_fingerprint(paths: Iterable[str]) -> dict[str, str]:
    """Return a digest of each user function's source and of the local files that it imports.

    Args:
        paths: See `load_function`.

    Returns:
        Hexadecimal digests by path. Functions of installed packages are omitted.
    """
    found: dict[str, str] = {}
    for path in paths:
        digest = hashlib.blake2b(digest_size=8)
        files = find_source_files(path)
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        if files:
            found[path] = digest.hexdigest()
    return found


def _find_local_modules(name: str, directory: Path, top: Path) -> Iterator[Path]:
    """Yield the files that Python runs to import the dotted name `name`, if the module is in `directory` or `top`."""
    levels = len(name) - len(name.lstrip("."))
    if levels:  # a relative import
        for _ in range(levels - 1):
            directory = directory.parent
    parts = name.lstrip(".").split(".") if name.lstrip(".") else []
    for place in dict.fromkeys((directory,) if levels else (directory, top)):
        files = [place / "__init__.py"] if levels else []
        for index in range(len(parts)):
            if (file := _find_module_file(place, "/".join(parts[: index + 1]))) is not None:
                files.append(file)
        if any(file.is_file() for file in files):
            yield from (file.resolve() for file in files if file.is_file())
            return


def _find_module_file(directory: Path, name: str) -> Path | None:
    for file in (directory / name / "__init__.py", directory / f"{name}.py"):
        if file.is_file():
            return file.resolve()
    return None


def _list_imports(file: Path) -> list[str]:
    """Return the dotted names that a file imports anywhere; relative names begin with dots."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the import itself raises the error
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [base, *(f"{base}{'' if base.endswith('.') or not base else '.'}{a.name}" for a in node.names)]
    return list(dict.fromkeys(filter(None, names)))
