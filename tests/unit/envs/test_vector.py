"""Environments side by side."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest

from roll.envs import AsyncVectorEnv, SyncVectorEnv, VectorEnv, make_vec
from roll.errors import DataError, InfraError


class Counter:
    """Counts to `end`; a text that is no number fails."""

    def __init__(self, end: int = 3) -> None:
        self.end, self.seeds = end, []
        self.at = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seeds.append(seed)
        self.at = 0
        return "0", {"at": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += int(action)
        return str(self.at), float(self.at), self.at >= self.end, False, {"at": self.at}


class LateCounter(Counter):
    """The same, as coroutines."""

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)


KINDS = [SyncVectorEnv, AsyncVectorEnv]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("env", [Counter, LateCounter])
def test_env_vector_any_subset_is_stepped_and_answers_in_the_order_of_the_actions(
    kind: type[VectorEnv], env: type
) -> None:
    envs = kind([env(), env(), env()])
    assert envs.reset() == (["0"] * 3, [{"at": 0}] * 3)
    observations, rewards, ended, cut, infos = envs.step({2: "2", 0: "1"})
    assert (observations, rewards.tolist(), ended.tolist(), cut.tolist()) == (
        ["2", "1"],
        [2, 1],
        [False] * 2,
        [False] * 2,
    )
    assert infos == [{"at": 2}, {"at": 1}]
    assert envs.step(["1", "1", "0"])[0] == ["2", "1", "2"]
    envs.close()


@pytest.mark.parametrize("kind", KINDS)
def test_env_vector_same_step_gives_the_next_episodes_first_observation_and_keeps_the_last(
    kind: type[VectorEnv],
) -> None:
    envs = kind([Counter(), Counter()], autoreset="same_step")
    envs.reset()
    observations, rewards, ended, _, infos = envs.step(["3", "1"])
    assert (observations, rewards.tolist(), ended.tolist()) == (["0", "1"], [3, 1], [True, False])
    assert infos[0] == {"at": 0, "final_observation": "3", "final_info": {"at": 3}}
    assert infos[1] == {"at": 1}
    assert envs.step(["1", "1"])[0] == ["1", "2"]


@pytest.mark.parametrize("kind", KINDS)
def test_env_vector_next_step_begins_anew_with_the_call_after_the_end(kind: type[VectorEnv]) -> None:
    envs = kind([Counter(), Counter()], autoreset="next_step")
    envs.reset()
    assert envs.step({0: "5"})[0] == ["5"]
    observations, rewards, ended, _, _ = envs.step(["not looked at", "1"])
    assert (observations, rewards.tolist(), ended.tolist()) == (["0", "1"], [0, 1], [False, False])
    assert envs.step({0: "1"})[0] == ["1"]


def test_env_vector_without_autoreset_an_ended_episode_takes_no_step_before_its_reset() -> None:
    envs = SyncVectorEnv([Counter(), Counter()], autoreset="disabled")
    with pytest.raises(DataError, match=r"environment 0 \(Counter\) has no running episode"):
        envs.step(["1", "1"])
    envs.reset()
    envs.step({1: "3"})
    with pytest.raises(DataError, match=r"environment 1 .* call reset\(\) first, or reset\(indices=\[1\]\)"):
        envs.step(["1", "1"])
    assert envs.envs[0].at == 0  # nothing acted
    envs.reset(indices=[1])
    assert envs.step(["1", "1"])[0] == ["1", "1"]


def test_env_vector_seeds_are_those_of_building_then_none_or_those_given() -> None:
    envs = SyncVectorEnv([Counter(), Counter()], seed=7)
    envs.reset()
    envs.reset()
    envs.reset(seed=3)
    envs.reset(seed=[5, None])
    assert [env.seeds for env in envs.envs] == [[7, None, 3, 5], [8, None, 4, None]]
    with pytest.raises(DataError, match="got 1 seeds for 2"):
        envs.reset(seed=[1])


@pytest.mark.parametrize("kind", KINDS)
def test_env_vector_a_failure_names_its_environment_and_the_others_have_acted(kind: type[VectorEnv]) -> None:
    envs = kind([Counter(), Counter()], env_ids=["good", "bad"])
    envs.reset()
    with pytest.raises(InfraError, match=r"environment 1 \(bad\) failed: ValueError: invalid literal"):
        envs.step(["1", "x"])
    assert envs.envs[0].at == 1
    with pytest.raises(DataError, match="environment 1"):
        envs.step(["1", "1"])
    envs.reset(indices=[1])
    assert envs.step(["1", "1"])[0] == ["2", "1"]


@pytest.mark.parametrize("kind", KINDS)
def test_env_vector_after_several_failures_none_of_their_episodes_goes_on(kind: type[VectorEnv]) -> None:
    envs = kind([Counter(), Counter(), Counter()])
    envs.reset()
    with pytest.raises(InfraError, match="environment 0"):
        envs.step(["x", "x", "1"])
    for index in (0, 1):
        with pytest.raises(DataError, match=f"environment {index} .* has no running episode"):
            envs.step({index: "1"})
    assert envs.step({2: "1"})[0] == ["2"]


def test_env_vector_an_episode_that_was_cut_off_has_ended() -> None:
    class CutOff(Counter):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            observation, reward, ended, _, info = super().step(action)
            return observation, reward, False, ended, info

    envs = SyncVectorEnv([CutOff()])
    envs.reset()
    observations, _, ended, cut, [info] = envs.step(["3"])
    assert (observations, ended.tolist(), cut.tolist(), info["final_observation"]) == (["0"], [False], [True], "3")
    envs = SyncVectorEnv([CutOff()], autoreset="next_step")
    envs.reset()
    assert [envs.step(["3"])[0], envs.step(["3"])[0]] == [["3"], ["0"]]


def test_env_vector_asynchronous_environments_act_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=20)

    class Meets(Counter):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            meeting.wait()  # passes only when all three are inside
            return super().step(action)

    envs = AsyncVectorEnv([Meets(), Meets(), Meets()])
    envs.reset()
    assert envs.step(["1", "1", "1"])[0] == ["1"] * 3
    envs.close()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_env_vector_an_interrupt_that_does_not_end_the_wait_for_a_step_is_seen_nevertheless(kind: type) -> None:
    may_end, ends = threading.Event(), []

    class Lasts(Counter):
        def step(self, action: str) -> Any:
            return self.last(action) if kind is SyncVectorEnv else self.lasts(action)

        async def last(self, action: str) -> Any:
            return self.lasts(action)

        def lasts(self, action: str) -> Any:
            may_end.wait(0.05)  # who steps it waits by now
            signal.raise_signal(signal.SIGINT)  # to this thread, not to that one
            ends.append(may_end.wait(20))
            return super().step(action)

    envs = kind([Lasts()])
    envs.reset()
    with pytest.raises(KeyboardInterrupt):
        envs.step(["1"])
    may_end.set()
    envs.close()
    assert ends == [True]


def test_env_vector_a_single_text_or_a_wrong_number_of_actions_is_refused() -> None:
    envs = make_vec("guess_number")
    envs.reset()
    for actions, message in (
        ("5", "one action"),
        (["1", "2"], "2 actions for 1"),
        ({4: "x"}, "environment 4 does not exist"),
    ):
        with pytest.raises(DataError, match=message):
            envs.step(actions)
    with pytest.raises(DataError, match="autoreset must be one of same_step, next_step, disabled,"):
        make_vec("guess_number", autoreset="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("env", [Counter, LateCounter])
def test_env_vector_an_environment_that_does_not_close_leaves_no_thread_and_closes_no_other_one_less(env: type) -> None:
    closed = []

    class Stubborn(env):  # type: ignore[misc]
        async def linger(self) -> None:
            await asyncio.Event().wait()

        def close(self) -> None:
            closed.append(self)
            raise OSError("busy")

        def step(self, action: str) -> Any:
            if env is LateCounter:
                return self.late(action)
            return super().step(action)

        async def late(self, action: str) -> Any:
            self.lingers = asyncio.create_task(self.linger())  # a task that is never awaited
            return await super().step(action)

    before = set(threading.enumerate())
    envs = AsyncVectorEnv([Stubborn(), Stubborn()])
    envs.reset()
    envs.step(["1", "1"])
    with pytest.raises(InfraError, match="OSError: busy"):
        envs.close()
    assert len(closed) == 2
    assert set(threading.enumerate()) <= before


def test_env_vector_environments_beside_one_that_cannot_begin_have_begun() -> None:
    class Unwilling(Counter):
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            raise KeyError("board")

    envs = SyncVectorEnv([Counter(), Unwilling()], autoreset="disabled")
    with pytest.raises(InfraError, match="environment 1 "):
        envs.reset()
    assert envs.step({0: "1"})[0] == ["1"]
