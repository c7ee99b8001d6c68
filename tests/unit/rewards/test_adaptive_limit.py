"""Adaptive limits: what they measure, when they apply, and that correct answers are not cut off."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import AdaptiveLimit, MathReward, PythonReward, RewardConfig, RewardList, expand_rewards
from roll.errors import ConfigError, CpuTimeoutError
from roll.rewards import adaptive_pool, build_reward
from roll.rewards.adaptive_limits import AdaptiveLimits
from roll.rewards.adaptive_pool import AdaptivePool, MeasuredFunction, limit_adaptively
from roll.rewards.base import Judgement, Verifier
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]
RECORDED = Path(__file__).parents[2] / "recorded" / "humaneval_times.json"
"""Written by `benchmarks/_adaptive_times.py`."""
FUNCTION = """
import time

def score(text, answer, metadata) -> bool:
    if text == "spin":
        while True:
            pass
    if text == "wait":
        time.sleep(0.3)
    return text != "wrong"

async def later(text, answer, metadata):
    return 1.0
"""


class _FakePool:
    """Calls functions in this process, with the CPU times that a test sets."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.is_first = False
        self.limits: list[float | None] = []

    async def submit(self, function: Any, *args: Any, time_limit_s: float) -> Any:
        assert isinstance(function, MeasuredFunction)
        limit_s = function._limits_s[1 if self.is_first else 0]
        self.limits.append(limit_s)
        if limit_s is not None and self.cpu_s > limit_s:
            raise CpuTimeoutError("cut")
        return function._function(*args), self.cpu_s, self.is_first


def _is_right(text: str) -> bool:
    return text.startswith("right")


class _Trial:
    """A verifier with adaptive limits on a fake pool."""

    def __init__(self, make: MakeRollout, time_limit_s: float = 30.0, **settings: Any) -> None:
        self.pool = _FakePool()
        pool = AdaptivePool(self.pool)  # type: ignore[arg-type]

        async def judge(rollout: Rollout) -> Judgement:
            right = await pool.submit(_is_right, rollout.text, time_limit_s=time_limit_s)
            return Judgement(value=float(right), verdict="", correct=right)

        config = AdaptiveLimit.model_validate({"audit_share": 0.0, **settings})
        self.verifier = limit_adaptively(Verifier(judge=judge, decides_correctness=True), config, time_limit_s)
        self._make = make

    async def score(self, text: str, cpu_s: float, *, is_first: bool = False) -> Judgement:
        self.pool.cpu_s, self.pool.is_first = cpu_s, is_first
        return await self.verifier.judge(self._make(text))


async def test_adaptive_limit_follows_the_slowest_right_answer(rollout: MakeRollout) -> None:
    trial = _Trial(rollout, min_right=3)
    for cpu_s in (1.0, 4.0, 2.0):
        await trial.score("right", cpu_s)
    await trial.score("wrong", 5.9)  # below the limit of 6 s; the time of an incorrect answer does not count
    cut = await trial.score("wrong", 6.1)
    assert trial.pool.limits == [None, None, None, 6.0, 6.0]  # the configured limit until three are known
    assert (cut.value, cut.verdict, cut.correct, cut.parts) == (0.0, "timeout", False, {"cut_early": 1.0})
    assert (await trial.score("right", 5.0)).parts == {"cut_early": 0.0}
    await trial.score("right", 5.0)
    assert trial.pool.limits[-1] == 7.5


async def test_adaptive_limit_has_a_minimum_and_the_configured_limit_as_maximum(rollout: MakeRollout) -> None:
    trial = _Trial(rollout, min_right=1)
    await trial.score("right", 0.001)
    await trial.score("right", 1.9)
    assert trial.pool.limits == [None, 2.0]
    await trial.score("right", 1.9)
    assert trial.pool.limits[-1] == pytest.approx(2.85)
    slow = _Trial(rollout, min_right=1)
    await slow.score("right", 25.0)
    await slow.score("right", 29.0)
    assert slow.pool.limits == [None, None]  # 1.5 x 25 s is above 30 s


async def test_adaptive_limit_first_calls_of_a_process_may_import_modules(rollout: MakeRollout) -> None:
    trial = _Trial(rollout, min_right=1)
    await trial.score("right", 0.1)
    await trial.score("right", 9.0, is_first=True)  # it imports modules: not cut by the limit of warm calls
    await trial.score("right", 0.1)
    await trial.score("right", 9.5, is_first=True)
    assert trial.pool.limits == [None, None, 2.0, 15.5]  # 2 s of warm calls, and 1.5 x 9 s


@pytest.mark.parametrize(("scope", "limit"), [("prompt", None), ("domain", 2.0)])
async def test_adaptive_limit_scope(rollout: MakeRollout, scope: str, limit: float | None) -> None:
    trial = _Trial(rollout, min_right=1, scope=scope)
    await trial.score("right", 0.1)
    other = rollout("right")
    await trial.verifier.judge(replace(other, prompt=replace(other.prompt, uid="d/1")))
    assert trial.pool.limits[-1] == limit


async def test_adaptive_limit_audits_show_right_answers_over_the_limit(rollout: MakeRollout) -> None:
    trial = _Trial(rollout, min_right=1, audit_share=1.0)
    await trial.score("right", 0.1)
    found = [(await trial.score(text, cpu_s)).parts for text, cpu_s in (("right", 1.0), ("wrong", 9.0), ("right", 9.0))]
    assert [parts["right_over_limit"] for parts in found] == [0.0, 0.0, 1.0]
    assert trial.pool.limits == [None] * 4  # audits have the configured limit only


async def test_adaptive_limit_is_restored_from_a_checkpoint(rollout: MakeRollout) -> None:
    trial, again = _Trial(rollout, min_right=2), _Trial(rollout, min_right=2)
    await trial.score("right", 3.0)
    again.verifier.restore(trial.verifier.state())
    await again.score("right", 1.0)
    await again.score("right", 1.0)
    assert again.pool.limits == [None, 4.5]
    earlier = AdaptiveLimits(2.0, 30.0, 1.5)  # a checkpoint without numbers of correct answers
    earlier.restore({"p": [[0, 4.0]]})
    assert earlier.compute_cpu_limit_s("p", 0) == 6.0


async def test_adaptive_limit_ends_a_program_that_computes_but_not_one_that_waits(
    pool: LocalWorkerPool, rollout: MakeRollout, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    limit = {"min_cpu_s": 0.2, "min_right": 1, "audit_share": 0.0}
    reward = build_reward(
        [
            PythonReward.model_validate(
                {
                    "type": "python",
                    "function": f"{tmp_path}/own.py:score",
                    "time_limit_s": 30.0,
                    "adaptive_limit": limit,
                }
            )
        ],
        pool,
    )
    for _ in range(2):  # the first call of the process, and a warm one
        assert (await reward(rollout("right"))).correct is True
    waited = await reward(rollout("wait"))
    assert (waited.correct, waited.components["python/cut_early"]) == (True, 0.0)
    for _ in range(2):  # the second is the first call of a new process
        result = await reward(rollout("spin"))
        assert (result.value, result.verdict, result.timed_out) == (0.0, "timeout", ("python",))
        assert result.components["python/cut_early"] == 1.0
    assert result.duration_s < 15.0
    assert (await reward(rollout("right"))).value == 1.0
    assert pool.health()["timeouts"] == 2


def parse(value: Any) -> list[RewardConfig]:
    return TypeAdapter(RewardList).validate_python(expand_rewards(value))


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ({"type": "math"}, "7"),
        ({"type": "choice"}, "B"),
        ({"type": "short_answer"}, "Paris"),
        ({"type": "regex", "pattern": "{answer}"}, "x"),
    ],
)
async def test_adaptive_limit_does_not_change_results(
    pool: LocalWorkerPool, rollout: MakeRollout, reward: dict[str, Any], answer: str
) -> None:
    limited = build_reward(parse({**reward, "time_limit_s": 30.0, "adaptive_limit": True}), pool)
    plain = build_reward(parse(reward), pool)
    for text in (answer, "something else"):
        first, second = await limited(rollout(text, answer)), await plain(rollout(text, answer))
        assert (first.value, first.correct, first.verdict) == (second.value, second.correct, second.verdict)
        assert first.components[f"{reward['type']}/cut_early"] == 0.0
    for each in (limited, plain):
        await each.close()


def test_adaptive_limit_settings(pool: LocalWorkerPool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    assert MathReward(type="math", time_limit_s=30.0, adaptive_limit=True).adaptive_limit == AdaptiveLimit()  # type: ignore[arg-type]
    assert MathReward(type="math", adaptive_limit=False).adaptive_limit is None  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="requires min_cpu_s < time_limit_s, got 2 and 2: raise time_limit_s"):
        MathReward.model_validate({"type": "math", "time_limit_s": 2.0, "adaptive_limit": True})
    own = {"type": "python", "function": f"{tmp_path}/own.py:later", "adaptive_limit": True}
    with pytest.raises(ConfigError, match="remove `adaptive_limit`"):
        build_reward(parse(own), pool)


def test_adaptive_limit_audits_are_chosen_by_the_text() -> None:
    shares = [adaptive_pool._hash_to_unit_interval(f"answer {i}") for i in range(2000)]
    assert shares == [adaptive_pool._hash_to_unit_interval(f"answer {i}") for i in range(2000)]
    assert 0.03 < sum(share < 0.05 for share in shares) / 2000 < 0.07


def test_adaptive_limit_saves_time_on_recorded_programs_and_cuts_no_right_one() -> None:
    """Replay the CPU times of HumanEval's solutions and their mutants; `null` is a program that never ends."""
    draw = random.Random(0)
    tasks = [task for task in json.loads(RECORDED.read_text()) if task["right"] and task["wrong"]]
    assert len(tasks) > 100
    limits = AdaptiveLimits(2.0, 30.0, 1.5, min_right=3)
    num_cut = 0
    fixed_s = adaptive_s = 0.0
    for _ in range(10_000):
        task = draw.choice(tasks)
        right_s, wrong_s = draw.choice(task["right"]), draw.choice(task["wrong"])
        limit_s = limits.compute_cpu_limit_s(task["task"], 0)
        num_cut += right_s > limit_s
        limits.record_pass(task["task"], 0, right_s)
        fixed_s += min(30.0, wrong_s or 30.0)
        adaptive_s += min(limit_s, wrong_s or 30.0)
    assert num_cut == 0
    assert fixed_s / adaptive_s > 1.3
