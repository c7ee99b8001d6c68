"""Outcomes of a test, other than passing and failing."""

from __future__ import annotations

from . import wire

ENCODING_ERRORS = (wire.NotSerializableError, RecursionError, RuntimeError)
"""Errors that encoding raises for a value that cannot be sent, or for a container that changes while it is read."""


class CandidateEndedError(BaseException):
    """The candidate's process has ended. A test must not catch this error and pass."""


class BrokenTestsError(BaseException):
    """The tests require something unsupported; the candidate is not at fault."""


class NotComparableError(TypeError):
    """The result of a test depends on an object that is not plain data."""


class RemoteObjectBase:
    """Base class of `proxies.RemoteObject`, the proxy for an object that stays in the candidate's process."""

    __slots__ = ("_name",)
    _name: str
    """The name by which the tests looked the object up; empty if an answer returned it."""


def await_result(value):
    """Return the result of a coroutine, or the value itself if it is not a coroutine."""
    if hasattr(type(value), "__await__"):
        import asyncio

        async def wait():
            return await value

        return asyncio.run(wait())
    return value
