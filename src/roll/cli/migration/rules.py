"""Conversion of another library's keys: one rule per key, which is also a row of docs/migration.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.errors import ConfigError

__all__ = [
    "LibraryValues",
    "Rule",
    "UnsupportedValueError",
    "companion_rule",
    "conversion_rule",
    "ignored_key_rule",
    "ignored_key_rules",
    "renamed_key_rule",
    "replace_defaults",
    "run_all",
    "unsupported_key_rule",
]


class LibraryValues(dict[str, Any]):
    """Values of a TRL or verl configuration by dotted key, including the library's defaults.

    Keys are also attributes, as in the library's code: `values.algorithm.gamma`.
    """

    def __getattr__(self, name: str) -> Any:
        below = {key.removeprefix(f"{name}."): value for key, value in self.items() if key.startswith(f"{name}.")}
        if not below and name not in self:
            raise AttributeError(f"the configuration has no key '{name}'")
        return LibraryValues(below) if below else self[name]


class UnsupportedValueError(Exception):
    """A value has no counterpart in ROLL; the message describes what ROLL does instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The conversion of one key."""

    key: str
    """Dotted key; `.*` at the end stands for all keys below."""
    default: Any
    """Default of the other library."""
    kind: Literal["renamed", "companion", "ignored", "unsupported"]
    """`renamed`: has a counterpart in ROLL; `companion`: affects the conversion of another key; `ignored`: does not
    affect training; `unsupported`: has no counterpart.
    """
    targets: tuple[str, ...] = ()
    """Dotted keys of ROLL that the rule sets."""
    note: str = ""
    """Explanation for the user, printed in the conversion report."""
    convert: Callable[[LibraryValues], Mapping[str, Any]] | None = None
    """Returns values by dotted key of ROLL, given all values of the other library. Raises `UnsupportedValueError` for
    a value without a counterpart, and `ConfigError` for a value that is invalid for the key.
    """
    equivalent_values: tuple[Any, ...] = ()
    """For a key that ROLL does not support: values for which both libraries behave identically."""

    def covers(self, key: str) -> bool:
        """Return whether the rule applies to `key`."""
        return key == self.key or (self.key.endswith(".*") and key.startswith(self.key[:-1]))


def renamed_key_rule(
    key: str,
    default: Any,
    target: str,
    convert_value: Callable[[Any, LibraryValues], Any] | None = None,
    note: str = "",
    **options: Any,
) -> Rule:
    """Return a rule for a key that ROLL has under the name `target`.

    Args:
        key: key of the source library (TRL or verl).
        default: the key's default in the source library.
        target: dotted key of ROLL.
        convert_value: computes the value for ROLL from the key's value and all values; by default the value is copied.
        note: remark in the report.
        options: further fields of the rule.
    """

    def convert(values: LibraryValues) -> Mapping[str, Any]:
        return {target: values[key] if convert_value is None else convert_value(values[key], values)}

    return Rule(key=key, default=default, kind="renamed", targets=(target,), note=note, convert=convert, **options)


def conversion_rule(
    key: str, default: Any, targets: Iterable[str], convert: Callable[[LibraryValues], Mapping[str, Any]], note: str
) -> Rule:
    """Return a rule for a key that, together with other keys, determines several keys of ROLL."""
    return Rule(key=key, default=default, kind="renamed", targets=tuple(targets), note=note, convert=convert)


def companion_rule(key: str, default: Any, targets: Iterable[str], note: str) -> Rule:
    """Return a rule for a key that only changes the conversion of another key; `targets` are the affected keys."""
    return Rule(key=key, default=default, kind="companion", targets=tuple(targets), note=note)


def ignored_key_rule(key: str, default: Any, note: str) -> Rule:
    """Return a rule for a key that does not affect training, or whose behavior is always enabled in ROLL."""
    return Rule(key=key, default=default, kind="ignored", note=note)


def ignored_key_rules(keys: Mapping[str, Any], note: str) -> list[Rule]:
    """Return one rule per key, for keys that are ignored for the same reason."""
    return [ignored_key_rule(key, default, note) for key, default in keys.items()]


def unsupported_key_rule(key: str, default: Any, note: str, *, equivalent_values: tuple[Any, ...] = ()) -> Rule:
    """Return a rule for a key that ROLL does not support; the default and `equivalent_values` are accepted."""
    return Rule(key=key, default=default, kind="unsupported", note=note, equivalent_values=equivalent_values)


def run_all(*parts: Callable[[], Any]) -> list[Any]:
    """Call every function in `parts`, even after one that fails, and return their results in order.

    Raises:
        ConfigError: at least one function raised a `ConfigError`; the message contains all of their messages.
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


def replace_defaults(rules: Iterable[Rule], defaults: Mapping[str, Any]) -> list[Rule]:
    """Return copies of the rules in which the library's default is replaced for every key in `defaults`."""
    return [replace(rule, default=defaults.get(rule.key, rule.default)) for rule in rules]
