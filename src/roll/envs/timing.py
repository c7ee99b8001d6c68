"""The time that environments take, for whoever measures a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["acting", "watched"]


_watcher: ContextVar[Callable[[float, float], None]] = ContextVar("environment_watcher", default=lambda *_: None)


@contextlib.contextmanager
def watched(watcher: Callable[[float, float], None]) -> Iterator[None]:
    """Inside, and in tasks that are started inside, `watcher` hears when environments acted (`time.perf_counter`)."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


@contextlib.contextmanager
def acting() -> Iterator[None]:
    """Tell the watcher from when to when the environment acted inside."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _watcher.get()(start, time.perf_counter())
