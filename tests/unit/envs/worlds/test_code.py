"""Programming tasks: references and solutions agree, and only right programs are rewarded."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from roll.envs.worlds.code import TASKS, CodeQuestion, extract_program


@pytest_asyncio.fixture
async def env() -> AsyncIterator[CodeQuestion]:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    made = CodeQuestion()
    yield made
    await made.close()


def test_env_code_every_solution_gives_what_its_reference_gives() -> None:
    for make in TASKS.values():
        for seed in range(30):
            task = make(Random(seed))
            names: dict[str, Any] = {}
            exec(f"def solve({task.arguments}):\n    {task.solution}", names)
            for _ in range(10):
                case = task.case(Random(seed))
                assert names["solve"](*case) == task.reference(*case)


async def test_env_code_right_programs_are_rewarded_and_hostile_ones_harm_nothing(env: CodeQuestion) -> None:
    for seed in range(4):
        env.reset(seed)
        assert (await env.step(env.solution()))[1:4] == (1.0, True, False)
    for program, reward in (
        ("", -0.1),
        ("I do not know", -0.1),
        ("```python\ndef solve(x): return 0\n```", 0.0),
        ("```python\nimport os; os.write(3, b'[1')\n```", 0.0),
        ("```python\nimport os; os.write(3, b'[' * 100000); os._exit(0)\n```", 0.0),
        ("```python\nraise SystemExit\n```", 0.0),
        ("```python\n\ud800\0\n```", 0.0),
        ("```python\n" + "x" * 100_000 + "\n```", 0.0),
    ):
        env.reset(0)
        assert (await env.step(program))[1:3] == (reward, True), program[:40]


@pytest.mark.slow
async def test_env_code_one_who_knows_how_succeeds_on_a_hundred_seeds(env: CodeQuestion) -> None:
    for seed in range(100):
        env.reset(seed)
        assert (await env.step(env.solution()))[1] == 1.0
    for seed in range(100):
        env.reset(seed)
        assert (await env.step(env.sample_random_action()))[2]


def test_env_code_a_copy_has_the_same_question() -> None:
    env = CodeQuestion()
    env.reset(3)
    assert env.spawn(same_state=True).solution() == env.solution()


def test_env_code_a_program_is_the_last_fenced_block() -> None:
    assert (
        extract_program("```python\na = 1\n```\nor\n```python\ndef solve(x): return x\n```") == "def solve(x): return x"
    )
    assert extract_program("def solve(x):\n    return x") == "def solve(x):\n    return x"
    assert extract_program("nothing") == ""
