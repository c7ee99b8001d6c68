"""Rewards as the scheduler sees them: composition, limits, and who is to blame."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, expand_rewards
from roll.data.reasoning_gym import load_task
from roll.errors import ConfigError, RewardInfraError, UnscorableError
from roll.protocols import Reward
from roll.rewards import build_reward
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]
EXAMPLE = Path(__file__).parents[3] / "examples" / "rewards" / "short_answer.py"


def build(pool: LocalWorkerPool, *entries: Any) -> Reward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(list(entries))), pool)


async def test_reward_math_is_scored_in_the_pool(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, "math")
    assert isinstance(reward, Reward)
    right, wrong = await reward(rollout("It is 7", "7")), await reward(rollout("It is 8", "7"))
    assert (right.value, right.correct, right.verdict, dict(right.components)) == (1.0, True, "correct", {"math": 1.0})
    assert (wrong.value, wrong.correct, wrong.verdict) == (0.0, False, "wrong")
    assert 0 < right.duration_s < 60
    assert pool._workers[0]._process is not None
    assert (await reward(rollout(r"\boxed{\sqrt{49}}", "7"))).correct is True
    integral = await reward(rollout(r"\boxed{\int_0^1 x dx}", "7"))
    assert (integral.value, integral.correct) == (0.0, False)


@pytest.mark.parametrize(
    "entry",
    [
        "math",
        "choice",
        "short_answer",
        {"type": "regex", "pattern": "a+{answer}"},
        {"type": "format", "tags": ["answer"]},
        {"type": "repetition"},
    ],
)
async def test_reward_no_verifier_reads_an_answer_in_the_controllers_process(
    rollout: MakeRollout, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they call on a text goes to the pool, which is all that this one counts."""
    asked: list[str] = []

    class Recorded:
        async def submit(self, function: Callable[..., Any], *args: Any, time_limit_s: float) -> Any:
            asked.append(function.__qualname__)
            assert 0 < time_limit_s < 60
            return function(*args)

    reference = "B" if entry == "choice" else "7"
    await build(Recorded(), entry)(rollout("The answer is (B) 7.", reference))  # type: ignore[arg-type]
    assert len(asked) == 1


async def test_reward_a_cut_off_answer_scores_0_unless_told_otherwise(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    cut = rollout("7", "7", finished=False)
    result = await build(pool, "exact")(cut)
    assert (result.value, result.correct, result.verdict) == (0.0, False, "unfinished")
    lenient = await build(pool, {"type": "exact", "require_finished": False})(cut)
    assert (lenient.value, lenient.correct, lenient.verdict) == (1.0, True, "correct")


@pytest.mark.parametrize(
    ("text", "settings", "equal"),
    [
        (" Blue\n", {}, True),
        ("blue", {"ignore_case": False}, False),
        (" Blue", {"strip": False}, False),
        ("Blue.", {}, False),
    ],
)
async def test_reward_exact_compares_the_text(
    pool: LocalWorkerPool, rollout: MakeRollout, text: str, settings: dict[str, bool], equal: bool
) -> None:
    result = await build(pool, {"type": "exact", **settings})(rollout(text, "Blue"))
    assert (result.value, result.correct) == (float(equal), equal)


async def test_reward_a_pattern_with_the_answer_decides_and_one_without_checks_the_form(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    decides = build(pool, {"type": "regex", "pattern": r"Answer: {answer}$"})
    assert (await decides(rollout("Answer: 1.5", "1.5"))).correct is True
    assert (await decides(rollout("Answer: 1x5", "1.5"))).correct is False  # the dot is no wild card
    form = build(pool, {"type": "regex", "pattern": "^Answer:"})
    found = await form(rollout("Answer: 3"))
    assert (found.value, found.correct, found.verdict) == (1.0, None, "match")
    assert (await form(rollout("Answer", finished=False))).correct is None


async def test_reward_a_verifier_that_takes_too_long_counts_as_wrong(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    slow = build(pool, {"type": "regex", "pattern": "(a+)+$|{answer}", "time_limit_s": 0.3})
    result = await slow(rollout("a" * 60 + "b", "?"))
    assert (result.value, result.correct, result.verdict) == (0.0, False, "timeout")
    patient = build(pool, {"type": "regex", "pattern": "(a+)+$|{answer}"})
    assert (await patient(rollout("?", "?"))).verdict == "correct"


@pytest.mark.parametrize("text", [r"\boxed{10^{10^{10}}}", r"\boxed{2^{2^{2^{2^{2^2}}}}}", r"$9^{9^{9^{9}}}$"])
async def test_reward_mathematics_that_explodes_is_refused_at_once(
    pool: LocalWorkerPool, rollout: MakeRollout, text: str
) -> None:
    result = await build(pool, "math")(rollout(text, "7"))
    assert (result.value, result.correct, result.verdict) == (0.0, False, "too large")
    assert pool.health()["restarts"] == 0


async def test_reward_mathematics_that_never_ends_costs_its_time_limit_and_no_worker(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    hard = r"\boxed{\int e^{x^{2}} \sin x^{3} \log x dx}"
    result = await build(pool, {"type": "math", "time_limit_s": 1.0})(rollout(hard, r"\sqrt{7}"))
    assert (result.value, result.correct, result.verdict) == (0.0, False, "timeout")
    assert pool.health()["restarts"] == 0


async def test_reward_components_are_weighted_named_and_agree_on_what_is_solved(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    reward = build(
        pool,
        {"type": "regex", "pattern": "Answer", "name": "form", "weight": 0.25},
        {"type": "math", "weight": 2.0},
        {"type": "regex", "pattern": "7", "weight": -0.5},
        {"type": "regex", "pattern": "{answer}"},
    )
    result = await reward(rollout("Answer 7", "7"))
    assert result.value == 0.25 + 2.0 - 0.5 + 1.0
    assert dict(result.components) == {"form": 1.0, "math": 1.0, "regex": 1.0, "regex#2": 1.0}
    assert (result.verdict, result.correct) == ("correct", True)
    half = await reward(rollout("7 Answer 8", "7"))  # the pattern finds a 7, the last number is 8
    assert (half.components["math"], half.components["regex#2"], half.correct) == (0.0, 1.0, False)
    assert half.verdict == "wrong"


def test_reward_an_empty_list_of_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="add at least one reward"):
        expand_rewards([])


USER_MODULE = """
import asyncio, os

def number(text, answer, metadata, bonus=0):
    return len(text) + bonus + metadata.get("level", 0)

async def slow_judge(text, answer, metadata) -> bool:
    await asyncio.sleep(0)
    return text == answer

def boom(text, answer, metadata):
    return 1 / 0

def die(text, answer, metadata):
    os._exit(1)

def words(text, answer, metadata):
    return "good"

def infinite(text, answer, metadata):
    return float("inf")

def scalar(text, answer, metadata):
    import numpy
    return numpy.float32(0.5)

def two(text):
    return 1

def nothing(text, answer, metadata):
    return None

constant = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current directory."""
    name = f"user_rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    (tmp_path / f"{name}_broken.py").write_text("x = 1\nundefined_name")
    monkeypatch.chdir(tmp_path)
    return name


def python(function: str, **settings: Any) -> dict[str, Any]:
    return {"type": "python", "function": function, **settings}


@pytest.mark.parametrize("form", ["{}:number", "{}.py:number", "./{}.py:number"])
async def test_reward_a_function_is_found_by_module_or_file_and_gets_its_options(
    pool: LocalWorkerPool, rollout: MakeRollout, module: str, form: str
) -> None:
    reward = build(pool, python(form.format(module), options={"bonus": 10}))
    result = await reward(rollout("abc", metadata={"level": 100}))
    assert (result.value, result.correct, result.verdict) == (113.0, None, "113")


async def test_reward_what_a_function_returns_says_what_it_means(
    pool: LocalWorkerPool, rollout: MakeRollout, module: str
) -> None:
    judge = build(pool, python(f"{module}:slow_judge"))
    assert (await judge(rollout("a", "a"))).correct is True
    assert (await judge(rollout("b", "a"))).verdict == "wrong"
    assert (await judge(rollout("a", "a", finished=False))).correct is False
    assert (await build(pool, python(f"{module}:scalar"))(rollout("a"))).value == 0.5
    graded = await build(pool, python(f"{EXAMPLE}:graded"))(rollout("It is 42.", "42"))
    assert (graded.value, graded.correct, graded.verdict) == (0.5, True, "wordy")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("{}:nubmer", r"has no 'nubmer'. Did you mean 'number'\?"),
        ("{}.py:nubmer", r"has no 'nubmer'. Did you mean 'number'\?"),
        ("no_such_module_here:score", "cannot be imported"),
        ("no/such/file.py:score", "file 'no/such/file.py' does not exist .looked for from"),
        ("{}_broken:score", "cannot be imported .*_broken.py:2.: NameError"),
        ("{}_broken.py:score", "cannot be imported .*_broken.py:2.: NameError"),
        ("{}:constant", "must be a function or a class, got int"),
        ("{}:two", "cannot be called as .text, answer, metadata., nor as .*: too many positional arguments"),
        ("{}:number", "cannot be called as .text, answer, metadata, size=…., nor as .*: got an unexpected keyword"),
    ],
)
async def test_reward_a_function_that_cannot_be_used_is_refused_at_once(
    pool: LocalWorkerPool, module: str, function: str, words: str
) -> None:
    options = {"size": 1} if function == "{}:number" else {}
    with pytest.raises(ConfigError, match=words):
        build(pool, python(function.format(module), options=options))


@pytest.mark.parametrize(
    ("function", "words"), [("words", "got 'good'"), ("infinite", "got inf"), ("nothing", "got None")]
)
async def test_reward_a_function_that_returns_no_number_fails_its_answer_and_names_the_prompt(
    pool: LocalWorkerPool, rollout: MakeRollout, module: str, function: str, words: str
) -> None:
    with pytest.raises(RewardInfraError, match=rf"^reward 'python': .*{words}.*\(prompt 'd/0'\)$"):
        await build(pool, python(f"{module}:{function}"))(rollout("a"))


@pytest.mark.parametrize(
    ("function", "words"),
    [("boom", r"verifier crashed \(.*user_rewards_.*\.py:12\): ZeroDivisionError"), ("die", "process died: .*code 1")],
)
async def test_reward_a_crash_is_our_failure_never_a_reward(
    pool: LocalWorkerPool, rollout: MakeRollout, module: str, function: str, words: str
) -> None:
    with pytest.raises(RewardInfraError, match=words):
        await build(pool, python(f"{module}:{function}"))(rollout("a"))
    assert (await build(pool, python(f"{module}:number"))(rollout("a"))).value == 1.0


async def test_reward_an_async_reward_waits_for_many_answers_at_once_and_for_no_more_than_it_may(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    together = python("worlds.coroutines:reward", options={"count": 4}, max_concurrent=4, time_limit_s=20.0)
    results = await asyncio.gather(*(build(pool, together)(rollout("a")) for _ in range(4)))
    assert [result.value for result in results] == [4.0] * 4
    three = python("worlds.coroutines:most_at_once", options={"count": 3}, max_concurrent=3, time_limit_s=20.0)
    reward = build(pool, three)
    results = await asyncio.gather(*(reward(rollout("a")) for _ in range(9)))
    assert max(result.value for result in results) == 3.0


@pytest.mark.parametrize("path", ["no_function", "module:", ":name", "a b:c", "x.py", "dir/module:name"])
def test_reward_a_malformed_import_path_is_refused_by_the_configuration(path: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(RewardList).validate_python(expand_rewards(python(path)))


async def test_reward_reasoning_gym_scores_with_the_tasks_own_scorer(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    options = {"min_terms": 2, "max_terms": 2}
    entry = load_task("chain_sum", 1, 0, options)[0]
    metadata = {"reasoning_gym": {"task": "chain_sum", "options": options, "entry": entry}}
    reward = build(pool, "reasoning_gym")
    answer = entry["answer"]
    tagged = await reward(rollout(f"Hm, <answer>1</answer>, no: <answer> {answer} </answer>", metadata=metadata))
    assert (tagged.value, tagged.correct, tagged.verdict) == (1.0, True, "correct")
    assert (await reward(rollout(answer, metadata=metadata))).correct is True
    wrong = await reward(rollout("<answer>nothing</answer>", metadata=metadata))
    assert (wrong.correct, wrong.verdict) == (False, "wrong") and wrong.value <= 0.05
    with pytest.raises(UnscorableError, match="does not come from reasoning-gym"):
        await reward(rollout(answer))


async def test_reward_the_current_directory_cannot_shadow_the_standard_library(
    rollout: MakeRollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pickle.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    pool = LocalWorkerPool(1)
    try:
        assert (await build(pool, "math")(rollout(r"\boxed{\int_0^1 x dx}", "7"))).verdict == "wrong"
    finally:
        await pool.close()
    assert os.getcwd() == str(tmp_path)
