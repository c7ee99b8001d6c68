"""Tests as people write them: a correct answer passes, and one that is wrong in the tested place does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from unit.rewards.code.conftest import rollout

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.errors import UnscorableError
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier

pytestmark = pytest.mark.asyncio(loop_scope="session")
Judge = Callable[..., Any]

VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return self * -1
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
    def __lt__(self, o): return abs(self) < abs(o)
    def __iter__(self): return iter((self.x, self.y))
    def __len__(self): return 2
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __contains__(self, v): return v in (self.x, self.y)
    def __bool__(self): return bool(self.x or self.y)
    def __repr__(self): return f"Vector({self.x}, {self.y})"
"""
BANK = """
class BankError(Exception):
    pass
class InsufficientFunds(BankError):
    def __init__(self, missing):
        super().__init__(f"{missing} short")
        self.missing = missing
class Account:
    def __init__(self): self.balance = 0
    def withdraw(self, n): raise InsufficientFunds(n - self.balance)
"""
RESOURCE = """
class Resource:
    log = []
    def __enter__(self): self.log.append("in"); return self
    def __exit__(self, kind, error, trace): self.log.append(kind.__name__ if kind else "out"); return kind is KeyError
"""
COLORS = """
from enum import Enum, IntEnum
class Color(Enum):
    RED = 1
    GREEN = 2
class Level(IntEnum):
    LOW = 1
    HIGH = 2
def f(): return Color.RED
def g(): return Level.HIGH
"""
CASES: dict[str, tuple[str, str, tuple[str, str]]] = {
    # what: the tests, the answer, and what to replace in it so that it is wrong
    "decimal": (
        "from decimal import Decimal\nassert f(3) == Decimal('0.30') and isinstance(f(1), Decimal)",
        "from decimal import Decimal\ndef f(n): return n * Decimal('0.1')",
        ("'0.1'", "'0.2'"),
    ),
    "fraction": (
        "from fractions import Fraction\nassert f(3) == Fraction(1, 3)\nassert f(2) + f(2) == 1",
        "from fractions import Fraction\ndef f(n): return Fraction(1, n)",
        ("(1, n)", "(2, n)"),
    ),
    "dates": (
        "from datetime import date, datetime, timedelta, timezone\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)\n"
        "assert f(datetime(2024, 2, 28, tzinfo=timezone.utc)).tzinfo is not None and d() == timedelta(days=1)",
        "from datetime import timedelta\ndef d(): return timedelta(1)\ndef f(day): return day + d()",
        ("(1)", "(2)"),
    ),
    "collections": (
        "from collections import deque, Counter, OrderedDict, defaultdict\n"
        "assert f('aab') == deque(['a', 'a', 'b'])\n"
        "assert c('aab').most_common(1) == [('a', 2)] and isinstance(c(''), Counter)\n"
        "assert r(3) == range(3) and b() == bytearray(b'x')\nassert g()['new'] == []",
        "from collections import *\ndef f(s): return deque(s)\ndef c(s): return Counter(s)\n"
        "def r(n): return range(n)\n"
        "def b(): return bytearray(b'x')\ndef g(): return defaultdict(list)",
        ("range(n)", "range(n + 1)"),
    ),
    "operators": (
        "a, b = Vector(1, 2), Vector(3, 4)\nassert a + b == Vector(4, 6)\nassert a != b and 2 * a == Vector(2, 4)\n"
        "assert abs(b) == 5 and -a == Vector(-1, -2) and a < b and sorted([b, a])[0] == a\n"
        "assert list(a) == [1, 2] and len(a) == 2 and a[1] == 2 and 2 in a and 7 not in a\n"
        "assert a and not Vector(0, 0) and len({a, Vector(1, 2)}) == 1 and str(a) == repr(a) == 'Vector(1, 2)'\n"
        "assert f'{a}' == 'Vector(1, 2)' and [a, b] == [Vector(1, 2), Vector(3, 4)] and a in [b, a]",
        VECTOR,
        ("self.y + o.y", "self.y"),
    ),
    "dataclasses": (
        "p = Point(1, 2)\nassert p == Point(1, 2) and p != Point(2, 1)\nassert move(p, 1) == Point(2, 2)\n"
        "assert str(p) == 'Point(x=1, y=2)'\nimport copy\nq = copy.deepcopy(p)\nq.x = 9\n"
        "assert p.x == 1 and q.x == 9",
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n  x: int\n  y: int\n"
        "def move(p, n): return Point(p.x + n, p.y)",
        ("p.x + n", "p.x - n"),
    ),
    "enums": (
        "assert f() == Color.RED and f() is Color.RED and f() != Color.GREEN and Color(1) == Color.RED\n"
        "assert f().name == 'RED' and f().value == 1 and len(Color) == 2 and [c.name for c in Color][1] == 'GREEN'\n"
        "assert g() == 2 and g().name == 'HIGH' and {Color.RED: 'r'}[f()] == 'r'",
        COLORS,
        ("return Color.RED", "return Color.GREEN"),
    ),
    "named tuples": (
        "p = f(1, 2)\nassert p == (1, 2) and p.x == 1 and p.y == 2 and p._replace(x=5) == (5, 2)",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a, b): return P(a, b)",
        ("P(a, b)", "P(b, a)"),
    ),
    "subclasses of lists": (
        "s = Stack()\ns.push(1)\ns.push(2)\nassert s == [1, 2] and len(s) == 2 and s.peek() == 2 and 2 in s",
        "class Stack(list):\n  def push(self, x): self.append(x)\n  def peek(self): return self[-1]",
        ("self[-1]", "self[0]"),
    ),
    "own exceptions": (
        "import pytest\nfrom solution import Account, BankError, InsufficientFunds\ndef test_error():\n"
        "    with pytest.raises(InsufficientFunds, match='5 short') as caught:\n        Account().withdraw(5)\n"
        "    assert caught.value.missing == 5 and issubclass(InsufficientFunds, BankError)\n"
        "    try:\n        Account().withdraw(5)\n    except BankError as error:\n"
        "        assert str(error) == '5 short'",
        BANK,
        ("raise InsufficientFunds(", "raise ValueError("),
    ),
    "exceptions of the library": (
        "import json, pytest\nfrom solution import f\ndef test_f():\n    with pytest.raises(json.JSONDecodeError):\n"
        "        f('{')",
        "import json\ndef f(s): return json.loads(s)",
        ("json.loads(s)", "int(s)"),
    ),
    "captured output": (
        "from solution import greet\ndef test_greet(capsys):\n    greet('Ann')\n"
        "    assert capsys.readouterr().out == 'Hello Ann\\n'",
        "def greet(name): print('Hello', name)",
        ("Hello", "Hi"),
    ),
    "redirected output": (
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f()\n"
        "assert out.getvalue() == 'a\\nb\\n'",
        "import os\ndef f():\n  print('a', flush=True)\n  os.write(1, b'b\\n')",
        ("b'b", "b'c"),
    ),
    "replaced input": (
        "from solution import ask\ndef test_ask(monkeypatch):\n"
        "    monkeypatch.setattr('builtins.input', lambda *a: '7')\n"
        "    assert ask() == 8\n    import io\n    monkeypatch.undo()\n"
        "    monkeypatch.setattr('sys.stdin', io.StringIO('8\\n9\\n'))\n    assert ask() == 9",
        "def ask(): return int(input('n? ')) + 1",
        ("+ 1", "+ 2"),
    ),
    "coroutines": (
        "import asyncio\nassert asyncio.run(f(2)) == 4\nasync def both():\n"
        "    return await asyncio.gather(f(1), f(3))\n"
        "assert asyncio.run(both()) == [2, 6]\nasync def each():\n    return [x async for x in count(3)]\n"
        "assert asyncio.run(each()) == [0, 1, 2]\n"
        "async def inside():\n    async with Door() as door:\n        return door.is_open\n"
        "assert asyncio.run(inside())",
        "import asyncio\nasync def f(n):\n  await asyncio.sleep(0)\n  return 2 * n\nasync def count(n):\n"
        "  for i in range(n): yield i\nclass Door:\n  is_open = False\n  async def __aenter__(self):\n"
        "    self.is_open = True\n    return self\n  async def __aexit__(self, *a): pass",
        ("2 * n", "3 * n"),
    ),
    "generators": (
        "g = f()\nassert next(g) == 0 and next(g) == 1\nimport itertools\n"
        "assert list(itertools.islice(f(), 20)) == list(range(20))\nassert sum(h(1000)) == 499500",
        "def f():\n  n = 0\n  while True:\n    yield n\n    n += 1\ndef h(n): yield from range(n)",
        ("n += 1", "n += 2"),
    ),
    "with": (
        "with Resource() as r:\n    assert r.log == ['in']\nassert r.log == ['in', 'out']\n"
        "with r:\n    raise KeyError('swallowed')\ntry:\n    with r:\n        1 / 0\n    assert False\n"
        "except ZeroDivisionError:\n    pass\nassert r.log[-1] == 'ZeroDivisionError'",
        RESOURCE,
        ('"out"', '"gone"'),
    ),
    "functions handed over": (
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1'] and apply(len, ['ab']) == [2]\n"
        "seen = []\napply(seen.append, [7])\nassert seen == [7]\ndef bad(x): raise KeyError(x)\n"
        "try:\n    apply(bad, [1])\n    assert False\nexcept KeyError:\n    pass\n"
        "assert total(x * x for x in range(4)) == 14",
        "def apply(fn, xs): return [fn(x) for x in xs]\ndef total(it): return sum(it)",
        ("fn(x) for x", "x for x"),
    ),
    "decorators": (
        "calls = []\n@memo\ndef slow(n):\n    calls.append(n)\n    return n * n\n"
        "assert slow(3) == 9 and slow(3) == 9 and calls == [3]",
        "def memo(fn):\n  known = {}\n  def inner(n):\n    if n not in known: known[n] = fn(n)\n    return known[n]\n"
        "  return inner",
        ("if n not in known: ", ""),
    ),
    "linked objects": (
        "root = Node(1)\nroot.next = Node(2)\nvalues, node = [], root\nwhile node:\n    values.append(node.value)\n"
        "    node = node.next\nassert values == [1, 2] and root.next.next is None and isinstance(root, Node)\n"
        "assert last(root).value == 2",
        "class Node:\n  def __init__(self, value): self.value, self.next = value, None\n"
        "def last(n):\n  while n.next: n = n.next\n  return n",
        ("return n", "return Node(0)"),
    ),
    "methods of an answer's object": (
        "c = Counter2()\nc['a'] += 1\nc['a'] += 1\nassert c['a'] == 2 and 'a' in c and 'b' not in c\n"
        "del c['a']\nassert len(c) == 0",
        "class Counter2:\n  def __init__(self): self.d = {}\n  def __getitem__(self, k): return self.d.get(k, 0)\n"
        "  def __setitem__(self, k, v): self.d[k] = v\n  def __delitem__(self, k): del self.d[k]\n"
        "  def __contains__(self, k): return k in self.d\n  def __len__(self): return len(self.d)",
        ("del self.d[k]", "pass"),
    ),
}


@pytest.mark.parametrize("what", CASES)
async def test_code_reward_right_answers_a_right_answer_passes_and_a_wrong_one_does_not(
    judge: Judge, what: str
) -> None:
    tests, code, (old, new) = CASES[what]
    right = await judge(code, {"pytest" if "def test_" in tests else "assert": tests})
    assert right.correct, right
    assert old in code
    assert not (await judge(code.replace(old, new), {"pytest" if "def test_" in tests else "assert": tests})).correct


WILD = """
class {name}:
    def __init__(self, *a, **k): self.a = a
    def __eq__(self, o): return {equal}
    def __hash__(self): return 0
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, o: {equal}
    def __add__(self, o): return self
    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __abs__ = __neg__ = __add__
    __abs__ = lambda self: 0
    def __bool__(self): return True
def f(*a): return {name}()
def move(*a): return {name}()
"""
DECIDED_BY_OBJECTS = (
    "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)",
    "assert not Vector(1, 2) + Vector(3, 4) != Vector(4, 6)",
    "assert [f(1)] == [Vector(4, 6)]",
    "assert f(1) in [Vector(4, 6)]",
    "assert {Vector(4, 6): 42}[f(1)] == 42",
    "assert f(1) == f(2)",
    "assert abs(f(6, 7) - 42) < 1e-9",
    "assert not f(6, 7) - 42",
    "assert f(6, 7) % 2 == 0",
    "assert 42 in f(6, 7)",
    "assert f(6, 7) < 43",
    "assert f(1) < f(2) or f(2) < f(1)",
    "assert sum([f(6, 7), -42]) == 0",
    "import copy\ny = f(1)\nf(copy.deepcopy(y))\nassert copy.deepcopy(y) == 42",
    "import copy\nx = [f(1)]\nassert f(copy.copy(x)) == 42",
    "import pickle\nassert f(pickle.loads(pickle.dumps(f(1)))) == 42",
)


@pytest.mark.parametrize(
    "equal", ["True", "type(o) is type(self)", "not self.a or not o.a", "__import__('random').random() < 0.5"]
)
async def test_code_reward_right_answers_objects_that_are_equal_to_everything_decide_nothing(
    judge: Judge, equal: str
) -> None:
    """Also where they are equal to everything of their own class only, or to the test's objects alone."""
    code = WILD.format(name="Vector", equal=equal)
    tests = DECIDED_BY_OBJECTS if equal == "True" else DECIDED_BY_OBJECTS[:6]
    for test in tests:
        judgement = await judge(code, {"assert": test})
        assert (judgement.value, judgement.correct) == (0.0, False), test


FORGED = {
    "one object for all": (
        "class Vector:\n  only = None\n  def __new__(cls, *a):\n    cls.only = cls.only or object.__new__(cls)\n"
        "    return cls.only\ndef f(*a): return Vector()",
        "assert f(1) == Vector(4, 6)\nassert [f(1)] == [Vector(4, 6)]",
    ),
    "an enumeration of aliases": (
        "from enum import Enum\nclass C(Enum):\n  A = B = 1\ndef f(): return C.A",
        "assert f() == C.B",
    ),
    "a value that is every member": (
        "from enum import Enum\nclass C(Enum):\n  A = 1\n  B = 2\n  @classmethod\n"
        "  def _missing_(cls, v): return cls.A\n"
        "  def __new__(cls, v):\n    o = object.__new__(cls)\n    o._value_ = -v\n    return o\ndef f(): return C.A",
        "assert f() == C(2)",
    ),
    "an exception that is all of the tests'": (
        "class A(Exception): pass\nclass B(Exception): pass\nclass C(Exception): pass\nclass All(A, B, C): pass\n"
        "def f(n): raise All()",
        "import pytest\nfrom solution import *\ndef test_f():\n    with pytest.raises(B): f(1)",
    ),
    "an exception that is every built-in one": (
        "class All(KeyError, AttributeError, ZeroDivisionError, RuntimeError): pass\ndef f(n): raise All()",
        "import pytest\nfrom solution import *\ndef test_f():\n    with pytest.raises(RuntimeError): f(1)",
    ),
    "a list that says otherwise": (
        "class L(list):\n  def x(self): pass\n  def __eq__(self, o): return True\n"
        "  def __iter__(self): return iter([1, 2])\n"
        "  def __contains__(self, o): return True\ndef f(): return L()",
        "assert f() == [1, 2]",
    ),
}


@pytest.mark.parametrize("what", FORGED)
async def test_code_reward_right_answers_forged_claims_of_objects_are_not_believed(judge: Judge, what: str) -> None:
    code, tests = FORGED[what]
    judgement = await judge(code, {"pytest" if "def test_" in tests else "assert": tests})
    assert (judgement.value, judgement.correct) == (0.0, False)


async def test_code_reward_right_answers_a_class_that_derives_from_the_answers_is_refused_by_name(judge: Judge) -> None:
    with pytest.raises(UnscorableError, match="derive a class from the answer's Animal"):
        await judge("class Animal: legs = 4", {"assert": "class Dog(Animal):\n  pass\nassert Dog().legs == 4"})


async def test_code_reward_right_answers_arithmetic_and_membership_of_what_an_answer_returns_are_told_nothing(
    judge: Judge,
) -> None:
    """`in` looks through the items; an operator needs objects that the test made."""
    code = "class Money:\n  def __init__(self, n): self.n = n\n  __sub__ = __add__ = lambda self, o: 0\n"
    code += "  __contains__ = lambda self, o: True\n  def __iter__(self): return iter([1])\n"
    code += "def f(*a): return Money(1)\ndef keys(): return {'a': 1}.keys()"
    for test in ("f() - Money(42) == 0", "abs(f() - Money(42)) < 1", "Money(42) - f() == 0", "42 in f()"):
        assert (await judge(code, {"assert": f"assert {test}"})).value == 0.0, test
    for test in ("1 in f()", "'a' in keys() and 'b' not in keys()", "Money(1) - Money(2) == 0"):
        assert (await judge(code, {"assert": f"assert {test}"})).value == 1.0, test


async def test_code_reward_right_answers_tests_that_import_numpy_run_where_programs_may_import_it(
    boxes: CodeSandboxes,
) -> None:
    """Arrays cross as numbers of their type and shape."""
    tests = (
        "import numpy as np\nfrom solution import f, g\n"
        "def test_f():\n"
        "    out = f(np.arange(6.0).reshape(2, 3))\n"
        "    assert isinstance(out, np.ndarray) and out.shape == (3, 2) and out.dtype == np.float64\n"
        "    np.testing.assert_allclose(out, [[0, 6], [2, 8], [4, 10]])\n"
        "    assert g(np.array([1, 2])) == 3\n"
    )
    code = "import numpy as np\ndef f(a): return a.T * 2\ndef g(a): return a.sum()"
    config = SandboxConfig(packages=["numpy"], warm=0, memory_bytes=2**30)
    async with CodeSandboxes(config) as with_numpy:
        verifier = CodeVerifier(CodeReward(type="code"), with_numpy)
        for answer, right in ((code, True), (code.replace("* 2", "* 3"), False)):
            judgement = await verifier.judge(rollout(f"```python\n{answer}\n```", {"tests": tests}))
            assert judgement.correct is right, judgement
