"""Games of `textarena` that cannot be created are named with the reason; a stand-in has one of each kind."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from roll.envs.adapters.textarena import make
from roll.errors import ConfigError


class Bare:
    """A game that is registered under its own name alone, without wrappers."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """The errors of games, to be filled in."""
    errors: dict[str, Exception] = {}
    bare, wrapped = SimpleNamespace(default_wrappers=None), SimpleNamespace(default_wrappers=[object])
    known = {"Nim-v0": wrapped, "Nim-v0-raw": bare, "BabyAiText-v0": bare, "Odd-v0": wrapped}

    def made(name: str, **options: Any) -> Any:
        if name in errors:
            raise errors[name]
        return Bare()

    module: Any = ModuleType("textarena")
    module.envs = SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY=known))
    module.make = made
    monkeypatch.setitem(sys.modules, "textarena", module)
    return errors


def test_env_textarena_names_textarena_game_that_has_no_wrappers_is_made_by_its_own_name(
    package: dict[str, Exception],
) -> None:
    assert isinstance(make("BabyAiText-v0").env, Bare)
    assert isinstance(make("Nim-v0").env, Bare)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SyntaxError("invalid syntax"), "SyntaxError: invalid syntax"),
        (
            LookupError("\n****\nResource words not found.\nUse the downloader"),
            "LookupError: Resource words not found.",
        ),
        (AttributeError(""), "AttributeError"),
        (TypeError("x" * 999), "TypeError: x+…"),
    ],
)
def test_env_textarena_names_textarena_game_that_cannot_be_made_says_why(
    package: dict[str, Exception], error: Exception, says: str
) -> None:
    package["Nim-v0-raw"] = error
    with pytest.raises(ConfigError, match=f"^environment 'textarena:Nim-v0' cannot be created: {says}$") as raised:
        make("Nim-v0")
    assert len(str(raised.value)) < 500


def test_env_textarena_names_textarena_game_that_is_unknown_is_not_suggested_to_itself(
    package: dict[str, Exception],
) -> None:
    with pytest.raises(ConfigError) as raised:
        make("Odd-v0")
    assert "has no variant 'Odd-v0-raw'" in str(raised.value) and "Did you mean" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"no game 'Nimm-v0'\. Did you mean 'Nim-v0'\?"):
        make("Nimm-v0")


def test_env_textarena_names_verifiers_that_is_missing_is_named_with_what_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from roll.envs.adapters.verifiers import make as make_verifiers

    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError) as raised:
        make_verifiers("my-env")
    said = str(raised.value)
    assert "pip cannot install it together with ROLL" in said and "rollout.agent.command" in said
    assert "pip install" not in said
