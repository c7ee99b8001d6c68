"""Reports when environments act, to measure the time that a run spends in environments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["report_activity", "watch_activity"]


_watcher: ContextVar[Callable[[int], None]] = ContextVar("environment_watcher", default=lambda _: None)


@contextlib.contextmanager
def watch_activity(watcher: Callable[[int], None]) -> Iterator[None]:
    """Within the `with` block, call `watcher(1)` when an environment begins to act, and `watcher(-1)` when it stops.

    Tasks that are started in the block also use the watcher.
    """
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextlib.contextmanager
def report_activity() -> Iterator[None]:
    """Report to the watcher that an environment is acting while the `with` block runs."""
    watcher = _watcher.get()
    watcher(1)
    try:
        yield
    finally:
        watcher(-1)
