"""What came of calling the candidate's code: a value or an exception, as plain data."""

from __future__ import annotations

from . import wire

NotPlainErrors = (wire.NotPlainError, RecursionError, RuntimeError)
"""Also a container that changes while it is read."""


def finished(value):
    """The result of a coroutine; else the value itself."""
    if hasattr(type(value), "__await__"):
        import asyncio

        async def wait():
            return await value

        return asyncio.run(wait())
    return value
