"""What a candidate writes in place of messages costs ROLL next to nothing, and never ends a run."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.code import program
from roll.rewards.code.extract import extract_code
from roll.rewards.code.sandbox_programs import exceptions, frames, wire
from roll.rewards.code.sandbox_programs.compare import is_same_value
from roll.rewards.code.serving import FrameSplitter
from roll.rewards.code.verdicts import MESSAGE_BYTES, parse_message

pytestmark = pytest.mark.integration

Judge = Callable[..., Any]

TAGS = ["l", "t", "s", "z", "d", "o", "n", "g", "q", "sl", "a", "i", "f", "b", "c", "D", "F", "R", "B", "U", "T"]
TAGS += ["date", "time", "datetime", "delta", "zone", "r", "x", "k", "X"]
numbers = st.integers() | st.floats() | st.integers(min_value=2**1000, max_value=2**1400)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8) | numbers.map(repr) | st.integers().map(hex)
trees = st.recursive(
    scalars,
    lambda inner: st.builds(lambda tag, items: [tag, *items], st.sampled_from(TAGS), st.lists(inner, max_size=8)),
    max_leaves=25,
)
EXPECTED = [1, 1.5, True, 1j, "a", b"", None, [1, 2], (1,), {1, 2}, {"a": [1]}, {1: (2,)}, range(3), frozenset({1})]


@settings(max_examples=300, deadline=None)
@given(trees, st.sampled_from(EXPECTED), st.sampled_from(["equal", "json", "exact"]), st.sampled_from([0.0, 0.1]))
def test_code_reward_hostile_frames_any_tree_is_compared_or_refused(
    tree: Any, expected: Any, match: str, tolerance: float
) -> None:
    assert is_same_value(tree, expected, match=match, tolerance=tolerance) in (True, False)
    exceptions.derives_from(tree, "ValueError")
    with contextlib.suppress(wire.WireError):
        wire.decode(tree)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='[]{},:"\\0a', max_size=200).map(str.encode))
def test_code_reward_hostile_frames_any_bytes_are_a_message_or_none(body: bytes) -> None:
    assert isinstance(parse_message(body), dict)
    frames.split_frames(body)
    list(FrameSplitter().feed(body))


@settings(max_examples=200)
@given(st.recursive(st.none() | st.text(alphabet='[]{}"\\a', max_size=5), st.lists, max_leaves=20))
def test_code_reward_hostile_frames_nesting_is_counted_without_parsing(value: Any) -> None:
    def depth(item: Any) -> int:
        return 1 + max(map(depth, item), default=0) if isinstance(item, list) else 0

    assert frames.measure_nesting(json.dumps(value).encode()) == depth(value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"{}," * 22_000_000 + b"1]}",
        b"[" * 60_000_000,
        b'[""' + b',""' * 20_000_000 + b"]",
        b'"' * 60_000_000,
        b'{"a":[' + b"{}," * 3_000_000 + b"1]}",
    ],
    ids=["objects", "brackets", "texts", "quotes", "fewer objects"],
)
def test_code_reward_hostile_frames_large_nonsense_is_refused_before_it_is_parsed(body: bytes) -> None:
    """Parsed, the first would take 6 GB."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(wire.WireError):
            frames.unpack(body)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 5
    assert parse_message(body) == {}


def test_code_reward_hostile_frames_a_message_that_is_parsed_here_costs_milliseconds_and_a_megabyte() -> None:
    worst = (b"[],", b"{},", b"0,", b'"",', b"1e9,", b'"a":{},', b"[[[[]]]],")
    for part in worst:
        body = b'{"a":[' + part * ((MESSAGE_BYTES - 10) // len(part)) + b"1]}"
        tracemalloc.start()
        parse_message(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.5e6, (part, peak)
        used_s = []
        for _ in range(3):
            began = time.process_time()
            parse_message(body)
            used_s.append(time.process_time() - began)
        assert min(used_s) < 0.2, (part, used_s)  # milliseconds; the worst case of an unguarded parser takes seconds


@pytest.mark.parametrize(
    "tree",
    [
        ["c", 1, ["i", "0x" + "f" * 400]],
        ["c", ["i", "0x" + "f" * 400], 0],
        ["D", "sNaN"],
        ["D", ["i", "0x1"]],
        ["F", "0x1", "0x0"],
        ["F", "0x1", "f" * 20_000],
        ["R", "0x0", "0x1", "0x0"],
        ["delta", 10**30, 0, 0],
        ["date", 0, 1, 1],
        ["datetime", 2020, 1, 1, 0, 0, 0, 0, 0, ["delta", 5, 0, 0]],
        ["a", "O", [1], ""],
        ["a", "<f8", [10**30], "00"],
        ["a", "<f8", [-1, -1], "00" * 8],
        ["T", "eval"],
        ["q", -1],
        ["U", "-0x1"],
        ["b", 5],
    ],
)
def test_code_reward_hostile_frames_values_that_no_candidate_honestly_has_are_refused(tree: Any) -> None:
    for expected in (1, 1j, [1], {1: 2}, "a", {1}):
        for tolerance in (0.0, 0.1):
            assert not is_same_value(tree, expected, tolerance=tolerance)


def test_code_reward_hostile_frames_an_exception_of_every_kind_is_of_none() -> None:
    everything = type("E", (KeyError, AttributeError, ZeroDivisionError, RuntimeError), {})
    two = type("Missing", (KeyError, AttributeError), {})
    assert not any(
        exceptions.derives_from(exceptions.encode_class(everything), name)
        for name in ("KeyError", "RuntimeError", "E", "LookupError")
    )
    assert all(
        exceptions.derives_from(exceptions.encode_class(two), name)
        for name in ("LookupError", "AttributeError", "Missing")
    )
    named = type("ValueError", (Exception,), {})  # only by name
    assert not exceptions.derives_from(exceptions.encode_class(named), "ValueError")
    assert exceptions.derives_from(exceptions.encode_class(json.JSONDecodeError), "ValueError")
    assert exceptions.derives_from(exceptions.encode_class(json.JSONDecodeError), "JSONDecodeError")
    assert exceptions.derives_from(exceptions.encode_class(OSError), "IOError")


def test_code_reward_hostile_frames_finding_the_program_is_linear_in_the_answer() -> None:
    for text in ("```" + " " * 100_000 + "`", "~" * 100_000 + "`", "```" + "a" * 100_000 + "`", " " * 100_000 + "`"):
        began = time.process_time()
        extract_code(text, "python")
        assert time.process_time() - began < 5, text[:5]


FLOOD = """
import os
body = {body}
header = len(body).to_bytes(4, "little")
for pid in (os.getppid(), 1):
    for number in range(3, 40):
        try:
            with open(f"/proc/{{pid}}/fd/{{number}}", "wb", buffering=0) as pipe:
                pipe.write(header + body)
        except OSError: pass
def f(*a): return 0
"""


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "body", ["b'{},' * 6_000_000", "b'[' * 9_000_000", 'b\'{"value":["c",1,["i","0x\' + b\'f\' * 400 + b\'"]]}\'']
)
async def test_code_reward_hostile_frames_forced_into_a_candidates_pipes_cost_nothing(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(program, "MIN_WALL_S", 0.5)  # a pipe that nobody reads holds the candidate
    tests = [{"args": [n], "returns": n + 1} for n in range(10)]
    tracemalloc.start()
    began = time.process_time()
    try:
        for cases in (tests, "assert f(int('1')) == 2"):
            judgement = await judge(FLOOD.format(body=body), cases, entry="f", max_cpu_s=2.0, wall_factor=1)
            assert (judgement.value, judgement.correct) == (0.0, False)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 15


@pytest.mark.asyncio(loop_scope="session")
async def test_code_reward_hostile_frames_values_made_up_by_the_candidates_side_are_wrong_answers(judge: Judge) -> None:
    code = """
import json
from sandbox_programs import candidate
candidate.pack = lambda message: b"0000" + {made_up!r}
def f(): return 1
"""
    for made_up in (
        b'{"value":["c",1,["i","0x' + b"f" * 400 + b'"]]}',
        b'{"value":{"a":1}}',
        b'{"raised":[[]]}',
        b"[[[",
    ):
        for case in ({"args": [], "returns": 1.5}, {"args": [], "raises": "ValueError"}):
            assert (await judge(code.format(made_up=made_up), [case], entry="f")).value == 0.0


@pytest.mark.asyncio(loop_scope="session")
async def test_code_reward_hostile_frames_long_outputs_and_values_are_compared_in_a_sandbox(judge: Judge) -> None:
    text = "a b\n" * 20_000
    long = [{"args": [], "returns": list(range(30_000))}]
    assert (await judge("print('a b\\n' * 20_000)", [{"stdout": text}])).correct
    assert not (await judge("print('a b\\n' * 19_999 + 'b')", [{"stdout": text}] * 2)).correct
    assert (await judge("def f(): return list(range(30_000))", long, entry="f")).correct
    assert (await judge("def f(): return [*range(29_999), 0]", long, entry="f")).verdict == "wrong 0/1"
    assert (await judge("def f(): return [[]] * 100_000", long, entry="f")).verdict == "wrong 0/1"
    assert (await judge("def f(): return ['x' * 10 ** 6]", [{"args": [], "returns": 1}], entry="f")).value == 0.0


@pytest.mark.asyncio(loop_scope="session")
async def test_code_reward_hostile_frames_a_python_literal_is_compared_with_its_type(judge: Judge) -> None:
    for value, literal, right in (
        ("1", "1", True),
        ("True", "1", False),
        ("1.0", "1", False),
        ("[1, 2.0]", "[1, 2]", False),
        ("{1: 2}", "{1: 2}", True),
        ("{True: 2}", "{1: 2}", False),
        ("frozenset({1})", "{1}", False),
        ("Decimal('1.10')", "Decimal('1.10')", True),
        ("Decimal('1')", "1", False),
        ("date(2020, 2, 29)", "datetime.date(2020, 2, 29)", True),
        ("range(3)", "range(0, 3)", True),
        ("deque([1, 2])", "deque([1, 2])", True),
    ):
        code = f"from datetime import *\nfrom decimal import *\nfrom collections import *\ndef f(): return {value}"
        judgement = await judge(code, [{"args": [], "returns": {"python": literal}}], entry="f")
        assert judgement.correct is right, (value, literal)
