"""Translate errors of `roll_sandbox`, which does not depend on ROLL, to errors of ROLL's hierarchy.

    of roll_sandbox          raised in ROLL: a class of both hierarchies, with the same name
    ConfigError         ──►  also `roll.errors.ConfigError`
    UserError           ──►  also `roll.errors.UserError`
    SandboxError        ──►  also `roll.errors.InfraError`
    any other           ──►  also `roll.errors.RollError`

Therefore both `except InfraError` and `except SandboxLostError` catch the loss of a sandbox.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import roll_sandbox.errors as theirs
from roll.errors import ConfigError, InfraError, RollError, UserError

__all__ = ["sandbox_errors", "translate_error"]

_ERROR_BASES: tuple[tuple[type[Exception], type[RollError]], ...] = (
    (theirs.ConfigError, ConfigError),
    (theirs.UserError, UserError),
    (theirs.SandboxError, InfraError),
    (theirs.RollSandboxError, RollError),
)


@contextmanager
def sandbox_errors() -> Iterator[None]:
    """Convert sandbox errors that the `with` block raises to ROLL's error classes."""
    try:
        yield
    except (theirs.RollSandboxError, BaseExceptionGroup) as error:
        found = translate_error(error)
        if found is error:
            raise
        raise found from error.__cause__


def translate_error(error: BaseException) -> BaseException:
    """Translate sandbox errors in an error or an exception group; return the same object if there are none."""
    if isinstance(error, BaseExceptionGroup):
        inner = [translate_error(each) for each in error.exceptions]
        if all(new is old for new, old in zip(inner, error.exceptions, strict=True)):
            return error
        found: BaseException = error.derive(inner)
    elif isinstance(error, theirs.RollSandboxError) and not isinstance(error, RollError):
        found = _build_error(type(error), *error.__reduce__()[1])
        vars(found).update(vars(error))
    else:
        return error
    found.__cause__, found.__suppress_context__ = error.__cause__, error.__suppress_context__
    return found.with_traceback(error.__traceback__)


def _build_error(error_class: type[theirs.RollSandboxError], *arguments: Any) -> RollError:
    return _get_class(error_class)(*arguments)


@functools.cache
def _get_class(error_class: type[theirs.RollSandboxError]) -> type[RollError]:
    """Return a picklable error class that derives from a class of `roll_sandbox` and from the corresponding class of
    ROLL."""
    base = next(ours for their, ours in _ERROR_BASES if issubclass(error_class, their))

    def reduce(self: theirs.RollSandboxError) -> tuple[Any, ...]:
        plain: Any = OSError if isinstance(self, OSError) else Exception  # OSError adds the file's name
        return _build_error, (error_class, *plain.__reduce__(self)[1])

    content = {"__doc__": error_class.__doc__, "__module__": error_class.__module__, "__reduce__": reduce}
    return type(error_class.__name__, (error_class, base), content)
