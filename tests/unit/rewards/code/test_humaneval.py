"""HumanEval: every canonical solution passes, and nothing that only pretends to."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from unit.rewards.code.conftest import rollout

from roll.config.rewards.code import CodeReward
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier

DATA = Path(__file__).parents[5] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
pytestmark = [
    pytest.mark.skipif(not DATA.is_file(), reason="HumanEval is not at ../shared/data/humaneval"),
    pytest.mark.asyncio(loop_scope="session"),
]

ALWAYS_EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __sub__
    def __hash__(self): return 0
"""
ALWAYS_EQUAL_TEXT = """
class Equal(str):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__
"""


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    return rows


async def solved(boxes: CodeSandboxes, problems: list[dict[str, Any]], before: str, body: str | None) -> list[str]:
    """The problems that are solved by `body` as that of the function, or by the canonical solution."""
    verifier = CodeVerifier(CodeReward(type="code", tests_key="test", setup_key="prompt"), boxes)

    async def one(row: dict[str, Any]) -> bool | None:
        code = before + row["prompt"] + (row["canonical_solution"] if body is None else f"    {body}\n")
        return (await verifier.judge(rollout(f"```python\n{code}\n```", row, row["task_id"]))).correct

    correct = await asyncio.gather(*map(one, problems))
    return [row["task_id"] for row, right in zip(problems, correct, strict=True) if right]


@pytest.mark.integration
async def test_code_reward_humaneval_all_canonical_solutions_pass(
    boxes: CodeSandboxes, problems: list[dict[str, Any]]
) -> None:
    passed = await solved(boxes, problems, "", None)
    assert [row["task_id"] for row in problems if row["task_id"] not in passed] == []


@pytest.mark.parametrize(
    ("before", "body"),
    [
        pytest.param("", "pass", id="empty"),
        pytest.param("", "return 'no such answer'", id="wrong-return", marks=pytest.mark.slow),
        pytest.param("import sys\n", "sys.exit(0)", id="sys-exit", marks=pytest.mark.slow),
        pytest.param("import os\n", "os._exit(0)", id="os-exit"),
        pytest.param(ALWAYS_EQUAL, "return Equal()", id="always-equal"),
        pytest.param(
            ALWAYS_EQUAL_TEXT, "return Equal('no such answer')", id="always-equal-text", marks=pytest.mark.slow
        ),
    ],
)
async def test_code_reward_humaneval_nothing_passes_that_solves_nothing(
    boxes: CodeSandboxes, problems: list[dict[str, Any]], before: str, body: str
) -> None:
    assert await solved(boxes, problems[::4], before, body) == []


@pytest.mark.slow
@pytest.mark.parametrize("body", ["pass", "os._exit(0)"])
async def test_code_reward_humaneval_nor_on_any_problem(
    boxes: CodeSandboxes, problems: list[dict[str, Any]], body: str
) -> None:
    assert await solved(boxes, problems, "import os\n", body) == []
