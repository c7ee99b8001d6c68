"""Coroutines run to their end, beside a running loop too, and an interrupt of who waits reaches them."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading

import pytest

from roll.cli.main import exit_process
from roll.pipelines.stop import Interrupted, StopRequest, stop_on_signals
from roll.running import has_detached_threads, run_in_thread, run_to_end

WORD = contextvars.ContextVar("WORD", default="")


async def where() -> tuple[bool, str]:
    return threading.current_thread() is threading.main_thread(), WORD.get()


def test_running_without_a_loop_it_runs_here():
    assert run_to_end(where()) == (True, "")


def test_running_inside_a_running_loop_it_runs_beside_it_with_the_same_context():
    async def cell():
        WORD.set("notebook")
        return run_to_end(where())

    assert asyncio.run(cell()) == (False, "notebook")


def test_running_an_error_comes_out_as_it_is():
    async def fail():
        raise KeyError("x")

    async def cell():
        run_to_end(fail())

    with pytest.raises(KeyError, match="x"):
        asyncio.run(cell())


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """What threads of other tests still compute is not left behind by these."""
    monkeypatch.setattr("roll.running._detached_futures", set())


def _interrupt_me() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_running_an_interrupt_of_who_waits_asks_the_run_to_stop_at_a_boundary():
    async def work():
        stop = StopRequest()
        with stop_on_signals(stop):
            asyncio.get_running_loop().call_soon(_interrupt_me)
            await stop.run_unless_stopped(asyncio.Event().wait())

    with pytest.raises(Interrupted, match="SIGINT"):
        _cell(work)


def test_running_what_is_not_interruptible_is_cancelled():
    async def work():
        asyncio.get_running_loop().call_soon(_interrupt_me)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        _cell(work)


def test_running_an_interrupt_that_does_not_end_the_wait_is_seen_nevertheless():
    async def work():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)  # to this thread, not to who waits
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        _cell(work)


def _cell(work) -> None:
    """As a notebook does: the cell is plain code inside a loop, and an interrupt is a `KeyboardInterrupt` in it."""

    async def cell():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio.run's own would cancel the cell instead
        run_to_end(work())

    asyncio.run(cell())


def test_running_a_thread_gives_what_it_computes_and_knows_its_context():
    async def ask():
        WORD.set("run")
        return await run_in_thread(lambda word: (word, WORD.get()), word="asked")

    assert asyncio.run(ask()) == ("asked", "run")
    assert not has_detached_threads(0.0)


def test_running_who_is_cancelled_does_not_wait_for_his_thread_and_the_command_ends_without_it(monkeypatch):
    begun, may_end, ends = threading.Event(), threading.Event(), []

    def compute():
        begun.set()
        may_end.wait()

    async def cancelled():
        asking = asyncio.create_task(run_in_thread(compute))
        await asyncio.to_thread(begun.wait)
        asking.cancel()
        await asking

    monkeypatch.setattr("os._exit", ends.append)
    monkeypatch.setattr("roll.cli.main.END_TIMEOUT_S", 0.0)
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())  # comes back
        exit_process(130)
        assert ends == [130]
    finally:
        may_end.set()
    assert not has_detached_threads(10.0)
    with pytest.raises(SystemExit):
        exit_process(130)
