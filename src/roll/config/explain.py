"""The meaning of a key: `roll config explain training.learning_rate`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from roll.config.base import Section
from roll.config.document import Document
from roll.config.keys import Key, all_keys, tag_key, template
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.presets import PRESET_NAMES, preset, settings
from roll.config.problems import show, unknown_key
from roll.errors import ConfigError
from roll.registry import close_names

__all__ = ["default_words", "explain", "find_keys", "merged", "summary_of"]

_WIDTH = 100


def explain(key: str = "", pipeline: str = DEFAULT_PIPELINE) -> str:
    """Return a key's meaning, form, unit, default and place; a table for a section; the list of sections without a key.

    Args:
        key: dotted, such as `training.learning_rate` or `data.0.reward`; a last part alone finds every key that has it.
        pipeline: name of the pipeline whose configuration is explained.

    Raises:
        ConfigError: the key or the pipeline does not exist; the message names the nearest.
    """
    model = PIPELINES.get(pipeline)
    if not key:
        return _overview(model)
    return "\n\n".join(_block(found, model) for found in find_keys(key, model))


def find_keys(name: str, model: type[Section]) -> list[Key]:
    """Return the keys that `name` means: several, if it is a last part that several sections have.

    Raises:
        ConfigError: no key has this name; the message names the nearest.
    """
    found = _keys_named(name, model)
    if not found:
        raise ConfigError(_unknown(name, model))
    return merged(found)


def _keys_named(name: str, model: type[Section]) -> list[Key]:
    parts = tuple(part for part in template(tuple(name.strip().split("."))) if part != "N")
    keys = list(all_keys(model))
    found = [key for key in keys if _plain_path(key) == parts]
    return found or [key for key in keys if _plain_path(key)[-len(parts) :] == parts]


def _plain_path(key: Key) -> tuple[str, ...]:
    return tuple(part for part in key.path if part != "N")


def merged(keys: Sequence[Key]) -> list[Key]:
    """Merge keys of union members with the same path, meaning, type and default into one key with all their tags."""
    kept: dict[tuple[Any, ...], Key] = {}
    for key in keys:
        same = (key.path, key.meaning, key.type_words, () if key.members else repr(key.default))
        first = kept.setdefault(same, key)
        tags = dict.fromkeys((*first.variants, *key.variants))
        kept[same] = replace(first, variants=tuple(tags))
    return list(kept.values())


def _unknown(name: str, model: type[Section]) -> str:
    if elsewhere := [pipeline for pipeline in PIPELINES.built_in if _keys_named(name, PIPELINES.get(pipeline))]:
        others = f" (or {', '.join(elsewhere[1:])})" if elsewhere[1:] else ""
        return f"'{name}' is a key of another pipeline: add --pipeline {elsewhere[0]}{others}."
    line = unknown_key(tuple(name.split(".")), Document(name="", tree={}), model)
    if "Did you mean" in line or "belongs under" in line:
        return line
    close = close_names(name, (key.dotted for key in all_keys(model)), cutoff=0.5)
    hint = f"Did you mean '{close[0]}'?" if close else "`roll config explain` lists all."
    return f"unknown key '{name}'. {hint}"


def _overview(model: type[Section]) -> str:
    keys = [key for key in all_keys(model) if len(key.path) == 1]
    rows = [(key.dotted, _first_sentence(key.meaning)) for key in keys]
    tail = "`roll config explain SECTION` lists a section's keys, `roll config explain KEY` explains one."
    return f"{summary_of(model)}\n\n{_table(rows)}\n\n{tail}"


def summary_of(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


def _block(key: Key, model: type[Section]) -> str:
    chosen_by = f"  ({tag_key(key.owner)}: {', '.join(key.variants)})" if key.variants else ""
    lines = [key.dotted + chosen_by, textwrap.indent(textwrap.fill(key.meaning, _WIDTH - 2), "  "), ""]
    if key.members:
        extra = _presets() if key.path == ("algorithm",) else []
        return "\n".join([*lines, *_members(key), *extra]).rstrip()
    facts = [("type", key.type_words)]
    facts += [("unit", key.unit)] if key.unit else []
    facts += [("default", default_words(key))]
    facts += [("in", _where(key, model))]
    facts += [("change", f"{key.dotted.replace('.N', '.0')}={_as_override(_example(key))}")]
    return "\n".join(lines + [f"  {name:<9}{text}" for name, text in facts])


def _presets() -> list[str]:
    """Return lines with what each value of `algorithm.type` sets."""
    rows = [(name, ", ".join(settings(preset(name))) or "nothing: it is the default") for name in PRESET_NAMES]
    return ["", "  type: the preset that the other keys start from, and what it sets", "", _indented(_table(rows))]


def _members(key: Key) -> Iterator[str]:
    """Yield a table of the section's keys; of a union, the keys that all members share and then each member's own."""
    tables = {
        tag: [Key(path=(name,), field=field, owner=section) for name, field in section.model_fields.items()]
        for tag, section in key.members
    }
    shared: list[Key] = []
    if len(tables) > 1:
        first, *others = tables.values()
        shared = [key for key in first if all(_row(key) in map(_row, keys) for keys in others)]
        yield from ("  In each of them:", "", _indented(_table([_HEAD, *map(_row, shared)])), "")
    for tag, section in key.members:
        chosen_by = f"{tag_key(section)}: {tag}   " if tag else ""
        yield _indented(chosen_by + summary_of(section))
        rows = [_row(own) for own in tables[tag] if _row(own) not in map(_row, shared)]
        yield from ("", _indented(_table([_HEAD, *rows])), "") if rows else ("",)


_HEAD = ("key", "default", "meaning")


def _row(key: Key) -> tuple[str, str, str]:
    return (key.path[-1], default_words(key), _first_sentence(key.meaning))


def _indented(text: str) -> str:
    return textwrap.indent(text, "  ")


def _as_override(value: Any) -> str:
    return value if isinstance(value, str) else _as_written(value)


def _where(key: Key, model: type[Section]) -> str:
    section = ".".join(key.path[:-1]) or "the top level"
    return f"{section}: {summary_of(key.owner)}" if key.owner is not model else "the top level"


def _example(key: Key) -> Any:
    examples = key.field.examples
    if examples:
        return examples[0]
    return "VALUE" if key.required or key.default is None else key.default


def default_words(key: Key) -> str:
    """Return the default as it would be written in a file."""
    if key.required:
        return "required"
    value = key.default
    if isinstance(value, Section):
        return "its own defaults"
    return _as_written(value)


def _as_written(value: Any) -> str:
    """Return a value as it would be written in a file; a list of rewards in its short form, as their types."""
    if isinstance(value, list) and value and all(isinstance(entry, Section) for entry in value):
        given = [entry.model_dump(exclude_unset=True) for entry in value]
        short = [entry["type"] if set(entry) == {"type"} else entry for entry in given]
        return show(short[0] if len(short) == 1 else short)
    return show(value)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, the last one wrapped."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        head = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row[-1], max(30, _WIDTH - indent)) or [""]
        lines += [(head + wrapped[0]).rstrip(), *(" " * indent + more for more in wrapped[1:])]
    return "\n".join(lines)
