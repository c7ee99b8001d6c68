"""Stops a run on a signal without losing steps: Ctrl-C, SIGTERM and SIGHUP request a stop at a step's boundary."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

from roll.errors import InfraError, RollError
from roll.running import handle_interrupt

__all__ = ["Interrupted", "StopRequest", "stop_on_signals"]

T = TypeVar("T")

DUPLICATE_SIGNAL_S = 1.0
"""Time within which a repeated signal is treated as the first one."""


class Interrupted(RollError):
    """A signal ended the run at a step's boundary; all steps up to the boundary are saved."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class StopRequest:
    """A stop request, set by a signal; work that may be discarded runs inside `run_unless_stopped`.

    Args:
        notify: Called once, on the first signal, with a message that the run stops.
    """

    def __init__(self, notify: Callable[[str], object] = lambda text: None) -> None:
        self._event, self._notify = asyncio.Event(), notify
        self.signal_name = ""

    def __bool__(self) -> bool:
        return self._event.is_set()

    def set(self, signal_name: str) -> None:
        """Request a stop; the first signal's name is kept."""
        self._event.set()
        if not self.signal_name:
            self.signal_name = signal_name
            self._notify(
                f"{signal_name}: stopping the run and saving its last complete step; a second signal stops it "
                "immediately"
            )

    async def run_unless_stopped(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine`, and cancel it if a stop is requested.

        Raises:
            Interrupted: A stop was requested; `coroutine` has ended.
            InfraError: `coroutine` was canceled for another reason.
        """
        task = asyncio.create_task(coroutine)
        stop = asyncio.create_task(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._event.is_set() and (task.cancelled() or task.exception() is None):
            raise Interrupted(self.signal_name)
        if task.cancelled():
            raise InfraError("the run was canceled, but not by a signal: resume the run")
        return task.result()

    @contextlib.contextmanager
    def cancel_on_stop(self) -> Iterator[None]:
        """Cancel the current task if a stop is requested in this context.

        Unlike with `run_unless_stopped`, context variables that are set in the context keep their values.

        Raises:
            Interrupted: A stop was requested; the context has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        stop, others = asyncio.create_task(self._event.wait()), task.cancelling()
        stop.add_done_callback(lambda stopped: None if stopped.cancelled() else task.cancel())
        try:
            yield
        except asyncio.CancelledError:
            if self._event.is_set() and task.uncancel() <= others:
                raise Interrupted(self.signal_name) from None
            raise
        finally:
            stop.cancel()


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Set `stop` on SIGINT, SIGTERM or SIGHUP (a closed terminal); a second signal ends the process.

    If the same signal is repeated within `DUPLICATE_SIGNAL_S`, it is not treated as a second signal, because `timeout`
    and Slurm signal a process and then its process group. SIGHUP stays ignored if it is ignored already (`nohup`).
    Outside the main thread, such as in a notebook cell that runs in a helper thread, signal handlers are not changed.
    An interrupt of the thread that waits for the helper thread then sets `stop`.

    Args:
        stop: The stop request to set.
        clock: Monotonic clock, in seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        with handle_interrupt(lambda: stop.set("SIGINT")):
            yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    watched = [number for number in before if number is not signal.SIGHUP or before[number] is not signal.SIG_IGN]

    first: list[tuple[int, float]] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not first:
            first.append((number, clock()))
        elif number != first[0][0] or clock() - first[0][1] > DUPLICATE_SIGNAL_S:
            if number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in watched:
        loop.add_signal_handler(number, stop.set, number.name)
        signal.signal(number, on_signal)  # handled at once, since a callback may block the loop and with it `stop.set`
        signal.siginterrupt(number, False)
    try:
        yield
    finally:
        for number in watched:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
