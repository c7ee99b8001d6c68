"""Conversion of another library's keys: one rule for each, which is also a row of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.errors import ConfigError

__all__ = [
    "Rule",
    "UnsupportedValue",
    "Values",
    "converted_with",
    "handled_by",
    "ignored",
    "ignored_all",
    "moved",
    "run_all",
    "unsupported",
    "with_defaults",
]


class Values(dict[str, Any]):
    """The values of all dotted keys of the other library, including defaults, and what the caller specified about
    the run.

    Keys are also attributes, as in that library's own code: `values.algorithm.gamma`.
    """

    def __getattr__(self, name: str) -> Any:
        below = {key.removeprefix(f"{name}."): value for key, value in self.items() if key.startswith(f"{name}.")}
        if not below and name not in self:
            raise AttributeError(f"there is no key '{name}'")
        return Values(below) if below else self[name]


class UnsupportedValue(Exception):
    """A value without a counterpart in ROLL; the text describes what ROLL does instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The conversion of one key."""

    key: str
    """Dotted key; `.*` at the end stands for all keys below."""
    default: Any
    """Default of the other library."""
    kind: Literal["moved", "with", "needless", "lacking"]
    to: tuple[str, ...] = ()
    """Dotted keys of ROLL that the rule sets."""
    note: str = ""
    convert: Callable[[Values], Mapping[str, Any]] | None = None
    """Converts all values to keys of ROLL. Raises `Lost` for a value without a counterpart, `ConfigError` for a
    value that is invalid for the key.
    """
    harmless: tuple[Any, ...] = ()
    """For a key that ROLL does not support: values with which both libraries behave the same."""

    def covers(self, key: str) -> bool:
        """Return whether the rule applies to `key`."""
        return key == self.key or (self.key.endswith(".*") and key.startswith(self.key[:-1]))


def moved(
    key: str, default: Any, to: str, change: Callable[[Any, Values], Any] | None = None, note: str = "", **more: Any
) -> Rule:
    """Return a rule for a key that is `to` in ROLL; `change` computes the value there from its own and all others."""

    def convert(values: Values) -> Mapping[str, Any]:
        return {to: values[key] if change is None else change(values[key], values)}

    return Rule(key=key, default=default, kind="moved", to=(to,), note=note, convert=convert, **more)


def converted_with(
    key: str, default: Any, to: Iterable[str], convert: Callable[[Values], Mapping[str, Any]], note: str
) -> Rule:
    """Return a rule for a key that determines several keys of ROLL, together with other keys."""
    return Rule(key=key, default=default, kind="moved", to=tuple(to), note=note, convert=convert)


def handled_by(key: str, default: Any, to: Iterable[str], note: str) -> Rule:
    """Return a rule for a key that another rule converts."""
    return Rule(key=key, default=default, kind="with", to=tuple(to), note=note)


def ignored(key: str, default: Any, note: str) -> Rule:
    """Return a rule for a key that does not affect training, or whose effect ROLL always has."""
    return Rule(key=key, default=default, kind="needless", note=note)


def ignored_all(keys: Mapping[str, Any], note: str) -> list[Rule]:
    """Return rules for keys with their defaults that are needless for the same reason."""
    return [ignored(key, default, note) for key, default in keys.items()]


def unsupported(key: str, default: Any, note: str, *, harmless: tuple[Any, ...] = ()) -> Rule:
    """Return a rule for a key that ROLL does not support; nothing is lost at the default or at the values in
    `harmless`.
    """
    return Rule(key=key, default=default, kind="lacking", note=note, harmless=harmless)


def run_all(*parts: Callable[[], Any]) -> list[Any]:
    """Call all parts of one conversion and return their results.

    Raises:
        ConfigError: with one line for each part that raises one.
    """
    found, problems = [], []
    for part in parts:
        try:
            found.append(part())
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def with_defaults(rules: Iterable[Rule], defaults: Mapping[str, Any]) -> list[Rule]:
    """Return the same rules, some with the defaults of one kind of training."""
    return [replace(rule, default=defaults.get(rule.key, rule.default)) for rule in rules]
