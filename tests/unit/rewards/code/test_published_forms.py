"""Tests as data sets publish them: APPS, TACO, LiveCodeBench, CodeContests, SYNTHETIC-1."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from pydantic import ValidationError
from unit.rewards.code.conftest import rollout

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.rewards.code.batch import BatchRun
from roll.rewards.code.cases import CallCase, MalformedTestsError, StdinCase, TestCase
from roll.rewards.code.checker_run import CheckerRun
from roll.rewards.code.program import CandidateRun
from roll.rewards.code.sandbox_programs import wire
from roll.rewards.code.sandbox_programs.compare import is_same_value
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.tasks import parse_task
from roll.rewards.code.verdicts import TIMED_OUT
from roll.rewards.code.verifier import CodeVerifier, run_cases

pytestmark = pytest.mark.asyncio(loop_scope="session")
Judge = Callable[..., Any]

PLAIN = "def f(x):\n    return x + 1"
METHOD = "class Solution:\n    def f(self, x):\n        return x + 1"
TYPED = (
    "class Solution(object):\n    def two(self, nums: List[int], t: Optional[int]) -> List[int]:\n        return [0, 1]"
)
HELPED = "def g(x): return x + 1\nclass Solution:\n    def _h(self): pass\n    def f(self, x): return g(x)"
ECHO = {"input": "1", "output": "1\n", "fn_name": None}
COUNTS = "def f(x): return {int(k): v for k, v in Counter(x).items()}"
INPUTS = {"inputs": [[1]], "outputs": [2], "fn_name": "f"}
NESTED = {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("code", "tests", "right"),
    [
        (PLAIN, INPUTS, True),
        (PLAIN, NESTED, True),
        (METHOD, INPUTS, True),
        (METHOD, NESTED, True),
        (METHOD, {**INPUTS, "fn_name": "Solution().f"}, True),
        (PLAIN, {**INPUTS, "fn_name": "Solution().f"}, True),
        (METHOD + "\ndef f(x): return 0", INPUTS, False),  # a plain function of that name comes first
        (METHOD.replace("+ 1", "+ 2"), NESTED, False),
        ("def f(x): return [x + 1]", NESTED, True),  # as it is written, too
        ("def f(x): return [[x + 1]]", NESTED, False),
        ("def f(x): return [x + 1]", INPUTS, False),
        ("class Solution: pass", INPUTS, False),
        (TYPED, {"inputs": [[[2, 7], 9]], "outputs": [[[0, 1]]], "fn_name": "two"}, True),
        (TYPED, {"inputs": [[[2, 7], 9]], "outputs": [[0, 1]], "fn_name": "two"}, True),
        (COUNTS, {"inputs": [["112"]], "outputs": [{"1": 2, "2": 1}], "fn_name": "f"}, True),
        (COUNTS, {"inputs": [["112"]], "outputs": [[{"1": 2, "2": 2}]], "fn_name": "f"}, False),
        ("def f(d): return d[3]", {"inputs": [[{"3": 4}]], "outputs": [4], "fn_name": "f"}, True),
        ("def f(x): return (x, x)", {"inputs": [[1]], "outputs": [[1, 1]], "fn_name": "f"}, True),
        ("print(sum(map(int, input().split())))", {"inputs": ["1 2\n"], "outputs": ["3\n"]}, True),
        ("print(input() + input())", {"inputs": [["a", "b"]], "outputs": [["ab"]]}, True),
        ("print(int(input()) + 1)", {"inputs": [1], "outputs": [2]}, True),
        ("print(int(input()) + 1)", {"input": ["1", "2"], "output": ["2", "3"]}, True),  # CodeContests
        ("print(int(input()) + 1)", [{"input": "1", "output": "2", "testtype": "stdin"}], True),
        ("print(int(input()) + 1)", [{"input": "1", "output": "3", "testtype": "stdin"}], False),
        (METHOD, [{"input": "1", "output": "2", "testtype": "functional"}], True),  # LiveCodeBench, without a name
        (HELPED, [{"input": "1", "output": "2", "testtype": "functional"}], True),
        (PLAIN, [{"input": "1", "output": "2", "testtype": "functional"}], True),
        (PLAIN + "\ndef g(x): pass", [{"input": "1", "output": "2", "testtype": "functional"}], False),
        (TYPED, [{"input": "[2, 7]\n\n9", "output": "[0, 1]", "testtype": "functional", "fn_name": "two"}], True),
        (TYPED, [{"input": "[2, 7]\n9", "output": "[[0, 1]]", "testtype": "functional", "fn_name": "two"}], False),
        ("def f(s, b): return s if b else 0", [{"input": "'a'\nTrue", "output": "'a'", "type": "functional"}], True),
        (PLAIN, {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]}, True),
        (PLAIN, {"test_cases": [{"type": "function_call", "input": [1], "output": 2}], "fn_name": "f"}, True),
        ("print(input())", {"language": "python", "test_cases": [{"type": "stdin_stdout", **ECHO}]}, True),
    ],
)
async def test_code_reward_published_forms_code_tests_of_published_data_sets(
    judge: Judge, code: str, tests: Any, right: bool, as_text: bool
) -> None:
    judgement = await judge(code, json.dumps(tests) if as_text else tests)
    assert judgement.correct is right, judgement


async def test_code_reward_published_forms_code_imports_of_online_judges_are_there_for_functions_that_they_call(
    judge: Judge,
) -> None:
    code = "class Solution:\n    def f(self, x: List[int]) -> int:\n        return {expression}"
    for expression in ("Counter(x)[1]", "math.gcd(*x)", "gcd(*x)", "len(deque(x)) // 2", "heapq.nsmallest(1, x)[0]"):
        tests = {"inputs": [[[1, 2]]], "outputs": [1], "fn_name": "f"}
        assert (await judge(code.format(expression=expression), tests)).correct is True, expression
    assert (await judge("def f(x): return gcd(*x)", [{"args": [[1, 2]], "returns": 1}], entry="f")).correct is False
    own = "def gcd(a, b): return 7\ndef f(x): return gcd(*x)"  # what the answer defines comes first
    assert (await judge(own, {"inputs": [[[1, 2]]], "outputs": [7], "fn_name": "f"})).correct is True


async def test_code_reward_published_forms_code_of_an_answer_with_several_blocks_is_the_one_under_test(
    boxes: CodeSandboxes,
) -> None:
    verifier = CodeVerifier(CodeReward(type="code"), boxes)
    text = f"```python\n{METHOD}\n```\nUse it:\n```python\nprint(Solution().f(1))\n```\n```python\n>>> f(1)\n2\n```"
    assert (await verifier.judge(rollout(text, {"tests": NESTED}))).correct is True


async def test_code_reward_published_forms_code_may_import_numpy_without_a_setting(judge: Judge) -> None:
    assert (
        await judge("import numpy as np\nprint(np.arange(3).sum())", [{"stdin": "", "stdout": "3"}])
    ).correct is True


def settings(**values: Any) -> SandboxConfig:
    return SandboxConfig.model_validate(values)


async def test_code_reward_published_forms_code_packages_are_numpy_where_sandboxes_have_this_python() -> None:
    assert settings().program_packages == ["numpy"]
    assert settings(packages=[]).program_packages == []
    assert settings(packages=["sympy"]).program_packages == ["sympy"]
    assert settings(runtime="docker").program_packages == settings(image="x").program_packages == []
    assert settings(url="http://127.0.0.1:1").program_packages == []
    assert settings(runtime="subprocess", trust_programs=True).program_packages == []
    with pytest.raises(ValidationError, match="remove the key `packages`"):
        settings(runtime="subprocess", trust_programs=True, packages=["numpy"])


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ({"inputs": ["1"], "outputs": []}, "got 0 outputs and 1 inputs"),
        ({"inputs": ["1"], "outputs": ["1"], "fnname": "f"}, "unknown key 'fnname'. Did you mean 'fn_name'?"),
        ({"inputs": [1], "outputs": [1], "fn_name": "f"}, "case 0: the input must be a list with one entry per"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "f("}, "expected an expression"),
        ([{"input": "1", "output": "1", "testtype": "functionl"}], "got 'functionl'"),
        (
            [{"input": "x y", "output": "1", "testtype": "functional"}],
            "input: expected JSON or a Python literal, got 'x y'",
        ),
        ([{"input": {"a": 1}, "output": "1"}], "input and output must be a string, got {'a': 1}"),
        ([{"input": "1", "output": "1", "inptu": 2}], "unknown key 'inptu'"),
    ],
)
async def test_code_reward_published_forms_code_tests_that_cannot_be_read_say_what_is_wrong(
    tests: Any, words: str
) -> None:
    with pytest.raises(MalformedTestsError) as caught:
        parse_task(tests)
    assert words in str(caught.value)


async def test_code_reward_published_forms_code_pairs_become_cases() -> None:
    (call,) = parse_task(NESTED).cases
    assert isinstance(call, CallCase) and (call.entry, call.match, call.returns) == ("f", "wrapped", [2])
    assert wire.decode(call.args) == (1,)
    (program,) = parse_task([{"input": ["1", "2"], "output": [3]}]).cases
    assert program == StdinCase(stdin="1\n2", stdout="3")


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (2, [2], True),
        ([2], [2], True),
        ([[2]], [2], False),
        (3, [2], False),
        (2, [2, 2], False),
        ((1, 2), [[1, 2]], True),
    ],
)
async def test_code_reward_published_forms_code_wrapped_results_are_the_list_or_its_only_item(
    value: Any, expected: Any, same: bool
) -> None:
    assert is_same_value(json.loads(json.dumps(wire.encode(value))), expected, match="wrapped") is same


# ---- time


async def test_code_reward_published_forms_code_time_of_a_case_and_of_an_answer_is_bounded_by_default(
    boxes: CodeSandboxes,
) -> None:
    config = CodeReward(type="code")
    cases = [{"stdin": str(n), "stdout": "1"} for n in range(20)]
    run = CandidateRun(boxes, parse_task(cases), "", config, asyncio.get_running_loop().time() + config.time_limit_s)
    assert run.compute_wall_limit_s(30.0) == 60.0
    assert run.compute_wall_limit_s(2.0) == 40.0  # twenty times as much
    assert run.compute_wall_limit_s(0.1) == 10.0
    assert run.compute_wall_limit_s(100.0) == 200.0  # never less than what the CPU time takes
    wall_s = run.make_program([30.0] * 20, 1).wall_s
    assert wall_s is not None and wall_s <= 180.0


async def test_code_reward_published_forms_code_time_limit_is_one_of_all_cases_together(boxes: CodeSandboxes) -> None:
    """What is left is shared by calls and tests; once it is over, no further sandbox is asked for."""
    task = parse_task([{"args": [1], "returns": 1}, "assert f(1) < 2"], entry="f")
    plain, test = task.cases
    config, now = CodeReward(type="code"), asyncio.get_running_loop().time()
    none = cast("CodeSandboxes", None)
    assert isinstance(plain, CallCase) and isinstance(test, TestCase)
    assert await BatchRun(none, task, "", config, now).run([(plain, 1.0)] * 2) == [TIMED_OUT] * 2
    assert await CheckerRun(none, task, "", config, now).run([(test, 1.0)]) == [TIMED_OUT]
    assert 0 < CheckerRun(none, task, "", config, now + 5.0).remaining_s <= 5.0
    sleeps = "import time\ntime.sleep(600)\ndef f(x): return x"
    found = await run_cases(
        boxes, task, sleeps, [30.0, 30.0], CodeReward(type="code", time_limit_s=1.0, credit="share")
    )
    assert [verdict.verdict for verdict in found] == ["timeout", "timeout"]
