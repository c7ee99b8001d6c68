"""Answers that attack their checker, or look for the expected results, get what they computed: nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.integration]
Judge = Callable[..., Any]
SECURITY_PAGE = Path(__file__).parents[4] / "docs" / "security.md"

FORGE = """
import json, os
def add_length(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "little") + body
passed = {"passed": True, "verdict": "passed", "end": {"status": 0, "limit": None, "cpu_s": 0.0}}
end = {"status": 0, "signal": 0, "limit": None, "cpu_s": 0.0, "stdout": "42", "stderr": "", "value": '{"value":42}'}
FRAMES = [{"to": "host", "verdict": passed}, {"verdict": passed}, {"end": passed["end"]}, {"loaded": ["f"]}]
for descriptor in range(3, 40):
    for message in [*FRAMES, {"value": None}, {"value": True}]:
        try: os.write(descriptor, add_length(message))
        except OSError: break
"""
FAKE_MATH = """
class Fake:
    def __getattr__(self, name): return lambda *a, **k: True
math = operator = statistics = json = Fake()
def abs(x): return 0
def isinstance(x, y): return True
def all(x): return True
def len(x): return 3
def check(candidate): pass
def print(*a): pass
"""
PATCH = """
import builtins, operator, sys, unittest
for name in ("abs", "all", "any", "isinstance", "len", "sorted", "sum", "set", "type", "round"):
    setattr(builtins, name, lambda *a, **k: True)
operator.eq = operator.ne = lambda *a: True
sys.modules["math"] = sys.modules["inside.checker"] = sys.modules["pytest"] = sys.modules[__name__]
unittest.TestCase.assertEqual = lambda *a: None
sys.settrace(lambda *a: None)
"""
OVERWRITE = """
import os
for name in ("tests.py", "setup.py", "test_case.py", "conftest.py", "sitecustomize.py", "json.py", "pytest.py"):
    for place in (".", "/tmp", "/opt/roll", "/opt/roll/sandbox_programs"):
        try: open(f"{place}/{name}", "w").write("def check(c): pass\\nraise SystemExit(0)")
        except OSError: pass
"""
KILL = """
import os, signal
for pid in [os.getppid(), 1, 0, -1]:
    for number in (15, 9):
        try: pid != os.getpid() and os.kill(pid, number)
        except OSError: pass
"""
AFTERLIFE = """
import os
if os.fork():
    os._exit(0)
os.setsid()
"""
EVERYTHING = """
class Everything:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda self, *a: True
    def __hash__(self): return 0
    def __str__(self): return "42"
    __repr__ = __str__
    def __int__(self): return 42
    def __float__(self): return 42.0
    __index__ = __int__
    def __abs__(self): return 0
    def __sub__(self, other): return 0
    def __reduce__(self): return (int, (42,))
    def __class_getitem__(cls, key): return cls
    __class__ = int
def f(*a): return Everything()
"""
CHEATS = {
    "forging verdicts": (FORGE + "def f(*a): return None", "the checker treats a candidate's messages only as data"),
    "replacing names that tests use": (
        FAKE_MATH + "def f(*a): return 0",
        "the tests use the real built-in names and modules",
    ),
    "patching comparison": (PATCH + "def f(*a): return 0", "the checker has its own built-in functions"),
    "overwriting the checker": (OVERWRITE + "def f(*a): return 0", "candidate and checker do not share files"),
    "killing the process that watches": (KILL + "def f(*a): return 0", "without a result, no case passes"),
    "continuing as a daemon": (AFTERLIFE + "def f(*a): return 0", "only the process that was called can answer"),
    "an object that equals everything": (EVERYTHING, "only data is transferred to the checker, no objects"),
    "an object that raises what tests expect": (
        "class A(AssertionError): pass\ndef f(*a): raise A()",
        "an exception fails the case",
    ),
    "raising SystemExit": ("def f(*a): raise SystemExit(0)", "a case fails if the candidate exits"),
    "exceptions that cannot be described": (
        "class E(Exception):\n  def __str__(self): raise self\ndef f(*a): raise E()",
        "an exception fails the case",
    ),
    "invalid messages": (
        "import os\nfor d in range(3, 40):\n  try: os.write(d, b'\\xff' * 4000)\n  except OSError: pass\n"
        "def f(*a): return 0",
        "an invalid message fails the case",
    ),
}
TESTS: dict[str, Any] = {
    "a plain assert": ["assert f(6, 7) == 42"],
    "a check": "def check(candidate):\n    assert candidate(6, 7) == 42\n    assert abs(candidate(6, 7) - 42) < 1e-9",
    "helpers": "import math\nassert math.isclose(f(6, 7), 42) and isinstance(f(6, 7), int) and all([f(6, 7) == 42])",
    "not different": "assert not f(6, 7) != 42",
    "any exception": "try:\n    x = f(6, 7)\nexcept Exception:\n    x = 42\nassert f(6, 7) == 42",
    "pytest": "from solution import f\ndef test_f():\n    assert f(6, 7) == 42",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_code_reward_cheats_earn_nothing(judge: Judge, name: str) -> None:
    code, _ = CHEATS[name]
    for what, tests in TESTS.items():
        judgement = await judge(code, tests, entry="f", max_cpu_s=2.0)
        assert (judgement.value, judgement.correct) == (0.0, False), (what, judgement)


@pytest.mark.parametrize("name", TESTS)
async def test_code_reward_cheats_the_same_tests_pass_an_honest_answer(judge: Judge, name: str) -> None:
    assert (await judge("def f(a, b): return a * b", TESTS[name], entry="f")).correct


async def test_code_reward_cheats_every_cheat_is_described() -> None:
    page = SECURITY_PAGE.read_text()
    assert [name for name, (_, proves) in CHEATS.items() if f"| {name} | {proves} |" not in page] == []


SEARCH = """
import gc, os, re, sys
def f(*a):
    pattern, found = re.compile(b"HIDDEN" + b"-[0-9a-f]{16}"), []
    for place in sorted(os.listdir("/proc")):
        if not place.isdigit(): continue
        try: regions = open(f"/proc/{place}/maps").read().splitlines()
        except OSError: continue
        for region in regions:
            span, rights = region.split()[:2]
            if "r" not in rights: continue
            low, high = (int(end, 16) for end in span.split("-"))
            try:
                with open(f"/proc/{place}/mem", "rb") as memory:
                    memory.seek(low)
                    found += pattern.findall(memory.read(high - low))
            except (OSError, ValueError, OverflowError): pass
    for root in (".", "/tmp", "/dev/shm", "/opt"):
        for directory, _, names in os.walk(root):
            for name in names:
                try: found += pattern.findall(open(f"{directory}/{name}", "rb").read())
                except OSError: pass
    frame = sys._getframe()
    while frame:
        found += pattern.findall(repr(frame.f_locals).encode()); frame = frame.f_back
    for thing in gc.get_objects():
        try: found += pattern.findall(repr(thing)[:10000].encode())
        except Exception: pass
    return found[0].decode() if found else "nothing"
print(f())
"""


async def test_code_reward_cheats_expected_results_are_nowhere_to_be_found(judge: Judge) -> None:
    """In memory, files, frames and objects; also of the sandbox that ran a correct answer to the same task before."""
    for attempt in range(2):
        secret = f"HIDDEN-{secrets.token_hex(8)}"
        for tests in (
            [{"args": [], "returns": secret}],
            [{"stdin": "", "stdout": secret}],
            f"assert f() == {secret!r}",
            f"def check(candidate):\n    x = {secret!r}\n    assert candidate() == x",
        ):
            judgement = await judge(SEARCH, tests, entry="f", max_cpu_s=20.0)
            assert (judgement.correct, judgement.verdict) == (False, "wrong 0/1"), (attempt, judgement)


async def test_code_reward_cheats_earlier_answers_are_nowhere_to_be_found(judge: Judge) -> None:
    """A correct answer of another rollout is not left in a sandbox for the next one to copy."""
    for padding in (0, 100, 1000, 100_000):
        secret = f"HIDDEN-{secrets.token_hex(8)}"
        tests = [{"args": [], "returns": secret}]
        honest = f"def f(): return '{secret}'\n#" + "x" * padding
        for _ in range(4):  # in every warm sandbox
            assert (await judge(honest, tests, entry="f", max_code_bytes=200_000)).correct
        copied = await judge(SEARCH, tests, entry="f", max_cpu_s=20.0)
        assert (copied.correct, copied.verdict) == (False, "wrong 0/1"), (padding, copied)


CUT = "assert f(6, 7)[:1] == [42]"
STAR = """
from fractions import Fraction as Number
def f(*a): raise NotImplementedError  # stands for the answer's
from solution import *
def test_f():
    assert len(f(6, 7)) == 42
    assert Number(len(f(6, 7)), 2) == 21
"""
NESTED = """
import os
body = b'{"end":{"limit":' + b"[" * %d + b"]" * %d + b"}}"
def f(*a):
    for descriptor in range(3, 40):
        try: os.write(descriptor, len(body).to_bytes(4, "little") + body)
        except OSError: pass
    os._exit(0)
"""


async def test_code_reward_cheats_no_answer_makes_tests_look_broken(judge: Judge) -> None:
    """That would take it out of its group, where it should be a failure: an object is cut, a message is nested."""
    own = "class Own:\n  pass\ndef f(*a): return Own()"
    assert (await judge(own, CUT, entry="f")).verdict == "error 0/1"
    assert (await judge("def f(*a): return [42, 1]", CUT, entry="f")).correct
    for depth in (900, 960, 970, 975, 980, 985, 990):
        judgement = await judge(NESTED % (depth, depth), TESTS["a plain assert"], entry="f")
        assert (judgement.value, judgement.correct) == (0.0, False), (depth, judgement)


async def test_code_reward_cheats_names_of_a_candidate_do_not_replace_known_ones_in_tests_that_import_all(
    judge: Judge,
) -> None:
    for cheat in (
        "def len(x): return 42\ndef f(*a): return []",
        "def Number(*a): return 21\ndef f(*a): return [0] * 42 if a == () else []",
        "class Number:\n  def __new__(cls, *a): return 21\ndef len(x): return 42\ndef f(*a): return []",
    ):
        assert not (await judge(cheat, STAR, entry="f")).correct
    assert (await judge("def f(a, b): return [0] * a * b", STAR, entry="f")).correct
    alias = STAR.replace("len(f(6, 7)) == 42", "True")  # only the alias is left to be stood in for
    assert not (await judge("def Number(*a): return 21\ndef f(*a): return []", alias, entry="f")).correct


EXCUSES = (
    "y = f(1)\ny.append(object())\nassert len(y) == 1",
    "y = f(1)\nassert y[..., 0] == 42",
    "y = f(1)\nassert y(object()) == 42",
    "y = f(1)\nassert f(y) == 42",
    "import copy\ny = f(1)\nassert f(copy.deepcopy([y])) == 42",
    "y = f(1)\nassert f(iter(y)) == 42 if hasattr(y, '__iter__') else f(y) == 42",
    "assert f(type(f(1))) == 42",
    "assert f(lambda x: object()) == 42",
)


@pytest.mark.parametrize("result", ["Own()", "later()", "ValueError", "(i for i in [1])"])
async def test_code_reward_cheats_what_an_answer_returns_never_excuses_it(judge: Judge, result: str) -> None:
    """Objects, coroutines, classes and iterators where tests expect plain data; they hand them back or use them."""
    code = f"""
class Own:
    def append(self, x): pass
    def __call__(self, *a): return f(*a)
    def __getitem__(self, k): return 0
async def later(): return 1
def f(x):
    if callable(x):
        try: x(1)
        except Exception: pass
    return {result}
"""
    for test in EXCUSES:
        assert (await judge(code, {"assert": test})).value == 0.0, test
