"""Reward functions given as objects: in workers where they can travel, in this process where not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest

from roll.config.rewards import PythonReward
from roll.errors import ConfigError, RewardInfraError
from roll.rewards.python import build_python_verifier


def verifier(function, pool, **settings):
    return build_python_verifier(PythonReward(type="python", **settings).with_object(function), pool)


async def test_reward_function_a_closure_runs_in_a_worker_with_what_it_captured(pool, rollout):
    offset = 40

    def reward(text, answer, metadata):
        return offset + len(text) + (os.getpid() == here) * 1000

    here = os.getpid()
    judgement = await verifier(reward, pool).judge(rollout("ab"))
    assert judgement.value == 42


async def test_reward_function_lambdas_coroutines_callables_and_options_are_functions_too(pool, rollout):
    class Longer:
        def __call__(self, text, answer, metadata, *, than):
            return len(text) > than

    async def later(text, answer, metadata) -> bool:
        await asyncio.sleep(0)
        return True

    assert (await verifier(lambda text, answer, metadata: 0.5, pool).judge(rollout("ab"))).value == 0.5
    assert (await verifier(later, pool).judge(rollout("ab"))).correct is True
    assert (await verifier(Longer(), pool, options={"than": 1}).judge(rollout("ab"))).value == 1.0


async def test_reward_function_what_cannot_travel_runs_here_one_answer_at_a_time(pool, caplog, rollout):
    lock, threads, running = threading.Lock(), set(), []

    def reward(text, answer, metadata):
        assert lock.acquire(blocking=False), "two at once"
        threads.add(threading.current_thread() is threading.main_thread())
        lock.release()
        return 1.0

    found = verifier(reward, pool)
    values = await asyncio.gather(*(found.judge(rollout("ab")) for _ in range(4)))
    assert [judgement.value for judgement in values] == [1.0] * 4 and threads == {False} and not running
    assert "The reward 'reward' cannot be sent to worker processes" in caplog.text
    assert pool.health()["restarts"] == 0


async def test_reward_function_one_that_hangs_here_costs_its_own_time_alone(pool, rollout):
    hold, calls = threading.Event(), []

    def reward(text, answer, metadata):
        calls.append(text)
        if len(calls) == 1:
            hold.wait(60)
        return 1.0

    found = verifier(reward, pool, time_limit_s=0.05)
    with pytest.raises(TimeoutError):
        await found.judge(rollout("ab"))
    for _ in range(100):  # on a busy machine others may be late, too
        with contextlib.suppress(TimeoutError):
            assert (await found.judge(rollout("ab"))).value == 1.0
            break
    else:
        pytest.fail("the next answers wait for the first one's thread")
    assert not hold.is_set()
    hold.set()


async def test_reward_function_an_exception_here_is_our_failure_like_one_in_a_worker(pool, rollout):
    lock = threading.Lock()

    def reward(text, answer, metadata):
        with lock:
            raise KeyError("judge is gone")

    with pytest.raises(RewardInfraError, match="KeyError: 'judge is gone'"):
        await verifier(reward, pool).judge(rollout("ab"))


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError("by a library")])
async def test_reward_function_one_that_ends_its_thread_here_is_not_waited_for(pool, rollout, error):
    lock = threading.Lock()

    def reward(text, answer, metadata):
        with lock:
            raise error

    with pytest.raises(RewardInfraError, match=type(error).__name__):
        await verifier(reward, pool, time_limit_s=1000).judge(rollout("ab"))


async def test_reward_function_a_large_captured_object_is_warned_of(pool, caplog):
    table = b"x" * (5 * 2**20)
    verifier(lambda text, answer, metadata: len(table), pool)
    assert "captures 5 MiB of data, which is sent with every call" in caplog.text


async def test_reward_function_a_function_that_takes_other_arguments_is_refused_before_training(pool):
    with pytest.raises(ConfigError, match=r"reward function '<lambda>' cannot be called as \(text, answer, metadata\)"):
        verifier(lambda text: 1.0, pool)


async def test_reward_function_a_reward_that_was_not_given_again_says_so(pool):
    with pytest.raises(ConfigError, match=r"the reward 'mine' is a Python object, which is not stored with the run"):
        build_python_verifier(PythonReward(type="python", name="mine"), pool)
