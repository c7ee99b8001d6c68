"""Checks that an environment follows the protocol, and reports every broken rule with a remedy.

    problems = check("mazes.py:Maze", {"size": 5})

Training relies on these rules: an environment that violates a rule would fail during a run, or produce invalid
rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from roll.envs.base import ResetResult, StepResult, format_observation
from roll.envs.protocol import (
    RESET_RULE,
    STEP_CONTRACT,
    ProtocolError,
    check_images,
    check_reset_result,
    check_step_result,
    shorten_repr,
)
from roll.envs.registration import make
from roll.errors import UserError, find_raise_location
from roll.running import run_to_end

__all__ = ["Finding", "check", "check_object"]

_MAX_TURNS = 100
_UNUSUAL_ACTIONS = ("", "\\boxed{}", "\x00\u202e\ud800", "\u0661\u00b2", "-1", "1e999")
_REPEATED_TEXTS = ("x", "9", " ", "{", "\\boxed{", "<tool_call>", "a b ")
_ACTION_LENGTHS = (200, 2_000, 20_000, 200_000)
_SLOW_CALL_S = 0.5
_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that an environment breaks.

    Args:
        rule: The rule, which holds for every environment.
        behavior: The behavior of this environment that breaks the rule.
        remedy: How to fix the environment.
        fatal: True if training would fail or use incorrect data; False if only an optional feature is missing.
    """

    rule: str
    behavior: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        label = "broken" if self.fatal else "advice"
        return f"{label}: {self.rule}\n    found: {self.behavior}\n    fix:    {self.remedy}"


class _HangError(ProtocolError):
    """The environment hangs even on a short input, so that the remaining checks would hang too."""


class _TimeoutError(BaseException):
    """A call took too long. Not a subclass of `Exception`, because the environment might catch it."""


def check(id: str, options: Mapping[str, Any] | None = None, *, num_seeds: int = 3) -> list[Finding]:
    """Check an environment, and return the rules that it breaks.

    `id` is a registered name, `file.py:Class` or `package.module:Class`.

    Raises:
        UserError: The environment cannot be built.
    """

    def build() -> Any:
        try:
            return make(id, options)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"environment '{id}' cannot be created: {_describe_error(error)}") from error

    return check_object(build, num_seeds=num_seeds)


def check_object(build: Callable[[], Any], *, num_seeds: int = 3) -> list[Finding]:
    """Return the rules that an environment breaks. Every rule is checked on a new instance.

    Args:
        build: Returns a new environment on each call.
        num_seeds: Number of episodes per rule.
    """
    findings = []
    for rule in (
        _check_interface,
        _check_same_seed,
        _check_different_seeds,
        _check_unusual_actions,
        _check_end,
        _check_copies,
        _check_event_loop,
    ):
        try:
            findings += run_to_end(_collect_findings(rule, build, num_seeds))
        except ProtocolError as broken:
            findings.append(Finding(rule=broken.rule, behavior=broken.behavior, remedy=broken.remedy))
            if isinstance(broken, _HangError):  # the other rules would hang too, each until its timeout
                break
    # One defect often fails several checks, but is reported once.
    return list({(finding.rule, finding.remedy): finding for finding in findings}.values())


async def _collect_findings(rule: Any, build: Callable[[], Any], num_seeds: int) -> list[Finding]:
    return [finding async for finding in rule(build, num_seeds)]


async def _check_interface(build: Callable[[], Any], num_seeds: int) -> Any:
    for seed in range(num_seeds):
        env = build()
        await _reset(env, seed)
        await _step(env, _sample_action(env))
    if not callable(getattr(build(), "sample_random_action", None)):
        yield Finding(
            rule="`sample_random_action()` returns a well-formed action",
            behavior="there is no such method",
            remedy="add one, so that `roll env play`, this check and your tests get further than the first turn",
            fatal=False,
        )
    _, info = await _reset(build(), 0)
    if "state" not in info:
        yield Finding(
            rule='`info["state"]` names the state',
            behavior='the `info` that `reset` returns has no `"state"`',
            remedy="add a string that identifies the state if you want to train with GiGPO",
            fatal=False,
        )


async def _check_same_seed(build: Callable[[], Any], num_seeds: int) -> Any:
    for seed in range(num_seeds):
        actions = await _play_episode(build(), seed)
        one, two = build(), build()
        await _reset(two, seed + 1000)  # earlier episodes must not matter
        started = [format_observation(*await _reset(env, seed)) for env in (one, two)]
        if started[0] != started[1]:
            yield _build_seed_finding(
                f"seed {seed} produces two different first observations: {shorten_repr(started[0])}, "
                f"{shorten_repr(started[1])}"
            )
            return
        for turn, action in enumerate(actions, 1):
            first, second = [await _step(env, action) for env in (one, two)]
            if first[:4] != second[:4]:
                yield _build_seed_finding(
                    f"seed {seed}, turn {turn}: {shorten_repr(first[:4])} and {shorten_repr(second[:4])}"
                )
                return
            if first[2] or first[3]:
                break


async def _play_episode(env: Any, seed: int) -> list[str]:
    """Play an episode, at most `_MAX_TURNS` turns long, and return its actions."""
    await _reset(env, seed)
    actions: list[str] = []
    over = False
    while not over and len(actions) < _MAX_TURNS:
        actions.append(_sample_action(env))
        stepped = await _step(env, actions[-1])
        over = stepped[2] or stepped[3]
    return actions


def _build_seed_finding(behavior: str) -> Finding:
    return Finding(
        rule="identical seeds and actions produce identical episodes",
        behavior=behavior,
        remedy="use a random generator that is created in `reset`: `self._rng = random.Random(seed)`; do not use a "
        "global generator, the time, or the order of a set",
    )


async def _check_different_seeds(build: Callable[[], Any], num_seeds: int) -> Any:
    seen = set()
    for seed in range(20):
        env = build()
        text = format_observation(*await _reset(env, seed))
        stepped = await _step(env, "\\boxed{1}")
        seen.add((text, stepped[0], stepped[1]))
    if len(seen) == 1:
        yield Finding(
            rule="different seeds produce different episodes",
            behavior="20 seeds produce the same first observation and the same result of an action",
            remedy="choose the task based on the seed; if there is only one task, ignore this advice",
            fatal=False,
        )


async def _check_unusual_actions(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()
    for text in _UNUSUAL_ACTIONS:
        await _reset(env, 0)
        await _step(env, text)
    for part in _REPEATED_TEXTS:
        for length in _ACTION_LENGTHS:  # increasing, so that superlinear time is found before it takes forever
            text = part * (length // len(part))
            took = await _measure_seconds(partial(_step, env, text), before=partial(_reset, env, 0))
            if took > _SLOW_CALL_S:
                yield _build_slow_finding(text, f"took {took:.1f} s")
                break


async def _measure_seconds(call: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Await `before` (if specified), then measure the duration of `call` in seconds.

    A slow call is repeated once, since the machine may have paused; the shorter time is returned.
    """
    took = math.inf
    for _ in range(2):
        if before is not None:
            await before()
        started = time.perf_counter()
        await call()
        took = min(took, time.perf_counter() - started)
        if took <= _SLOW_CALL_S:
            break
    return took


def _build_slow_finding(text: str, behavior: str) -> Finding:
    return Finding(
        rule="the time of a step grows at most linearly with the length of the action",
        behavior=f"an action of {len(text)} characters, {shorten_repr(text)}, {behavior}",
        remedy="parse actions without nested quantifiers in regular expressions, without calling `int` on long "
        "strings, and without recursion; truncate actions to the length of the longest move",
    )


async def _check_end(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()  # one environment plays all episodes in turn
    longest = max([len(await _play_episode(env, seed)) for seed in range(num_seeds)])
    if longest == _MAX_TURNS:
        yield Finding(
            rule="episodes end",
            behavior=f"an episode with random actions did not end within {_MAX_TURNS} turns",
            remedy="end an episode after some turns, or always set `num_turns` in the configuration",
            fatal=False,
        )


async def _check_copies(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()
    await _reset(env, 0)
    spawn = getattr(env, "spawn", None)
    if callable(spawn):
        try:
            twin = spawn(same_state=True)
        except Exception as error:
            if not isinstance(error, NotImplementedError):
                yield Finding(
                    rule="`spawn(same_state=True)` returns a copy in the same state",
                    behavior=_describe_error(error),
                    remedy="return `copy.deepcopy(self)`, or raise NotImplementedError",
                )
            return
        # Sampling an action may change the environment's state, so a copy samples it.
        action = _sample_action(copy.deepcopy(env) if _is_copyable(env) else build())
        first, second = await _step(env, action), await _step(twin, action)
        if first[:4] != second[:4]:
            yield Finding(
                rule="`spawn(same_state=True)` returns a copy in the same state",
                behavior=f"the copy returned {shorten_repr(second[:4])}, the environment {shorten_repr(first[:4])}",
                remedy="also copy the random generator, as `copy.deepcopy(self)` does",
            )
    try:
        pickle.dumps(build())
    except Exception as error:
        yield Finding(
            rule="an environment can be pickled and sent to another process",
            behavior=_describe_error(error),
            remedy="open files, connections and locks in `reset`, not in `__init__`, so that the environment "
            "can run in the pool",
            fatal=False,
        )


async def _check_event_loop(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()

    async def play() -> None:
        await _reset(env, 0)
        await _step(env, _sample_action(env))

    took = await _measure_seconds(play)
    if took > _SLOW_CALL_S and not inspect.iscoroutinefunction(env.step):
        yield Finding(
            rule="a step on the event loop takes microseconds",
            behavior=f"reset and a step took {took:.1f} s",
            remedy="run the environment with `host: pool`, or write `async def step`, so that the run "
            "does not wait for each step",
            fatal=False,
        )


async def _reset(env: Any, seed: int) -> ResetResult:
    result = check_reset_result(await _call(RESET_RULE, env.reset, seed=seed))
    check_images(RESET_RULE, result[0])
    return result


async def _step(env: Any, action: str) -> StepResult:
    result = check_step_result(await _call(STEP_CONTRACT, env.step, action))
    check_images(STEP_CONTRACT, result[0])
    return result


async def _call(rule: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    given = arguments[0] if arguments else keywords
    try:
        with _interrupt_after_limit():
            value = call(*arguments, **keywords)
        return await asyncio.wait_for(value, _TIME_LIMIT_S) if inspect.isawaitable(value) else value
    except (_TimeoutError, TimeoutError) as error:
        behavior = f"did not end within {_TIME_LIMIT_S:g} s"
        if isinstance(given, str) and len(given) >= _ACTION_LENGTHS[0]:
            slow = _build_slow_finding(given, behavior)
            raise ProtocolError(slow.rule, slow.behavior, slow.remedy) from error
        raise _HangError(
            rule, f"{behavior}, given {shorten_repr(given)}", "check the environment for an endless loop"
        ) from error
    except (Exception, SystemExit) as error:
        raise ProtocolError(
            rule, f"{_describe_error(error)}, given {shorten_repr(given)}", _suggest_remedy(call, error)
        ) from error


def _suggest_remedy(call: Callable[..., Any], error: BaseException) -> str:
    """Suggest how to fix the exception that `call` raised."""
    if isinstance(error, TypeError) and find_raise_location(error).rpartition(":")[0] == __file__:
        name = "seed=None" if call.__name__ == "reset" else "action"
        return f"accept the argument `{name}`"
    return (
        "an exception is treated as an infrastructure error, and the rollout is repeated: return an observation and a "
        "reward for any text that a model may generate"
    )


@contextlib.contextmanager
def _interrupt_after_limit() -> Iterator[None]:
    """Apply a timeout to the `with` block, which also interrupts regular expressions.

    It has no effect outside the main thread, since only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def raise_timeout(*_: object) -> None:
        raise _TimeoutError

    previous = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, _TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _sample_action(env: Any) -> str:
    sample = getattr(env, "sample_random_action", None)
    try:
        return sample() if callable(sample) else "\\boxed{1}"
    except NotImplementedError:
        return "\\boxed{1}"


def _is_copyable(env: Any) -> bool:
    try:
        copy.deepcopy(env)
    except Exception:
        return False
    return True


def _describe_error(error: BaseException) -> str:
    """Describe an exception, with the line of the environment that raised it."""
    return f"{type(error).__name__}: {shorten_repr(str(error))} ({find_raise_location(error)})"
