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


def raised(error):
    """An exception as plain data: the names of its classes and its text."""
    try:
        text = str(error)[:500]
    except Exception:
        text = ""
    return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": text}
