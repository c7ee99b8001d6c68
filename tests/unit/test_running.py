"""Coroutines run to their end, beside a running loop too, and an interrupt of who waits reaches them."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading

import pytest

from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.running import run_to_end

WORD = contextvars.ContextVar("WORD", default="")


async def where() -> tuple[bool, str]:
    return threading.current_thread() is threading.main_thread(), WORD.get()


def test_without_a_loop_it_runs_here():
    assert run_to_end(where()) == (True, "")


def test_inside_a_running_loop_it_runs_beside_it_with_the_same_context():
    async def cell():
        WORD.set("notebook")
        return run_to_end(where())

    assert asyncio.run(cell()) == (False, "notebook")


def test_an_error_comes_out_as_it_is():
    async def fail():
        raise KeyError("x")

    async def cell():
        run_to_end(fail())

    with pytest.raises(KeyError, match="x"):
        asyncio.run(cell())


def _interrupt_me() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_an_interrupt_of_who_waits_asks_the_run_to_stop_at_a_boundary():
    async def work():
        stop = StopRequest()
        with stop_on_signals(stop):
            asyncio.get_running_loop().call_soon(_interrupt_me)
            await stop.unless(asyncio.Event().wait())

    with pytest.raises(Interrupted, match="SIGINT"):
        _cell(work)


def test_what_is_not_interruptible_is_cancelled():
    async def work():
        asyncio.get_running_loop().call_soon(_interrupt_me)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        _cell(work)


def _cell(work) -> None:
    """As a notebook does: the cell is plain code inside a loop, and an interrupt is a `KeyboardInterrupt` in it."""

    async def cell():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio.run's own would cancel the cell instead
        run_to_end(work())

    asyncio.run(cell())
