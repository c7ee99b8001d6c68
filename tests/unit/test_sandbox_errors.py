"""Errors of roll_sandbox become errors of ROLL's tree, in one place."""

from __future__ import annotations

import asyncio
import inspect
import pickle

import pytest

import roll_sandbox.errors as theirs
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError, InfraError, RollError, UserError
from roll.sandbox_errors import sandbox_errors, translate_error
from roll.sandboxes import build_manager
from roll_sandbox import SandboxSpec

KINDS = [kind for _, kind in inspect.getmembers(theirs, inspect.isclass) if issubclass(kind, theirs.RollSandboxError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_sandbox_errors_are_of_both_trees(kind: type[theirs.RollSandboxError]) -> None:
    ours = {theirs.ConfigError: ConfigError, theirs.UserError: UserError, theirs.SandboxError: InfraError}
    error = kind(2, "no such file", "/a") if issubclass(kind, OSError) else kind("why")
    with pytest.raises(RollError) as caught, sandbox_errors():
        raise error
    found = caught.value
    assert isinstance(found, kind) and type(found).__name__ == kind.__name__ and str(found) == str(error)
    assert {base for base in ours if issubclass(kind, base)} == {base for base in ours if isinstance(found, ours[base])}
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found) and str(again) == str(found)
    assert translate_error(found) is found


def test_sandbox_errors_keep_their_cause_and_notes() -> None:
    cause, error = OSError("disk"), theirs.SandboxLostError("gone")
    error.add_note("on worker 3")
    with pytest.raises(InfraError) as caught, sandbox_errors():
        raise error from cause
    assert caught.value.__cause__ is cause and caught.value.__notes__ == ["on worker 3"]


def test_sandbox_errors_in_a_group_are_translated_and_others_are_left_alone() -> None:
    other = KeyError("x")
    with pytest.raises(ExceptionGroup) as caught, sandbox_errors():
        raise ExceptionGroup("both", [other, theirs.SandboxError("broke")])
    assert caught.value.exceptions[0] is other and isinstance(caught.value.exceptions[1], InfraError)
    with pytest.raises(KeyError) as alone, sandbox_errors():
        raise other
    assert alone.value is other


def test_sandbox_errors_pass_through_a_block_with_awaits() -> None:
    async def breaks() -> None:
        with sandbox_errors():
            await asyncio.sleep(0)
            raise theirs.SandboxExpiredError("late")

    with pytest.raises(InfraError, match="late"):
        asyncio.run(breaks())


def test_sandbox_errors_a_configured_service_with_a_bad_token_is_a_config_error_of_roll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", "two words")
    with pytest.raises(ConfigError, match="token"):
        build_manager(SandboxConfig(url="http://127.0.0.1:1"), spec=SandboxSpec())
