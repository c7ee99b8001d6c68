"""Every kind of case in real sandboxes: correct and incorrect answers, limits, languages, mistakes in the tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from unit.rewards.code.conftest import rollout

from roll.config.rewards.code import CodeReward
from roll.errors import MalformedPromptError, UnscorableError
from roll.rewards.code import program
from roll.rewards.code.languages import describe_missing_tool
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier, build_code_verifier

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.integration]
Judge = Callable[..., Any]

ECHO_SUM = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
SUMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5 6", "stdout": "15"}]
CALLS = [{"args": [1, 2], "returns": 3}, {"args": ["a", "b"], "returns": "ab"}]


@pytest.mark.parametrize(
    ("code", "tests", "entry", "verdict"),
    [
        (ECHO_SUM, SUMS, None, "correct"),
        ("print(3)", SUMS, None, "wrong 1/2"),
        ("print(3)\nraise SystemExit(1)", SUMS[:1], None, "error 0/1"),
        ("print(3", SUMS, None, "no build 0/2"),
        ("def f(a, b): return a + b", CALLS, "f", "correct"),
        ("def f(a, b): return 3", CALLS, "f", "wrong 1/2"),
        ("def f(a, b): raise KeyError(a)", CALLS, "f", "error 0/2"),
        ("def g(a, b): return a + b", CALLS, "f", "error 0/2"),
        ("class S:\n  def f(self, a, b): return a + b", CALLS, "S().f", "correct"),
        ("async def f(a, b): return a + b", CALLS, "f", "correct"),
        ("def f(a, b): return (a, b)", [{"args": [1, 2], "returns": [1, 2]}], "f", "correct"),
        ("def f(a, b): return [a, b]", [{"args": [1, 2], "returns": {"python": "(1, 2)"}}], "f", "wrong 0/1"),
        ("def f(a): return {a: {1, 2}}", [{"args": [5], "returns": {"python": "{5: {2, 1}}"}}], "f", "correct"),
        ("def f(a): return 10 ** 30", [{"args": [5], "returns": 10**30}], "f", "correct"),
        ("def f(a): return object()", [{"args": [5], "returns": 1}], "f", "not plain 0/1"),
        ("def f(a): raise ValueError('no')", [{"args": [5], "raises": "ValueError"}], "f", "correct"),
        ("def f(a): raise UnicodeError", [{"args": [5], "raises": "ValueError"}], "f", "correct"),
        ("def f(a): return 1", [{"args": [5], "raises": "ValueError"}], "f", "wrong 0/1"),
        ("def f(a): return a * 2", ["assert f(2) == 4", "assert f([1]) == [1, 1]"], None, "correct"),
        ("def f(a): return a * 2", ["assert f(2) == 4", "assert abs(f(0.1) - 0.2) < 1e-9"], None, "correct"),
        ("def f(a): return a * 2", "x = f(3)\nassert x == 6\nassert x == 7", None, "wrong 1/2"),
        ("def f(a): a.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]", None, "correct"),
        ("def f(a): pass", "x = [3, 1]\nf(x)\nassert x == [1, 3]", None, "wrong 0/1"),
        ("def f(a): return (i for i in range(a))", "assert list(f(3)) == [0, 1, 2]", None, "correct"),
        (
            "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): self.items.append(x)\n"
            "  def pop(self): return self.items.pop()",
            "s = Stack()\ns.push(4)\ns.push(5)\nassert s.pop() == 5\nassert s.items == [4]",
            None,
            "correct",
        ),
        ("def f(a):\n  raise ValueError", "try:\n  f(1)\n  assert False\nexcept ValueError:\n  pass", None, "correct"),
        ("def f(a): return 1", "try:\n  f(1)\n  assert False\nexcept ValueError:\n  pass", None, "wrong 0/1"),
    ],
)
async def test_code_reward_verdicts(judge: Judge, code: str, tests: Any, entry: str | None, verdict: str) -> None:
    judgement = await judge(code, tests, entry=entry)
    assert (judgement.verdict, judgement.correct) == (verdict, verdict == "correct")
    assert judgement.value == float(verdict == "correct")


PYTEST_FILE = """
import pytest
from solution import f

@pytest.fixture
def three():
    return 3

@pytest.mark.parametrize("n", [0, 1, 2])
def test_doubles(n):
    assert f(n) == 2 * n

def test_text(three):
    assert f("a") == "aa" and f(three) == 6

class TestErrors:
    def test_none(self):
        with pytest.raises(TypeError):
            f(None)
"""


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("def f(x): return x * 2", 1.0),
        ("def f(x): return x + x if x != 1 else 0", 4 / 5),
        ("def f(x): return 0 if x is None else x * 2", 4 / 5),
        ("def g(x): return x * 2", 0.0),
        ("import os\ndef f(x): os._exit(0)", 0.0),
    ],
)
async def test_code_reward_verdicts_files_of_pytest(judge: Judge, code: str, share: float) -> None:
    judgement = await judge(code, PYTEST_FILE, credit="share")
    assert judgement.value == pytest.approx(share)
    assert judgement.correct is (share == 1)
    assert (await judge(code, {"pytest": PYTEST_FILE})).value == float(share == 1)


async def test_code_reward_verdicts_partial_credit_counts_cases_and_each_has_a_metric(judge: Judge) -> None:
    tests = [{"args": [n], "returns": n * n} for n in range(4)]
    judgement = await judge("def f(x): return x", tests, entry="f", credit="share", case_metrics=3)
    assert (judgement.value, judgement.correct, judgement.verdict) == (0.5, False, "wrong 2/4")
    assert dict(judgement.parts) == {
        "passed": 0.5,
        "case_0": 1.0,
        "case_1": 1.0,
        "case_2": 0.0,
        "timeout": 0.0,
        "error": 0.0,
    }


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("while True: pass", "timeout 0/1"),
        ("import signal\nsignal.setitimer(signal.ITIMER_PROF, 0)\nwhile True: pass", "timeout 0/1"),
        ("import time\ntime.sleep(1000)", "timeout 0/1"),
        ("while True: print('x' * 1000)", "output 0/1"),
        ("x = []\nwhile True: x.append(bytearray(10 ** 7))", "memory 0/1"),
    ],
)
async def test_code_reward_verdicts_limits(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, code: str, verdict: str
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 2.0 if "sleep" in code else 60.0)
    cpu_s = 20.0 if "bytearray" in code else 0.3
    limits = {"max_cpu_s": cpu_s, "min_cpu_s": cpu_s, "wall_factor": 1, "max_output_bytes": 9999}
    judgement = await judge(code, [{"stdout": "1"}], **limits)
    assert (judgement.verdict, judgement.value) == (verdict, 0.0)


async def test_code_reward_verdicts_a_case_over_its_time_leaves_the_others_their_verdict(judge: Judge) -> None:
    tests = [{"args": [n], "returns": n} for n in (1, 0, 2)]
    code = "def f(n):\n  while n == 0: pass\n  return n"
    shared = await judge(code, tests, entry="f", credit="share", max_cpu_s=0.3, min_cpu_s=0.3)
    assert (shared.value, shared.verdict) == (pytest.approx(2 / 3), "timeout 2/3")
    first = await judge(code, tests, entry="f", max_cpu_s=0.3, min_cpu_s=0.3)
    assert (first.value, first.verdict, first.parts["case_2"]) == (0.0, "timeout 1/3", 0.0)  # nothing left to win
    loops = "def f(n):\n  while n == 0: pass\n  return n\n"
    asserts = ["assert f(int('0')) == 0", "assert f(int('2')) == 2"]
    dialogue = await judge(loops, asserts, credit="share", max_cpu_s=0.3, min_cpu_s=0.3)
    assert (dialogue.value, dialogue.verdict) == (0.5, "timeout 1/2")


@pytest.mark.parametrize(
    ("language", "right", "wrong"),
    [
        ("bash", 'read a b; echo "$((a + b))"', "echo 4"),
        (
            "javascript",
            "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
            "console.log(4)",
        ),
        (
            "cpp",
            "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
            "int main() {}",
        ),
    ],
)
async def test_code_reward_verdicts_languages(judge: Judge, language: str, right: str, wrong: str) -> None:
    if reason := describe_missing_tool(language):
        pytest.skip(reason)
    tests = [{"stdin": "1 2", "stdout": "3\n"}, {"stdin": "20 22", "stdout": "42\n"}]
    assert (await judge(right, tests, language=language)).verdict == "correct"
    assert (await judge(wrong, tests, language=language)).verdict == "wrong 0/2"


@pytest.mark.parametrize("language", ["python", "bash"])
@pytest.mark.parametrize("code", ["\ud800", "'\udcff'", "x = '\0'", "(" * 5000, "-" * 60_000 + "1"])
async def test_code_reward_verdicts_programs_that_are_hardly_text_are_the_answers_failure(
    judge: Judge, language: str, code: str
) -> None:
    for tests in ([{"stdout": "1"}], [{"stdout": "1"}] * 2):
        assert (await judge(code, tests, language=language)).value == 0.0
    if language == "python":
        assert (await judge(code, ["assert f(int('1')) == 1"])).value == 0.0


async def test_code_reward_verdicts_a_program_that_does_not_compile(judge: Judge) -> None:
    if reason := describe_missing_tool("cpp"):
        pytest.skip(reason)
    judgement = await judge("int main() { return x; }", [{"stdout": ""}], language="cpp")
    assert (judgement.verdict, judgement.value) == ("no build 0/1", 0.0)


async def test_code_reward_verdicts_a_program_may_read_its_input_in_any_way_and_leave_as_it_likes(judge: Judge) -> None:
    code = """
import atexit, sys, threading
atexit.register(lambda: print("end"))
def main():
    n = int(input())
    threading.Thread(target=lambda: print(sum(int(input()) for _ in range(n)), sys.stdin.read().strip())).start()
if __name__ == "__main__":
    main()
"""
    assert (await judge(code, [{"stdin": "2\n3\n4\nrest é\n", "stdout": "7 rest é\nend"}])).verdict == "correct"


@pytest.mark.parametrize(
    ("tests", "settings", "words"),
    [
        (None, {}, "the tests are empty"),
        ([{"args": [1], "return": 1}], {"entry": "f"}, "case 0 has the unsupported keys"),
        (["assert f(g) == 1"], {"entry": "f"}, "the tests use 'g', which is not defined in the tests or the setup"),
        (["assert f(object()) == 1"], {"entry": "f"}, "a test passes the candidate an object of type object"),
        (["assert f(int('1'))"], {"entry": "f", "setup": "1 / 0"}, "the setup failed: ZeroDivisionError"),
        ([{"stdout": "1"}], {"language": "cobol"}, "unknown language 'cobol'"),
        ([{"stdin": "x" * (17 * 2**20), "stdout": "1"}], {}, "bytes, got 17,825,7.."),
    ],
)
async def test_code_reward_verdicts_mistakes_in_the_tests_are_infrastructure_errors_that_name_the_prompt(
    judge: Judge, tests: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnscorableError, match=f"prompt 'd/0': its tests cannot be (used|run): .*{words}"):
        await judge("def f(x): return 1", tests, **settings)


async def test_code_reward_verdicts_a_missing_column_and_missing_code_are_told_apart(boxes: CodeSandboxes) -> None:
    verifier = CodeVerifier(CodeReward(type="code", max_code_bytes=100), boxes)
    with pytest.raises(MalformedPromptError, match=r"column 'tests' does not exist \(columns: test\)"):
        await verifier.judge(rollout("```python\n1\n```", {"test": []}))
    tests = {"tests": SUMS}
    for text, verdict in (
        ("```text\nnothing\n```", "no code"),
        ("  ", "no code"),
        (f"```\n{'x' * 101}\n```", "too long"),
    ):
        judgement = await verifier.judge(rollout(text, tests))
        assert (judgement.value, judgement.correct, judgement.verdict) == (0.0, False, verdict)


async def test_code_reward_verdicts_the_limit_follows_right_answers(boxes: CodeSandboxes) -> None:
    verifier = CodeVerifier(CodeReward(type="code", min_cpu_s=0.1, max_cpu_s=1.0), boxes)
    metadata = {"tests": [{"stdout": "1"}]}
    busy = "import time\nwhile time.process_time() < {}: pass\nprint(1)"
    assert (await verifier.judge(rollout(busy.format(100), metadata))).verdict == "timeout 0/1"
    assert (await verifier.judge(rollout(busy.format(0.2), metadata))).correct
    limit = verifier.limits.compute_cpu_limit_s("d/0", 0)
    assert 0.25 < limit < 1.0
    assert (await verifier.judge(rollout(busy.format(100), metadata))).verdict == "timeout 0/1"


async def test_code_reward_verdicts_a_resumed_verifier_is_as_strict_as_the_one_before_it(boxes: CodeSandboxes) -> None:
    config = CodeReward(type="code", min_cpu_s=0.1, max_cpu_s=3.0, cpu_factor=1.5)
    metadata = {"tests": [{"stdout": "1"}]}
    slow = rollout("import time\nwhile time.process_time() < 0.6: pass\nprint(1)", metadata)
    before = build_code_verifier(config, boxes)
    before.restore({"d/0": [[0, 0.2]]})  # correct answers took 0.2 s so far: 0.3 s is the limit
    assert (await before.judge(slow)).verdict == "timeout 0/1"
    resumed, forgetful = build_code_verifier(config, boxes), build_code_verifier(config, boxes)
    resumed.restore(json.loads(json.dumps(before.state())))
    assert (await resumed.judge(slow)).verdict == "timeout 0/1"
    assert (await forgetful.judge(slow)).verdict == "correct"


@pytest.mark.slow
async def test_code_reward_verdicts_a_right_answer_passes_on_a_machine_that_is_loaded_eight_times(judge: Judge) -> None:
    """Half a second of CPU takes longer than the limit of two seconds on the clock, and is no failure."""
    busy = "import time\nwhile time.process_time() < 0.7: pass\nprint(1)"
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8 * len(os.sched_getaffinity(0)))
    ]
    try:
        began = time.monotonic()
        limits = {"min_cpu_s": 2.0, "max_cpu_s": 2.0}
        judgements = await asyncio.gather(*(judge(busy, [{"stdout": "1"}], **limits) for _ in range(4)))
        assert [judgement.verdict for judgement in judgements] == ["correct"] * 4
        assert time.monotonic() - began > 2.0
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def test_code_reward_verdicts_many_answers_at_once_keep_their_verdicts(judge: Judge) -> None:
    async def one(n: int) -> bool:
        tests = [{"args": [n], "returns": n}, "assert f(int('7')) == 7"]
        code = "def f(x): return x" if n % 2 else "def f(x): return -x"
        return bool((await judge(code, tests, entry="f")).correct)

    assert await asyncio.gather(*map(one, range(1, 13))) == [n % 2 == 1 for n in range(1, 13)]
