"""Reports when environments act, to measure the time that a run spends in environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["report_activity", "watch_activity"]


_watcher: ContextVar[Callable[[int], None]] = ContextVar("environment_watcher", default=lambda _: None)


@contextlib.contextmanager
def watch_activity(watcher: Callable[[int], None]) -> Iterator[None]:
    """Call `watcher` within the `with` block: with 1 when an environment begins to act, and with -1 when it stops.

    Tasks that are started in the block also use the watcher.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextlib.contextmanager
def report_activity() -> Iterator[None]:
    """Notify the watcher that an environment acts within the `with` block."""
    watcher = _watcher.get()
    watcher(1)
    try:
        yield
    finally:
        watcher(-1)
