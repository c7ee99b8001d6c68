"""Applies rules to the values of a file; the result is the ROLL configuration and a report on every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.cli.migration.rules import LibraryValues, Rule, UnsupportedValueError
from roll.config.document import dump
from roll.config.load import dump_config, load_config
from roll.config.problems import format_value
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = ["ConvertedConfig", "KeyResult", "convert"]

_ALWAYS_WRITTEN_KEYS = (
    "pipeline",
    "name",
    "model.path",
    "data",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "training.num_steps",
)
"""Keys that are written even with ROLL's defaults, since readers look for them first."""
_MAX_LINE_LENGTH = 1000
INVALID_VALUE_ERRORS = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError)
"""Exceptions that a rule may raise for a value that the library itself would reject."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyResult:
    """The result of converting one key of a TRL or verl configuration."""

    key: str
    value: Any
    in_file: bool
    """True if the file has the key; otherwise the value is the other library's default."""
    outcome: Literal["converted", "default", "ignored", "unsupported"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedConfig:
    """A ROLL configuration that was converted from another library's configuration."""

    source: str
    tree: dict[str, Any]
    results: Sequence[KeyResult]

    @property
    def unsupported_keys(self) -> list[KeyResult]:
        """Keys that could not be converted."""
        return [result for result in self.results if result.outcome == "unsupported"]

    def format_yaml(self) -> str:
        """Return the configuration file, with the keys that could not be converted in comments at its top."""
        lines = [f"Converted from {self.source} by `roll config`."]
        if self.unsupported_keys:
            lines += ["Not converted:", *(f"  {result.key}: {result.text}" for result in self.unsupported_keys)]
        return "\n".join([*(f"# {_to_one_line(line)}" for line in lines), dump(self.tree)])

    def format_report(self) -> str:
        """Return one line for every key of the file, and for every default of the source library that was converted."""
        titles = {
            "converted": "Converted",
            "default": "Equal to ROLL's default",
            "ignored": "Not needed",
            "unsupported": "NOT converted",
        }
        lines: list[str] = []
        for outcome, title in titles.items():
            found = [result for result in self.results if result.outcome == outcome]
            lines += [f"{title}:"] if found else []
            lines += [
                f"  {result.key}={format_value(result.value)}{'' if result.in_file else ' (its default)'}: "
                f"{result.text}"
                for result in found
            ]
        return "\n".join(map(_to_one_line, lines))


def _to_one_line(text: str) -> str:
    """Return untrusted text as one line, so that it can neither end a comment nor control a terminal."""
    text = text[:_MAX_LINE_LENGTH]
    return text if text.isprintable() else repr(text)[1:-1]


@dataclass(slots=True)
class _ConversionState:
    """Input and partial output of a conversion."""

    values: LibraryValues
    """Values of the other library by dotted key, with its defaults."""
    file_keys: set[str]
    """Dotted keys of the other library that the file has."""
    flat: dict[str, Any] = field(default_factory=dict)
    """Converted values by dotted key of ROLL."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Reason by dotted key of the other library, for keys whose values ROLL does not support."""


def convert(
    rules: Sequence[Rule],
    file_values: Mapping[str, Any],
    *,
    source: str,
    initial_values: Mapping[str, Any],
    caller_values: Mapping[str, Any],
    problems: Sequence[str] = (),
    unreadable: Sequence[KeyResult] = (),
) -> ConvertedConfig:
    """Convert the keys of a file to a configuration of ROLL according to `rules`.

    Args:
        rules: rules of one library and type of training.
        file_values: dotted keys of the file, with their values.
        source: name of the source, for messages.
        initial_values: dotted keys of ROLL that are set for any file, such as `pipeline`.
        caller_values: values that the rules require but that are not in any file, such as the number of processes.
        problems: problems that the caller found, one line each.
        unreadable: keys of the file whose values could not be read.

    Raises:
        ConfigError: a value would be rejected by the source library, or a required value is missing; the message has
            all problems.
    """
    values = {rule.key: rule.default for rule in rules if not rule.key.endswith(".*")}
    work = _ConversionState(
        values=LibraryValues({**values, **file_values, **caller_values}),
        file_keys=set(file_values),
        flat=dict(initial_values),
    )
    converted_keys, found = _apply_rules(rules, work, _find_wrong_types(rules, file_values))
    if found := [*problems, *found]:
        raise ConfigError(_describe_problems(source, found, unreadable))
    try:
        full = dump_config(load_config(_nest_keys(work.flat)))
    except ConfigError as error:
        raise ConfigError(
            _describe_problems(source, [f"ROLL rejects the converted configuration: {error}"], unreadable)
        ) from None
    _remove_defaults(work, full)
    results = [*_report_known_keys(rules, work, converted_keys), *_report_unknown_keys(rules, work), *unreadable]
    return ConvertedConfig(source=source, tree=_nest_keys(work.flat), results=results)


def _apply_rules(
    rules: Sequence[Rule], state: _ConversionState, type_errors: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], Sequence[str]]:
    """Apply every rule to `state`, even after a rule that fails.

    Returns:
        The ROLL keys that each rule has set, by the source library's key, and all problems. Values of the wrong type
        (`type_errors`) come first.
    """
    converted_keys: dict[str, tuple[str, ...]] = {}
    problems = list(type_errors)
    for rule in rules:
        if rule.convert is None:
            continue
        try:
            new = rule.convert(state.values)
        except UnsupportedValueError as lost:
            state.unsupported[rule.key] = str(lost)
            continue
        except ConfigError as error:
            problems += str(error).splitlines()
            continue
        except INVALID_VALUE_ERRORS as error:
            if not type_errors:  # otherwise the problem may be a consequence of these
                problems.append(
                    f"'{rule.key}' is {format_value(state.values[rule.key])}: {str(error) or type(error).__name__}."
                )
            continue
        converted_keys[rule.key] = tuple(new)
        state.flat.update(new)
    return converted_keys, problems


def _find_wrong_types(rules: Sequence[Rule], file_values: Mapping[str, Any]) -> list[str]:
    """Return one problem for each value that is not a number, although the key's default is a number."""
    found: list[str] = []
    for rule in rules:
        value = file_values.get(rule.key)
        takes_number = isinstance(rule.default, int | float) and not isinstance(rule.default, bool)
        if value is None or not takes_number or rule.kind not in ("renamed", "companion"):
            continue
        try:
            float(value if not isinstance(value, bool) else "")
        except (TypeError, ValueError):
            found.append(f"'{rule.key}' must be a number, got {format_value(value)}.")
    return found


def _describe_problems(source: str, problems: Sequence[str], unreadable: Sequence[KeyResult]) -> str:
    """Return one message with all distinct problems, and the parts of the file that could not be read."""
    unique = list(dict.fromkeys(problems))
    lines = [f"{source}: {unique[0]}"]
    if len(unique) > 1:
        lines = [f"{source} has {len(unique)} problems:", *(f"  {line}" for line in unique)]
    if unreadable:
        advice = "write constants in the script, or use `--set KEY=VALUE`"
        lines += [
            f"Not converted, or not readable without running the script ({advice}):",
            *(_to_one_line(f"  {result.key}: {result.text}") for result in unreadable),
        ]
    return "\n".join(lines)


def _remove_defaults(state: _ConversionState, full: Mapping[str, Any]) -> None:
    """Remove every key that only repeats a default: without it, the resolved configuration still equals `full`."""
    # Comparing whole configurations also finds defaults that depend on other keys. Deep keys are tried first, so that
    # a section is removed only after its keys.
    for key in sorted(state.flat, key=lambda key: -key.count(".")):
        if key in _ALWAYS_WRITTEN_KEYS:
            continue
        fewer = {other: value for other, value in state.flat.items() if other != key}
        with suppress(ConfigError):
            if dump_config(load_config(_nest_keys(fewer))) == full:
                state.flat = fewer


def _report_known_keys(
    rules: Sequence[Rule], state: _ConversionState, converted_keys: Mapping[str, tuple[str, ...]]
) -> list[KeyResult]:
    results: list[KeyResult] = []
    owner = {key: next((rule for rule in rules if rule.covers(key)), None) for key in state.file_keys}
    for rule in rules:
        own = [key for key in state.file_keys if owner[key] is rule]
        for key in own or ([] if rule.key.endswith(".*") else [rule.key]):
            one = _build_result(rule, key, state, converted_keys)
            if one.in_file or one.outcome == "unsupported" or (one.outcome == "converted" and rule.kind == "renamed"):
                results.append(one)
    return results


def _build_result(
    rule: Rule, key: str, state: _ConversionState, converted_keys: Mapping[str, tuple[str, ...]]
) -> KeyResult:
    value = state.values.get(key, rule.default)
    outcome: Literal["converted", "default", "ignored", "unsupported"]
    if key in state.unsupported:
        outcome, text = "unsupported", state.unsupported[key]
    elif rule.kind in ("ignored", "unsupported"):
        same = rule.kind == "ignored" or value == rule.default or value in rule.equivalent_values
        outcome, text = ("ignored" if same else "unsupported"), rule.note
    else:
        targets = converted_keys.get(key) or rule.targets
        written = [target for target in targets if target in state.flat]
        outcome = "converted" if written else "default"
        text = (
            ", ".join(f"{target}={format_value(state.flat[target])}" for target in written)
            or ", ".join(targets)
            or rule.note
        )
        if written and rule.note:
            text += f" ({rule.note})"
    return KeyResult(key=key, value=value, in_file=key in state.file_keys, outcome=outcome, text=text)


def _report_unknown_keys(rules: Sequence[Rule], state: _ConversionState) -> list[KeyResult]:
    names = [rule.key for rule in rules]
    return [
        KeyResult(
            key=key,
            value=state.values[key],
            in_file=True,
            outcome="unsupported",
            text=f"this version does not know the key.{did_you_mean(key, names)}",
        )
        for key in sorted(state.file_keys)
        if not any(rule.covers(key) for rule in rules)
    ]


def _nest_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested sections, in the order in which sections are usually written."""
    order = ("pipeline", "name", "output_dir", "seed", "model", "data")
    tree: dict[str, Any] = {}
    for key in sorted(flat, key=lambda key: order.index(key.split(".")[0]) if key.split(".")[0] in order else 9):
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = flat[key]
    return tree
