"""Check that an environment follows the protocol: report every rule that it breaks, with a remedy.

    problems = check("mazes.py:Maze", {"size": 5})

Training relies on these rules: a rollout that breaks one would fail in the middle of a run, or teach nothing.
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

from roll.envs.base import Started, Stepped, shown
from roll.envs.protocol import RESET_RULE, STEP_RULE, ProtocolError, brief, checked_start, checked_step
from roll.envs.registration import make
from roll.errors import UserError, raised_at
from roll.running import run_to_end

__all__ = ["Finding", "check", "check_object"]

_MOST_TURNS = 100
_ODD = ("", "\\boxed{}", "\x00\u202e\ud800", "\u0661\u00b2", "-1", "1e999")
_REPEATED = ("x", "9", " ", "{", "\\boxed{", "<tool_call>", "a b ")
_LENGTHS = (200, 2_000, 20_000, 200_000)
_SLOW_S = 0.5
_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A broken rule.

    Args:
        rule: The rule, which holds for every environment.
        found: What this environment did.
        remedy: How to fix it.
        fatal: Whether training would fail or learn from wrong data; otherwise only a useful feature is missing.
    """

    rule: str
    found: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return (
            f"{'broken' if self.fatal else 'advice'}: {self.rule}\n    found: {self.found}\n    fix:    {self.remedy}"
        )


class _HangsError(ProtocolError):
    """The environment hangs on any input."""


class _TooLongError(BaseException):
    """Not an `Exception`, which an environment might catch."""


def check(id: str, options: Mapping[str, Any] | None = None, *, num_seeds: int = 3) -> list[Finding]:
    """Check an environment, by its name, `file.py:Class` or `package.module:Class`.

    Raises:
        UserError: The environment cannot be built at all; the message has the reason.
    """

    def build() -> Any:
        try:
            return make(id, options)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"environment '{id}' cannot be built: {_describe_error(error)}") from error

    return check_object(build, num_seeds=num_seeds)


def check_object(build: Callable[[], Any], *, num_seeds: int = 3) -> list[Finding]:
    """Check the environment that `build` returns, with a new one for every rule.

    Args:
        build: Returns a new environment on each call.
        num_seeds: Number of episodes for each rule about episodes.
    """
    findings = []
    for rule in (_starts_and_steps, _equal_seeds, _other_seeds, _odd_texts, _ends, _copies, _leaves_the_loop):
        try:
            findings += run_to_end(_collected(rule, build, num_seeds))
        except ProtocolError as broken:
            findings.append(Finding(rule=broken.rule, found=broken.found, remedy=broken.remedy))
            if isinstance(broken, _HangsError):  # the other rules would hang too, each until its timeout
                break
    return list({(finding.rule, finding.remedy): finding for finding in findings}.values())


async def _collected(rule: Any, build: Callable[[], Any], num_seeds: int) -> list[Finding]:
    return [finding async for finding in rule(build, num_seeds)]


async def _starts_and_steps(build: Callable[[], Any], num_seeds: int) -> Any:
    for seed in range(num_seeds):
        env = build()
        await _reset(env, seed)
        await _step(env, _action(env))
    if not callable(getattr(build(), "sample_random_action", None)):
        yield Finding(
            rule="`sample_random_action()` gives a well-formed action",
            found="there is no such method",
            remedy="add one: the command, this check and tests then reach further than the first turn",
            fatal=False,
        )
    _, info = await _reset(build(), 0)
    if "state" not in info:
        yield Finding(
            rule='`info["state"]` names the state',
            found="it is missing from what `reset` gives",
            remedy="add a text that is equal for equal states, if you want to train with GiGPO; no other method needs "
            "it",
            fatal=False,
        )


async def _equal_seeds(build: Callable[[], Any], num_seeds: int) -> Any:
    for seed in range(num_seeds):
        actions = await _some_episode(build(), seed)
        one, two = build(), build()
        await _reset(two, seed + 1000)  # the episodes before must not matter
        started = [shown(*await _reset(env, seed)) for env in (one, two)]
        if started[0] != started[1]:
            yield _unequal(f"seed {seed} began with two texts, {brief(started[0])} and {brief(started[1])}")
            return
        for turn, action in enumerate(actions, 1):
            first, second = [await _step(env, action) for env in (one, two)]
            if first[:4] != second[:4]:
                yield _unequal(f"seed {seed}, turn {turn}: {brief(first[:4])} and {brief(second[:4])}")
                return
            if first[2] or first[3]:
                break


async def _some_episode(env: Any, seed: int) -> list[str]:
    """Play an episode, at most `_MOST_TURNS` turns long, and return its actions."""
    await _reset(env, seed)
    actions: list[str] = []
    over = False
    while not over and len(actions) < _MOST_TURNS:
        actions.append(_action(env))
        stepped = await _step(env, actions[-1])
        over = stepped[2] or stepped[3]
    return actions


def _unequal(found: str) -> Finding:
    return Finding(
        rule="equal seeds and actions give equal episodes",
        found=found,
        remedy="draw everything from one generator of the environment's own, made anew in `reset`: `self._rng = "
        "random.Random(seed)`; use no global one, no time, and no order of a set",
    )


async def _other_seeds(build: Callable[[], Any], num_seeds: int) -> Any:
    seen = set()
    for seed in range(20):
        env = build()
        text = shown(*await _reset(env, seed))
        stepped = await _step(env, "\\boxed{1}")
        seen.add((text, stepped[0], stepped[1]))
    if len(seen) == 1:
        yield Finding(
            rule="other seeds give other episodes",
            found="20 seeds began alike, and answered the same action alike",
            remedy="pass the seed on to what draws the task; if there is just one task, nothing is wrong",
            fatal=False,
        )


async def _odd_texts(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()
    for text in _ODD:
        await _reset(env, 0)
        await _step(env, text)
    for part in _REPEATED:
        for length in _LENGTHS:  # increasing, so that superlinear time is found before it takes forever
            text = part * (length // len(part))
            took = await _seconds(partial(_step, env, text), before=partial(_reset, env, 0))
            if took > _SLOW_S:
                yield _slow(text, f"took {took:.1f} s")
                break


async def _seconds(call: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Measure the duration of a call in seconds; a slow call is repeated once, since the machine may have paused."""
    took = math.inf
    for _ in range(2):
        if before is not None:
            await before()
        started = time.perf_counter()
        await call()
        took = min(took, time.perf_counter() - started)
        if took <= _SLOW_S:
            break
    return took


def _slow(text: str, found: str) -> Finding:
    return Finding(
        rule="a step takes time that grows with the action's length at most",
        found=f"an action of {len(text)} characters, {brief(text)}, {found}",
        remedy="read actions without nested quantifiers in regular expressions, without `int` of long texts, and "
        "without "
        "recursion; cut them to a length that a move can have",
    )


async def _ends(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()  # one environment plays all episodes in turn
    longest = max([len(await _some_episode(env, seed)) for seed in range(num_seeds)])
    if longest == _MOST_TURNS:
        yield Finding(
            rule="episodes end",
            found=f"an episode of random actions went on for {_MOST_TURNS} turns",
            remedy="end it after some turns, or always give `num_turns` where it is used",
            fatal=False,
        )


async def _copies(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()
    await _reset(env, 0)
    spawn = getattr(env, "spawn", None)
    if callable(spawn):
        try:
            twin = spawn(same_state=True)
        except Exception as error:
            if not isinstance(error, NotImplementedError):
                yield Finding(
                    rule="`spawn(same_state=True)` gives a copy in the same state",
                    found=_describe_error(error),
                    remedy="return `copy.deepcopy(self)`, or raise NotImplementedError",
                )
            return
        action = _action(copy.deepcopy(env) if _copyable(env) else build())
        first, second = await _step(env, action), await _step(twin, action)
        if first[:4] != second[:4]:
            yield Finding(
                rule="`spawn(same_state=True)` gives a copy in the same state",
                found=f"the copy answered {brief(second[:4])} where the environment answered {brief(first[:4])}",
                remedy="copy the generator of random numbers as well, as `copy.deepcopy(self)` does",
            )
    try:
        pickle.dumps(build())
    except Exception as error:
        yield Finding(
            rule="an environment can be sent to another process",
            found=_describe_error(error),
            remedy="open files, connections and locks in `reset`, not in `__init__`; needed only to run it in the pool",
            fatal=False,
        )


async def _leaves_the_loop(build: Callable[[], Any], num_seeds: int) -> Any:
    env = build()

    async def play() -> None:
        await _reset(env, 0)
        await _step(env, _action(env))

    took = await _seconds(play)
    if took > _SLOW_S and not inspect.iscoroutinefunction(env.step):
        yield Finding(
            rule="a step in the loop takes microseconds",
            found=f"reset and a step took {took:.1f} s",
            remedy="run it with `host: pool`, or write `async def step`: everything else waits for it otherwise",
            fatal=False,
        )


async def _reset(env: Any, seed: int) -> Started:
    return checked_start(await _called(RESET_RULE, env.reset, seed=seed))


async def _step(env: Any, action: str) -> Stepped:
    return checked_step(await _called(STEP_RULE, env.step, action))


async def _called(rule: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    given = arguments[0] if arguments else keywords
    try:
        with _time_limit():
            value = call(*arguments, **keywords)
        return await asyncio.wait_for(value, _TIME_LIMIT_S) if inspect.isawaitable(value) else value
    except (_TooLongError, TimeoutError) as error:
        found = f"did not end within {_TIME_LIMIT_S:g} s"
        if isinstance(given, str) and len(given) >= _LENGTHS[0]:
            slow = _slow(given, found)
            raise ProtocolError(slow.rule, slow.found, slow.remedy) from error
        raise _HangsError(rule, f"{found}, given {brief(given)}", "look for a loop that does not end") from error
    except (Exception, SystemExit) as error:
        raise ProtocolError(
            rule, f"{_describe_error(error)}, given {brief(given)}", _remedy_for(call, error)
        ) from error


def _remedy_for(call: Callable[..., Any], error: BaseException) -> str:
    """Return how to fix an exception: a wrong signature, or a failure inside the environment."""
    if isinstance(error, TypeError) and raised_at(error).rpartition(":")[0] == __file__:
        name = "seed=None" if call.__name__ == "reset" else "action"
        return f"take `{name}` as its argument"
    return (
        "an exception is a failure of the environment, for which the rollout is repeated: answer what a player may "
        "write, whatever it is, with an observation and a reward"
    )


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Run the body with a timeout, which also interrupts regular expressions.

    It has no effect outside the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> None:
        raise _TooLongError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _action(env: Any) -> str:
    sample = getattr(env, "sample_random_action", None)
    try:
        return sample() if callable(sample) else "\\boxed{1}"
    except NotImplementedError:
        return "\\boxed{1}"


def _copyable(env: Any) -> bool:
    try:
        copy.deepcopy(env)
    except Exception:
        return False
    return True


def _describe_error(error: BaseException) -> str:
    """Describe an exception, with the line of the environment that raised it."""
    return f"{type(error).__name__}: {brief(str(error))} ({raised_at(error)})"
