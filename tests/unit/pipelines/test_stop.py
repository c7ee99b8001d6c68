"""Signals ask; the loop stops at a boundary."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from roll.errors import InfraError
from roll.pipelines.stop import DUPLICATE_SIGNAL_S, Interrupted, StopRequest, stop_on_signals


async def test_stop_work_that_ends_first_gives_its_result() -> None:
    async def work() -> int:
        return 3

    assert await StopRequest().run_unless_stopped(work()) == 3


async def test_stop_a_stop_cancels_work_and_waits_for_its_end() -> None:
    stop, log = StopRequest(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            log.append("cleaned up")

    asyncio.get_running_loop().call_soon(stop.set, "SIGTERM")
    with pytest.raises(Interrupted, match="SIGTERM"):
        await stop.run_unless_stopped(work())
    assert log == ["cleaned up"]


async def test_stop_an_error_of_the_work_is_not_hidden_by_a_stop() -> None:
    stop = StopRequest()

    async def work() -> None:
        stop.set("SIGINT")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stop.run_unless_stopped(work())


async def test_stop_cancelling_the_waiter_cancels_the_work() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(StopRequest().run_unless_stopped(work()))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_stop_work_that_is_cancelled_without_a_stop_was_not_interrupted() -> None:
    work = asyncio.create_task(asyncio.sleep(60))

    async def wait() -> None:
        work.cancel()
        await work

    with pytest.raises(InfraError, match="canceled, but not by a signal"):
        await StopRequest().run_unless_stopped(wait())


async def test_stop_what_a_stop_cancels_has_ended_before_it_is_an_interruption() -> None:
    stop, log = StopRequest(), []
    asyncio.get_running_loop().call_soon(stop.set, "SIGTERM")
    with pytest.raises(Interrupted, match="SIGTERM"), stop.cancel_on_stop():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            log.append("cleaned up")
    assert log == ["cleaned up"]
    await asyncio.sleep(0)  # nothing cancels what follows


async def test_stop_a_stop_after_the_block_cancels_nothing() -> None:
    stop = StopRequest()
    with stop.cancel_on_stop():
        await asyncio.sleep(0)
        stop.set("SIGINT")
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert stop and task is not None and task.cancelling() == 0


async def test_stop_who_cancels_a_block_himself_has_not_interrupted_it() -> None:
    async def work() -> None:
        with StopRequest().cancel_on_stop():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_stop_a_signal_sets_the_request_and_handlers_are_restored(
    number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # as `nohup` has it
        request.addfinalizer(lambda: signal.signal(number, signal.SIG_IGN))
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        while not stop:
            await asyncio.sleep(0)
    assert stop.signal_name == number.name
    assert signal.getsignal(number) == before


async def test_stop_a_stop_is_said_once() -> None:
    said: list[str] = []
    stop = StopRequest(said.append)
    stop.set("SIGTERM")
    stop.set("SIGINT")
    assert [text.split(":")[0] for text in said] == ["SIGTERM"]


@pytest.mark.parametrize(
    ("first", "seconds_between"),
    [(signal.SIGINT, DUPLICATE_SIGNAL_S + 0.1), pytest.param(signal.SIGTERM, 0.0, id="another one at once")],
)
async def test_stop_a_second_signal_reaches_what_holds_the_loop_up(
    first: signal.Signals, seconds_between: float
) -> None:
    stop, times = StopRequest(), iter([0.0, seconds_between])

    def callback() -> None:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)

    with stop_on_signals(stop, lambda: next(times)):
        with pytest.raises(KeyboardInterrupt):
            callback()
        while not stop:
            await asyncio.sleep(0)
    assert stop.signal_name in {first.name, "SIGINT"}


async def test_stop_a_signal_that_comes_twice_at_once_is_one() -> None:
    """`timeout` sends it to its child, and to the group that this belongs to."""
    stop, times = StopRequest(), iter([0.0, 0.9, 5.0])
    with stop_on_signals(stop, lambda: next(times)):
        os.kill(os.getpid(), signal.SIGINT)
        while not stop:
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


async def test_stop_a_hang_up_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        stop = StopRequest()
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop:
                await asyncio.sleep(0)
        assert stop.signal_name == "SIGTERM"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
