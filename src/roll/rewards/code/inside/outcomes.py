"""What may come of a test, besides passing and failing."""

from __future__ import annotations

from . import wire

NotPlainErrors = (wire.NotPlainError, RecursionError, RuntimeError)
"""Of a value that does not cross; also of a container that changes while it is read."""


class GoneError(BaseException):
    """The candidate's process has ended; no test may catch it and pass."""


class BrokenTestsError(BaseException):
    """The tests ask for what cannot be done, whatever the candidate: their author's mistake."""


class NotComparableError(TypeError):
    """A test decides by an object that is no plain data."""


class Kept:
    """An object that stays with the candidate: see `proxies.Remote`."""

    __slots__ = ("_name",)
    _name: str
    """What the tests found it by; empty where an answer gave it."""


def finished(value):
    """Return the result of a coroutine, or the value itself if it is not a coroutine."""
    if hasattr(type(value), "__await__"):
        import asyncio

        async def wait():
            return await value

        return asyncio.run(wait())
    return value
