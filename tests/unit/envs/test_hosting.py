"""Environments where they run: what goes wrong in one is a failure of its own episode, and nothing stays open."""

from __future__ import annotations

import asyncio
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.cluster.pool import LocalWorkerPool
from roll.envs.hosting import EnvHosts, HostedEnv, LoopHost
from roll.envs.process_host import PoolHost
from roll.envs.sanitize import sanitize_step
from roll.errors import ConfigError, DataError, InfraError
from roll.simulation.clock import run as simulate
from roll.types import EnvironmentSettings


class Waits:
    """An environment that is written to wait; remembers who was closed."""

    closed = 0

    def __init__(self, step_s: float = 1.0, fails: str = "", returns: Any = None) -> None:
        self._step_s, self._fails, self._returns = step_s, fails, returns

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if self._fails == "reset":
            raise RuntimeError("no board")
        return f"seed {seed}", {"state": "s"}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self._step_s)
        if self._fails == "step":
            raise KeyError("piece")
        if self._fails == "time":
            raise TimeoutError("its server is slow")
        return self._returns or (action, 1, False, True, {})

    async def close(self) -> None:
        type(self).closed += 1


class Contrary:
    """Raises however it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    Waits.closed = 0
    monkeypatch.setattr("roll.envs.registration.load_function", lambda name, kind: Waits)


OWN = """
    import os, time

    class Own:
        def reset(self, seed=None):
            return f"seed {seed}", {"state": str(os.getpid())}

        def step(self, action):
            if action == "hang":
                time.sleep(1000)
            if action == "crash":
                os._exit(3)
            if action == "leak":
                self.held = bytearray(2**40)
            return eval(action), 0.5, False, False, {}
    """


def settings(**options: Any) -> EnvironmentSettings:
    return EnvironmentSettings(name="own.module:Waits", options=options, step_time_limit_s=5.0)


async def one_step(hosts: EnvHosts, given: EnvironmentSettings) -> Any:
    async with hosts.open(given) as env:
        begun = await env.reset(3)
        assert begun == ("seed 3", {"state": "s"})
        return await env.step("go")


@pytest.mark.usefixtures("waits")
def test_env_hosting_a_step_gives_five_values_of_their_types() -> None:
    hosts = EnvHosts()
    observation, reward, ended, cut_off, info = simulate(one_step(hosts, settings()))
    assert (observation, reward, ended, cut_off, info) == ("go", 1.0, False, True, {})
    assert type(reward) is float
    assert (Waits.closed, hosts.num_open) == (1, 0)
    assert hosts.counts["own.module:Waits", "seconds"] == 1.0  # reset, start and close took none


def test_env_hosting_what_an_environment_says_can_be_encoded_and_its_state_has_a_bounded_name() -> None:
    half = "\ud800"
    info = {"state": "s" * 9_999 + half, "tool_results": [{"content": half}], "use_tool": 1}
    observation, reward, *_, told = sanitize_step((f"{half}\u00e9", 1, 0, 0, info))
    assert (observation, reward, told["tool_results"], told["use_tool"]) == ("?\u00e9", 1.0, [{"content": "?"}], True)
    assert len(told["state"]) < 200 and told["state"].encode()
    assert told["state"] != sanitize_step(("", 1, 0, 0, {"state": "s" * 9_999}))[4]["state"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_s": 9.0}, "its step exceeded the time limit of 5 s"),
        ({"fails": "step"}, "its step failed: KeyError: 'piece'"),
        ({"fails": "time"}, "its step failed: TimeoutError: its server is slow"),
        ({"fails": "reset"}, "its reset failed: RuntimeError: no board"),
        ({"returns": ("a", 1.0)}, r"`step\(action\)` returns .* Found: \('a', 1.0\). Fix: return five values"),
        ({"returns": (1, 1.0, True, True, {})}, "`step.* Found: the observation 1 of type int. Fix: return a string"),
        (
            {"returns": ("a", "1.0", True, True, {})},
            "a reward must be a finite number. Found: the reward '1.0' of type str",
        ),
        ({"returns": ("a", float("nan"), True, True, {})}, "a reward must be a finite number. Found: the reward nan"),
        ({"returns": ("a", 1.0, "no", True, {})}, "`terminated` must be True or False. Found: 'no' of type str"),
        ({"returns": ("a", 1.0, True, True, None)}, "`step.* Found: the information None .* Fix: return `{}`"),
        ({"returns": "win"}, "`step.* Found: 'win'. Fix: return five values"),
        ({"returns": ("a", 10**400, True, True, {})}, "a reward must be a finite number. Found: the reward 1000"),
        ({"returns": ("a", 1.0, Contrary(), True, {})}, "`terminated` must be True or False. Found: .*Contrary"),
        (
            {"returns": ("a", 1.0, True, True, {"state": Contrary()})},
            "the result of its step cannot be read: RuntimeError",
        ),
        (
            {"returns": ("a", 1.0, True, True, {"prefix": Contrary()})},
            "the result of its step cannot be read: RuntimeError",
        ),
        (
            {"returns": ("a", 1.0, True, True, {"tool_calls": 5})},
            r".*info\['tool_calls'\].* a list .* Found: 5",
        ),
        (
            {"returns": ([{"type": "image", "digest": "0f", "grid": 7}], 1.0, True, True, {})},
            r".*the observation \[.* of type list \(the grid of a part of type 'image' must be .*, got 7\)\. Fix: ret",
        ),
        (
            {"returns": ("a", 1.0, True, True, {"tool_results": [{"content": "x", "name": 5}]})},
            r"each .* has `content`; `tool_call_id` and `name`, if given, are strings\. Found: \[.*'name': 5",
        ),
        ({"returns": ("a", 1.0, True, True, {"tool_results": [{}]})}, r".*info\['tool_results'\].* Found: \[{}\]"),
    ],
)
@pytest.mark.usefixtures("waits")
def test_env_hosting_whatever_an_environment_does_is_a_failure_of_ours_and_it_is_closed(
    options: dict[str, Any], message: str
) -> None:
    hosts = EnvHosts()
    with pytest.raises(InfraError, match=f"environment 'own.module:Waits': {message}"):
        simulate(one_step(hosts, settings(**options)))
    assert (Waits.closed, hosts.num_open) == (1, 0)
    assert hosts.counts["own.module:Waits", "failures"] == 1


@pytest.mark.usefixtures("waits")
def test_env_hosting_call_time_of_an_environment_leaves_out_how_long_it_took_to_start() -> None:
    class SlowHost(LoopHost):
        async def start(self, settings: EnvironmentSettings) -> HostedEnv:
            await asyncio.sleep(3.0)
            return await super().start(settings)

    async def metrics() -> tuple[dict[str, float], dict[str, float]]:
        hosts = EnvHosts(hosts={"slow": SlowHost()})
        await one_step(hosts, replace(settings(step_s=0.5), host="slow"))
        return hosts.collect_metrics(), hosts.collect_metrics()

    found, later = simulate(metrics())
    assert found["env/own.module:Waits/start_s"] == 3.0
    assert found["env/own.module:Waits/call_s"] == 0.25  # a reset of 0 s and a step of 0.5 s
    assert later == {}


@pytest.mark.usefixtures("waits")
def test_env_hosting_an_episode_that_is_cancelled_closes_its_environment() -> None:
    hosts = EnvHosts()

    async def cancelled() -> None:
        task = asyncio.ensure_future(one_step(hosts, settings(step_s=4.0)))
        await asyncio.sleep(1.0)
        assert hosts.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    simulate(cancelled())
    assert (Waits.closed, hosts.num_open) == (1, 0)


@pytest.mark.usefixtures("waits")
def test_env_hosting_an_environment_that_does_not_close_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck:
        async def start(self, settings: EnvironmentSettings) -> HostedEnv:
            env = Waits(step_s=0.0)
            env.close = asyncio.Event().wait  # type: ignore[method-assign, assignment]
            return env

        async def close(self) -> None: ...

    assert simulate(one_step(EnvHosts({"pool": Stuck()}), settings()))[0] == "go"
    assert "cannot be closed: TimeoutError" in caplog.text


@pytest.mark.usefixtures("waits")
def test_env_hosting_a_host_that_a_run_does_not_have_and_wrong_options_are_the_users_to_mend() -> None:
    with pytest.raises(
        ConfigError, match=r"requires the host 'http', but this run does not have it\. Available hosts: loop"
    ):
        simulate(one_step(EnvHosts(), EnvironmentSettings(name="guess_number", host="http")))
    with pytest.raises(DataError, match="has no argument 'colour'"):
        simulate(one_step(EnvHosts(), settings(colour=1)))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("hang", "its step exceeded the time limit of 0.5 s"),
        ("crash", r"its step failed: WorkerDiedError: the process \(\d+\) ended with code 3"),
        ("leak", "its step failed: MemoryError: the process exceeded its memory limit"),
        ("1/0", r"its step failed: ZeroDivisionError: division by zero \(<string>:1\)"),
    ],
)
async def test_env_hosting_in_the_pool_a_users_own_class_costs_its_own_episode_alone(
    tmp_path: Path, action: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    given = EnvironmentSettings(name=f"{tmp_path}/own.py:Own", step_time_limit_s=60.0)
    pool = LocalWorkerPool(1)
    hosts = EnvHosts({"pool": PoolHost(pool)})

    async def good() -> str:
        async with hosts.open(given) as env:
            _, info = await env.reset(1)
            await asyncio.sleep(0.1)
            assert await env.step("'so'") == ("so", 0.5, False, False, {})
            return info["state"]

    async def bad() -> None:
        async with hosts.open(replace(given, step_time_limit_s=0.5) if action == "hang" else given) as env:
            await env.reset(2)
            await env.step(action)

    one, failed, two = await asyncio.gather(good(), bad(), good(), return_exceptions=True)
    assert os.getpid() not in {int(one), int(two)} and one != two
    assert isinstance(failed, InfraError)
    with pytest.raises(InfraError, match=message):
        raise failed
    await pool.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "pool_fork" in " ".join(p.cmdline())]
