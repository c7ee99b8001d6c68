"""Messages of the sandbox service: they come back as they were, and nothing malformed comes through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_sandbox import Command, Limits, Mount, PythonCode, SandboxPathError, SandboxRequestError, SandboxSpec
from roll_sandbox.requests import make_run_request
from roll_sandbox.wire import (
    decode,
    encode,
    error_from_json,
    error_to_json,
    program_from_json,
    program_to_json,
    spec_from_json,
    spec_to_json,
    validate_client_message,
)

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda name: name != "$b"), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name != "$b"), _values))
def test_sandbox_wire_format_a_message_comes_back_as_it_was(message: dict[str, object]) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=60))
def test_sandbox_wire_format_noise_is_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        validate_client_message(decode(data))
    except SandboxRequestError:
        return
    raise AssertionError("noise came through")


@pytest.mark.parametrize("missing", range(1, 6))
def test_sandbox_wire_format_a_message_that_is_cut_off_is_refused(missing: int) -> None:
    with pytest.raises(SandboxRequestError, match="truncated"):
        decode(encode({"op": "input", "data": b"ab"})[:-missing])


def test_sandbox_wire_format_specs_and_programs_come_back_as_they_were() -> None:
    spec = SandboxSpec(limits=Limits(wall_s=3, cpu_s=1.5), mounts=(Mount(source="/a", target="/b"),), preload=("re",))
    assert spec_from_json(decode(encode(spec_to_json(spec)))) == spec
    for program in (
        PythonCode(source="print('\udc80')", files={"x": b"\xff"}, env={"$b": "y"}, result=True, cpu_s=1.0),
        Command(argv=("ls", "-l"), cwd="/tmp", interactive=True, wall_s=2),
    ):
        request = make_run_request(program, Limits(wall_s=9.0, cpu_s=8.0), alone=True, fresh=True)
        back, alone = program_from_json(decode(encode(program_to_json(request))), b"in")
        assert alone and back.stdin == b"in"
        assert make_run_request(back, Limits(), alone=True, fresh=True) == request


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"op": "eval"}, "unknown message 'eval'"),
        ({"op": "stop", "sandbox": "../../../etc"}, "must be a name"),
        ({"op": "stop", "sandbox": "a" * 8, "again": True}, "unknown field 'again'"),
        ({"op": "extend", "sandbox": "a" * 8, "lifetime_s": float("nan")}, "must be a positive number of seconds"),
        ({"op": "input", "sandbox": "a" * 8, "id": "b" * 8, "n": 1, "data": "text"}, "must be bytes"),
    ],
)
def test_sandbox_wire_format_what_no_client_may_say_is_refused(message: dict[str, object], word: str) -> None:
    with pytest.raises(SandboxRequestError, match=word):
        validate_client_message(message)


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({"limits": {"wall_s": True}}, r"spec\.limits\.wall_s"),
        ({"limits": {"nothing": 1}}, "unknown field 'nothing'"),
        ({"mounts": [{"source": "/"}]}, "spec"),
        ({"preload": "re"}, r"spec\.preload"),
        ({"trust": "root"}, r"spec\.trust"),
    ],
)
def test_sandbox_wire_format_malformed_specs_are_refused_by_field(said: dict[str, object], word: str) -> None:
    with pytest.raises(SandboxRequestError, match=word):
        spec_from_json(said)


def test_sandbox_wire_format_an_error_is_the_same_on_the_other_side() -> None:
    error = error_from_json(error_to_json(SandboxPathError(2, "in the sandbox: No such file", "x")))
    assert isinstance(error, SandboxPathError) and (error.errno, error.filename) == (2, "x")
    assert isinstance(error_from_json(error_to_json(SandboxRequestError("x"))), SandboxRequestError)
