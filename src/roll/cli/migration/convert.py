"""Applies rules to a file's values: the ROLL configuration, and the report on every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.cli.migration.rules import Rule, UnsupportedValue, Values
from roll.config.document import dump
from roll.config.load import dump_config, load_config
from roll.config.problems import show
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = ["Converted", "KeyResult", "convert"]

_KEPT = (
    "pipeline",
    "name",
    "model.path",
    "data",
    "rollout.prompts_per_step",
    "rollout.group_size",
    "training.num_steps",
)
"""Keys that are written even with ROLL's defaults, since readers look for them first."""
_LONGEST_LINE = 1000
NO_VALUE = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError)
"""Exceptions of a rule for a value that the library itself would reject."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyResult:
    """The result for one key."""

    key: str
    value: Any
    given: bool
    """Whether the file has the key; otherwise it is the other library's default."""
    outcome: Literal["became", "default", "needless", "lost"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A ROLL configuration converted from another library's."""

    source: str
    tree: dict[str, Any]
    said: Sequence[KeyResult]

    @property
    def lost(self) -> list[KeyResult]:
        """Keys that could not be converted."""
        return [said for said in self.said if said.outcome == "lost"]

    def yaml(self) -> str:
        """Return the configuration file, with what was lost in comments at its top."""
        lines = [f"Converted from {self.source} by `roll config`."]
        if self.lost:
            lines += ["Not converted:", *(f"  {said.key}: {said.text}" for said in self.lost)]
        return "\n".join([*(f"# {_one_line(line)}" for line in lines), dump(self.tree)])

    def report(self) -> str:
        """Return one line for every key of the file, and for the other library's relevant defaults."""
        titles = {
            "became": "Became",
            "default": "ROLL's default anyway",
            "needless": "Needs no key",
            "lost": "NOT converted",
        }
        lines: list[str] = []
        for outcome, title in titles.items():
            found = [said for said in self.said if said.outcome == outcome]
            lines += [f"{title}:"] if found else []
            lines += [
                f"  {said.key}={show(said.value)}{'' if said.given else ' (its default)'}: {said.text}"
                for said in found
            ]
        return "\n".join(map(_one_line, lines))


def _one_line(text: str) -> str:
    """Return untrusted text on one line, so that it can neither end a comment nor control a terminal."""
    text = text[:_LONGEST_LINE]
    return text if text.isprintable() else repr(text)[1:-1]


@dataclass(slots=True)
class _Work:
    values: Values
    given: set[str]
    flat: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def convert(
    rules: Sequence[Rule],
    given: Mapping[str, Any],
    *,
    source: str,
    start: Mapping[str, Any],
    said_by_caller: Mapping[str, Any],
    problems: Sequence[str] = (),
    unread: Sequence[KeyResult] = (),
) -> Converted:
    """Apply `rules` to the keys of a file.

    Args:
        rules: rules of one library and kind of training.
        given: dotted keys of the file, with their values.
        source: name of the source, for messages.
        start: dotted keys of ROLL that are set for any file, such as `pipeline`.
        said_by_caller: values that the rules need but no file has, such as the number of processes.
        problems: problems that the caller found, one line each.
        unread: keys of the file with unknown values.

    Raises:
        ConfigError: a value would be rejected by the library itself, or a required value is missing; the message has
            all problems.
    """
    values = {rule.key: rule.default for rule in rules if not rule.key.endswith(".*")}
    work = _Work(values=Values({**values, **given, **said_by_caller}), given=set(given), flat=dict(start))
    decided, found = _apply(rules, work, _wrong_types(rules, given))
    if found := [*problems, *found]:
        raise ConfigError(_refusal(source, found, unread))
    try:
        full = dump_config(load_config(_tree(work.flat)))
    except ConfigError as error:
        raise ConfigError(_refusal(source, [f"this is no run of ROLL: {error}"], unread)) from None
    _leave_defaults_out(work, full)
    said = [*_known(rules, work, decided), *_unknown(rules, work), *unread]
    return Converted(source=source, tree=_tree(work.flat), said=said)


def _apply(
    rules: Sequence[Rule], work: _Work, wrong: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], Sequence[str]]:
    """Apply every rule, even after one that fails.

    Returns:
        The results of each key, and the problems, including `wrong`.
    """
    decided: dict[str, tuple[str, ...]] = {}
    problems = list(wrong)
    for rule in rules:
        if rule.convert is None:
            continue
        try:
            new = rule.convert(work.values)
        except UnsupportedValue as lost:
            work.lost[rule.key] = str(lost)
            continue
        except ConfigError as error:
            problems += str(error).splitlines()
            continue
        except NO_VALUE as error:
            if not wrong:  # otherwise the problem may be a consequence of these
                problems.append(f"'{rule.key}' is {show(work.values[rule.key])}: {str(error) or type(error).__name__}.")
            continue
        decided[rule.key] = tuple(new)
        work.flat.update(new)
    return decided, problems


def _wrong_types(rules: Sequence[Rule], given: Mapping[str, Any]) -> list[str]:
    """Return the problems of values that are not numbers although the library's default is a number."""
    found: list[str] = []
    for rule in rules:
        value = given.get(rule.key)
        takes_number = isinstance(rule.default, int | float) and not isinstance(rule.default, bool)
        if value is None or not takes_number or rule.kind not in ("moved", "with"):
            continue
        try:
            float(value if not isinstance(value, bool) else "")
        except (TypeError, ValueError):
            found.append(f"'{rule.key}' is {show(value)}: it must be a number.")
    return found


def _refusal(source: str, problems: Sequence[str], unread: Sequence[KeyResult]) -> str:
    """Return one message with all distinct problems, and the parts that could not be read, which may be their cause."""
    unique = list(dict.fromkeys(problems))
    lines = [f"{source}: {unique[0]}"]
    if len(unique) > 1:
        lines = [f"{source} has {len(unique)} problems:", *(f"  {line}" for line in unique)]
    if unread:
        advice = "write constants there, or say `--set KEY=VALUE`"
        lines += [
            f"Not read, as the script is not run, or not converted ({advice}):",
            *(_one_line(f"  {said.key}: {said.text}") for said in unread),
        ]
    return "\n".join(lines)


def _leave_defaults_out(work: _Work, full: Mapping[str, Any]) -> None:
    """Remove every key without which the configuration still equals `full`."""
    for key in sorted(work.flat, key=lambda key: -key.count(".")):
        if key in _KEPT:
            continue
        fewer = {other: value for other, value in work.flat.items() if other != key}
        with suppress(ConfigError):
            if dump_config(load_config(_tree(fewer))) == full:
                work.flat = fewer


def _known(rules: Sequence[Rule], work: _Work, decided: Mapping[str, tuple[str, ...]]) -> list[KeyResult]:
    said: list[KeyResult] = []
    owner = {key: next((rule for rule in rules if rule.covers(key)), None) for key in work.given}
    for rule in rules:
        own = [key for key in work.given if owner[key] is rule]
        for key in own or ([] if rule.key.endswith(".*") else [rule.key]):
            one = _say(rule, key, work, decided)
            if one.given or one.outcome == "lost" or (one.outcome == "became" and rule.kind == "moved"):
                said.append(one)
    return said


def _say(rule: Rule, key: str, work: _Work, decided: Mapping[str, tuple[str, ...]]) -> KeyResult:
    value = work.values.get(key, rule.default)
    outcome: Literal["became", "default", "needless", "lost"]
    if key in work.lost:
        outcome, text = "lost", work.lost[key]
    elif rule.kind in ("needless", "lacking"):
        same = rule.kind == "needless" or value == rule.default or value in rule.harmless
        outcome, text = ("needless" if same else "lost"), rule.note
    else:
        targets = decided.get(key) or rule.to
        written = [target for target in targets if target in work.flat]
        outcome = "became" if written else "default"
        text = ", ".join(f"{target}={show(work.flat[target])}" for target in written) or ", ".join(targets) or rule.note
        if written and rule.note:
            text += f" ({rule.note})"
    return KeyResult(key=key, value=value, given=key in work.given, outcome=outcome, text=text)


def _unknown(rules: Sequence[Rule], work: _Work) -> list[KeyResult]:
    names = [rule.key for rule in rules]
    return [
        KeyResult(
            key=key,
            value=work.values[key],
            given=True,
            outcome="lost",
            text=f"no key that this version knows.{did_you_mean(key, names)}",
        )
        for key in sorted(work.given)
        if not any(rule.covers(key) for rule in rules)
    ]


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
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
