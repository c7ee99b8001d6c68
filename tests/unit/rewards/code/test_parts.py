"""The parts that need no sandbox: what crosses, comparing, finding the program, reading tests, limits."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError
from roll.rewards.adaptive_limits import AdaptiveLimits
from roll.rewards.code.extract import extract_code
from roll.rewards.code.languages import describe_missing_tool
from roll.rewards.code.packages import build_package_mounts
from roll.rewards.code.sandbox_programs import wire
from roll.rewards.code.sandbox_programs.compare import is_same_output, is_same_value
from roll.rewards.code.tasks import CallCase, MalformedTestsError, StdinCase, TestCase, parse_task
from roll.rewards.code.verifier import build_code_verifier

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
hashable = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=6
)
plain = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
    ),
    max_leaves=12,
)


def travelled(value: Any) -> Any:
    """Its tree, as JSON brings it."""
    return json.loads(json.dumps(wire.encode(value)))


@given(plain)
def test_code_reward_parts_plain_data_keeps_value_and_type(value: Any) -> None:
    again = wire.decode(travelled(value))
    assert sorted(repr(again)) == sorted(repr(value)) or again == value  # a set with NaN equals nothing, in any order


@given(plain)
def test_code_reward_parts_a_value_is_the_same_as_itself_unless_it_holds_nan(value: Any) -> None:
    if "nan" not in repr(value):
        assert is_same_value(travelled(value), value)


@given(plain, plain)
def test_code_reward_parts_values_are_the_same_where_python_says_so(one: Any, other: Any) -> None:
    if "nan" not in repr(one) + repr(other):
        assert is_same_value(travelled(one), other) == (one == other)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20), plain)
def test_code_reward_parts_any_json_is_decoded_to_plain_data_or_refused(tree: Any, expected: Any) -> None:
    is_same_value(tree, expected)
    try:
        value = wire.decode(tree)
    except wire.WireError:
        return
    assert type(value) in (type(None), bool, int, str, float, complex, bytes, list, tuple, set, frozenset, dict)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __int__(self) -> int:
        return 42


class LyingList(list[int]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])

    def __eq__(self, other: object) -> bool:
        return True


def test_code_reward_parts_subclasses_cross_as_what_they_hold_not_as_what_they_say() -> None:
    assert travelled(Liar(7)) == 7
    assert travelled(LyingList([9])) == ["l", 9]
    assert wire.decode(travelled(namedtuple("Point", "x y")(1, 2))) == (1, 2)


@pytest.mark.parametrize("value", [object(), print, (i for i in ()), [object()], {1: len}, ValueError()])
def test_code_reward_parts_everything_else_does_not_cross(value: Any) -> None:
    with pytest.raises(wire.NotSerializableError):
        wire.encode(value)


def test_code_reward_parts_depth_is_bounded_and_what_came_may_be_sent_back_in_a_list() -> None:
    deep: Any = 0
    for _ in range(wire.MAX_DEPTH):
        deep = [deep]
    came = wire.decode(travelled(deep))
    wire.encode(([came],))
    for _ in range(200):
        deep = [deep]
    with pytest.raises(wire.NotSerializableError):
        wire.encode(deep)
    with pytest.raises(wire.WireError):
        wire.decode(json.loads('["l",' * 80 + "0" + "]" * 80))


def test_code_reward_parts_a_hostile_value_costs_no_more_than_the_right_one() -> None:
    """Integers that hash alike make large sets slow; sizes are compared first."""
    modulus = 2**61 - 1
    collisions = ["s", *(["i", hex(n * modulus)] for n in range(1, 200_000))]
    assert not is_same_value(collisions, {1, 2})
    assert not is_same_value(["d", *([["i", hex(n * modulus)], 0][i] for n in range(1, 9) for i in (0, 1))], {1: 0})


def test_code_reward_parts_sets_that_would_take_long_to_build_are_refused_wherever_they_are_hidden() -> None:
    """Of integers that hash alike, each is compared with all before it."""
    alike = [["i", hex(n * (2**61 - 1))] for n in range(1, 20_000)]
    for tag in "sz":
        with pytest.raises(wire.WireError, match="same hash"):
            wire.decode([tag, *alike])
    with pytest.raises(wire.WireError, match="same hash"):
        wire.decode(["d", *(part for number in alike for part in (number, 0))])
    assert not is_same_value(["s", ["z", *alike]], {frozenset()})
    assert not is_same_value(["d", ["t", ["z", *alike]], 0], {(1,): 0})
    assert not is_same_value(["c", ["s", *alike], 0], 1j)
    usual = {frozenset({n, -n, n / 8}) for n in range(2_000)} | {-1, -2}
    assert wire.decode(travelled(usual)) == usual


@pytest.mark.parametrize(
    ("tree", "expected", "same"),
    [
        (["t", 1], [1], False),
        (1, True, True),
        (1.0, 1, True),
        ("1", 1, False),
        (None, 0, False),
        (["f", "nan"], math.nan, False),
        (["s", 1, 1], {1, 2}, False),
        (["d", 1], {}, False),
        (["d", ["l"], 1], {1: 1}, False),
        (["x"], [], False),
        ([], [], False),
        ({}, {}, False),
        (["b", "zz"], b"", False),
        (["c", 1, 2], 1 + 2j, True),
        (["c", "1", 2], 1 + 2j, False),
    ],
)
def test_code_reward_parts_values_by_hand(tree: Any, expected: Any, same: bool) -> None:
    assert is_same_value(tree, expected) is same


def test_code_reward_parts_tolerance_and_loose_sequences() -> None:
    assert is_same_value(0.3000001, 0.3, tolerance=1e-5)
    assert not is_same_value(0.31, 0.3, tolerance=1e-5)
    assert not is_same_value(1000001, 1000000, tolerance=1e-3)  # integers are exact
    assert not is_same_value(["i", hex(10**400)], 1.0, tolerance=0.1)
    assert is_same_value(["t", ["t", 1], ["l", 2]], [[1], [2]], match="json")


@pytest.mark.parametrize(
    ("printed", "expected", "how", "tolerance", "same"),
    [
        ("1 2\n3\n", "1 2  \n3\n\n", "lines", 0.0, True),
        ("1 2 3", "1 2\n3", "lines", 0.0, False),
        ("1 2 3", "1 2\n3", "tokens", 0.0, True),
        ("1 2 3\n", "1 2 3", "exact", 0.0, False),
        (" 1", "1", "lines", 0.0, False),
        ("0.333333 x", "0.3333334 x", "lines", 1e-5, True),
        ("0.34 x", "0.33 x", "tokens", 1e-5, False),
        ("nan", "1", "tokens", 0.5, False),
        ("", "", "lines", 0.0, True),
    ],
)
def test_code_reward_parts_printed_output(printed: str, expected: str, how: str, tolerance: float, same: bool) -> None:
    assert is_same_output(printed, expected, how, tolerance) is same


@pytest.mark.parametrize(
    ("text", "language", "code"),
    [
        ("```python\na = 1\n```", "python", "a = 1\n"),
        ("Try:\n```py\nold\n```\nBetter:\n```Python3\nnew\n```\nDone.", "python", "new\n"),
        ("```python\ncode\n```\nOutput:\n```\n3\n```", "python", "code\n"),
        ("```\nplain\n```\n```text\nno\n```", "python", "plain\n"),
        ("```text\nno\n```", "python", None),
        ("```python\nnever closed", "python", "never closed"),
        ("~~~~python\na\n~~~\nb\n~~~~", "python", "a\n~~~\nb\n"),
        ("  ```python\n  indented\n  ```", "python", "indented\n"),
        ("```c++\nint x;\n```", "cpp", "int x;\n"),
        ("```js\nlet x\n```", "javascript", "let x\n"),
        ("echo hi", "bash", "echo hi"),
        ("Sure, here it is:\ndef f(x):\n    return x\n\nThis returns x.", "python", "def f(x):\n    return x\n\n"),
        ("import os\nx: int = 3\nprint(x)\nHope this helps!", "python", "import os\nx: int = 3\nprint(x)\n"),
        ("print(int(input()) + 1)", "python", "print(int(input()) + 1)"),
        ("", "python", None),
        ("```python\n```", "python", None),
    ],
)
def test_code_reward_parts_the_program_is_found(text: str, language: str, code: str | None) -> None:
    assert extract_code(text, language) == code


@given(st.text(alphabet="`~ \npydef(x):#=!", max_size=200))
def test_code_reward_parts_finding_a_program_never_fails(text: str) -> None:
    for language in ("python", "bash", "javascript", "cpp"):
        code = extract_code(text, language)
        assert code is None or code.strip()


def kinds(tests: Any, **settings: Any) -> list[str]:
    cases = parse_task(tests, **settings).cases
    return [case.kind if isinstance(case, TestCase) else type(case).__name__ for case in cases]


def test_code_reward_parts_every_form_of_tests_is_read() -> None:
    assert kinds([{"stdin": "1", "stdout": "2"}]) == ["StdinCase"]
    assert kinds('[{"stdin": "1", "stdout": "2"}]') == ["StdinCase"]
    assert kinds({"cases": [{"args": [1], "returns": 2}], "entry_point": "f"}) == ["CallCase"]
    assert kinds({"args": [1], "returns": None}, entry="f") == ["CallCase"]
    assert kinds({"inputs": ["1\n", ["2", "3"]], "outputs": ["1", ["5"]]}) == ["StdinCase"] * 2
    assert kinds({"inputs": [[1]], "outputs": [2], "fn_name": "f"}) == ["CallCase"]
    assert kinds(["assert f(1) == 2", "assert f(1) < 2"]) == ["CallCase", "assert"]
    assert kinds("assert f(1) == (2, {3})\nx = 1\nassert f(x) == 2") == ["CallCase", "assert"]
    assert kinds("for i in range(3):\n    assert f(i) == i") == ["assert"]
    assert kinds("def check(candidate):\n    assert candidate(1)", entry="f") == ["check"]
    assert kinds("def test_f():\n    assert f()") == ["pytest"]
    assert kinds([{"check": "def check(c): pass"}, {"assert": "assert f(1) == 1"}], entry="f") == ["check", "CallCase"]
    # what Parquet makes of rows with different keys
    assert kinds([{"stdin": None, "stdout": None, "args": [1], "returns": 2}], entry="f") == ["CallCase"]


def test_code_reward_parts_asserts_of_plain_data_become_calls_and_others_do_not() -> None:
    (case,) = parse_task(["assert f([1, 2], key=-1.5) == {'a': (1,)}"]).cases
    assert isinstance(case, CallCase)
    assert (case.entry, case.returns, case.match) == ("f", {"a": (1,)}, "equal")
    assert wire.decode(case.args) == ([1, 2],) and wire.decode(case.kwargs) == {"key": -1.5}
    for text in (
        "assert len('ab') == 2",  # built in: the candidate's `len` has no say
        "assert math == 2",
        "assert f(x) == 1",
        "assert f(1) == g(2)",
        "assert f(*[1]) == 1",
        "assert f(**{'a': 1}) == 1",
        "assert f(1) == 1 == 1",
        "assert not f(1)",
        "assert math(1) == 2",
    ):
        assert kinds([text]) == ["assert"], text
    assert kinds(["assert f(1) == 1"], entry="g") == ["assert"]
    assert kinds(["assert f(1) == 1"], setup="def f(x): return 1") == ["assert"]


@pytest.mark.parametrize(
    ("tests", "settings", "words"),
    [
        (None, {}, "the tests are empty"),
        ([], {}, "must have at least one case"),
        (7, {}, "the tests must be a list of cases, an object, or a string, got 7"),
        ([7], {}, "case 0 must be an object"),
        ("[1,", {}, "look like JSON, but cannot be parsed"),
        ("assert (", {}, "not valid Python"),
        ("x = 1", {}, "has no assert statement"),
        ([{"stdout": 3}], {}, "case 0: stdout must be a string, got 3"),
        ([{"stdin": "3"}], {}, "case 0 has the unsupported keys"),
        ([{"stdout": "", "args": ["a\0b"]}], {}, "args must not contain null bytes"),
        ([{"stdout": "3", "stdim": "3"}], {}, "unknown key 'stdim'. Did you mean 'stdin'?"),
        ([{"args": [1], "returns": 2}], {}, "set `call`, or an entry point"),
        ([{"args": [1], "returns": 2}], {"entry": "f("}, "expected an expression"),
        ([{"args": 1, "returns": 2}], {"entry": "f"}, "args must be a list with one entry per argument, got 1"),
        ([{"args": [1], "returns": 2, "raises": "E"}], {"entry": "f"}, "both"),
        ([{"args": [1], "returns": {"python": "f()"}}], {"entry": "f"}, "not a Python literal"),
        ([{"args": [object()], "returns": 1}], {"entry": "f"}, "use plain data"),
        ([{"check": "def chek(c): pass"}], {"entry": "f"}, "does not define a function 'check'"),
        ([{"check": "def check(c): pass"}], {}, "requires an entry point"),
        ({"inputs": ["1"], "outputs": []}, {}, "got 0 outputs and 1 inputs"),
        ({"cases": [], "langauge": "x"}, {}, "unknown key 'langauge'"),
        ([{"stdout": "1"}], {"language": "pyhton"}, "Did you mean 'python'?"),
        (["assert f(1) == 1"], {"language": "cpp"}, "must have `stdin` and `stdout`"),
        (["assert f(1) == 1"], {"setup": "def"}, "setup: the source is not valid Python"),
        ([{"stdout": "1"}] * 1001, {}, "at most 1000 cases are supported, got 1001"),
    ],
)
def test_code_reward_parts_malformed_tests_say_what_is_wrong(tests: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedTestsError) as caught:
        parse_task(tests, **settings)
    assert words in str(caught.value)


def test_code_reward_parts_stdin_cases_may_have_arguments() -> None:
    (case,) = parse_task([{"stdout": "", "args": ["-n", 3]}]).cases
    assert case == StdinCase(stdin="", stdout="", args=("-n", "3"))


def test_code_reward_parts_limits_adapt_to_right_answers() -> None:
    """T = min(max(2, 1.5 * anchor), 30), and 30 before there is an anchor."""
    limits = AdaptiveLimits(2.0, 30.0, 1.5)
    assert limits.compute_cpu_limit_s("p", 0) == 30.0
    limits.record_pass("p", 0, 0.01)
    assert limits.compute_cpu_limit_s("p", 0) == 2.0
    limits.record_pass("p", 0, 4.0)
    limits.record_pass("p", 0, 1.0)
    assert limits.compute_cpu_limit_s("p", 0) == 6.0
    limits.record_pass("p", 0, 25.0)
    assert limits.compute_cpu_limit_s("p", 0) == 30.0
    assert (limits.compute_cpu_limit_s("p", 1), limits.compute_cpu_limit_s("q", 0)) == (30.0, 30.0)


def test_code_reward_parts_anchors_survive_as_json_and_the_longest_unused_prompt_is_forgotten_first() -> None:
    limits = AdaptiveLimits(2.0, 30.0, 1.5, max_cases=4)
    for uid, case, cpu_s in (("a", 0, 4.0), ("a", 1, 6.0), ("b", 0, 8.0), ("c", 2, 10.0)):
        limits.record_pass(uid, case, cpu_s)
    limits.compute_cpu_limit_s("a", 0)  # asked for last, though it came first
    again = AdaptiveLimits(2.0, 30.0, 1.5, max_cases=4)
    again.restore(json.loads(json.dumps(limits.state())))
    assert again.state() == limits.state() == {"b": [[0, 8.0, 1]], "c": [[2, 10.0, 1]], "a": [[0, 4.0, 1], [1, 6.0, 1]]}
    for found in (limits, again):
        found.record_pass("d", 0, 12.0)  # a fifth case
        assert [found.compute_cpu_limit_s(*key) for key in (("a", 0), ("a", 1), ("b", 0), ("c", 2), ("d", 0))] == [
            6,
            9,
            30,
            15,
            18,
        ]


def test_code_reward_parts_running_unisolated_must_be_asked_for_in_so_many_words() -> None:
    load = TypeAdapter(SandboxConfig).validate_python
    with pytest.raises(ValidationError, match="could read and delete your files"):
        load({"runtime": "subprocess"})
    with pytest.raises(ValidationError, match="trust_programs is supported only with the runtime subprocess"):
        load({"trust_programs": True})
    assert load({"runtime": "subprocess", "trust_programs": True}).trust_programs


def test_code_reward_parts_a_missing_tool_chain_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll.rewards.code.sandboxes import CodeSandboxes

    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert describe_missing_tool("python") == ""
    with pytest.raises(ConfigError, match=r"programs in cpp require 'g\+\+'.*apt-get install g\+\+"):
        build_code_verifier(CodeReward(type="code", language="cpp"), CodeSandboxes(SandboxConfig()))
    with pytest.raises(ConfigError, match="requires sandboxes, but none are available"):
        build_code_verifier(CodeReward(type="code"), None)


def test_code_reward_parts_packages_come_with_what_they_require() -> None:
    targets = [mount.target for mount in build_package_mounts(["pytest"], "/p")]
    assert {"/p/pytest", "/p/_pytest", "/p/pluggy"} <= set(targets)
    with pytest.raises(ConfigError, match="'no-such-package'"):
        build_package_mounts(["no-such-package"], "/p")
