"""Explanations of keys: `roll config explain training.learning_rate`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from roll.config.base import Section
from roll.config.document import Document
from roll.config.keys import Key, get_tag_key, iterate_keys, replace_indices
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.presets import PRESET_NAMES, format_settings, load_preset
from roll.config.problems import describe_unknown_key, format_value
from roll.errors import ConfigError
from roll.registry import find_similar_names

__all__ = ["explain", "find_keys", "format_default", "get_summary", "merge_keys"]

_PAGE_WIDTH = 100


def explain(key: str = "", pipeline: str = DEFAULT_PIPELINE) -> str:
    """Explain a key by its description, type, unit and default, or a section by a table of its keys.

    Without a key, the sections are listed.

    Args:
        key: dotted key, such as `training.learning_rate` or `data.0.reward`; the last part of a key finds every key
            that ends with it.
        pipeline: name of the pipeline whose configuration is explained.

    Raises:
        ConfigError: the key or the pipeline does not exist; the message suggests a similar name.
    """
    model = PIPELINES.get(pipeline)
    if not key:
        return _format_overview(model)
    return "\n\n".join(_format_key(found, model) for found in find_keys(key, model))


def find_keys(name: str, model: type[Section]) -> list[Key]:
    """Find the keys with a name.

    There are several such keys if `name` is only the last part of keys in several sections.

    Raises:
        ConfigError: no key has this name; the message names a similar key.
    """
    found = _find_named_keys(name, model)
    if not found:
        raise ConfigError(_describe_unknown_name(name, model))
    return merge_keys(found)


def _find_named_keys(name: str, model: type[Section]) -> list[Key]:
    parts = tuple(part for part in replace_indices(tuple(name.strip().split("."))) if part != "N")
    keys = list(iterate_keys(model))
    found = [key for key in keys if _remove_indices(key) == parts or _matches_name(key, parts)]
    return found or [key for key in keys if _remove_indices(key)[-len(parts) :] == parts]


def _matches_name(key: Key, parts: tuple[str, ...]) -> bool:
    """Return whether `parts` is the key's path with names of mappings, as in `cluster.device_classes.h800.devices`."""
    return len(key.path) == len(parts) and all(
        known in ("N", part) for known, part in zip(key.path, parts, strict=True)
    )


def _remove_indices(key: Key) -> tuple[str, ...]:
    return tuple(part for part in key.path if part != "N")


def merge_keys(keys: Sequence[Key]) -> list[Key]:
    """Merge identical keys of union members (path, description, type and default) into one key with all tags."""
    kept: dict[tuple[Any, ...], Key] = {}
    for key in keys:
        same = (key.path, key.meaning, key.type_description, () if key.members else repr(key.default))
        first = kept.setdefault(same, key)
        tags = dict.fromkeys((*first.variants, *key.variants))
        kept[same] = replace(first, variants=tuple(tags))
    return list(kept.values())


def _describe_unknown_name(name: str, model: type[Section]) -> str:
    if elsewhere := [
        pipeline for pipeline in PIPELINES.built_in_names if _find_named_keys(name, PIPELINES.get(pipeline))
    ]:
        others = f" (or {', '.join(elsewhere[1:])})" if elsewhere[1:] else ""
        return f"'{name}' is a key of another pipeline: pass --pipeline {elsewhere[0]}{others}."
    line = describe_unknown_key(tuple(name.split(".")), Document(name="", tree={}), model)
    if "Did you mean" in line or "belongs under" in line:
        return line
    close = find_similar_names(name, (key.dotted for key in iterate_keys(model)), cutoff=0.5)
    hint = f"Did you mean '{close[0]}'?" if close else "`roll config explain` lists all keys."
    return f"unknown key '{name}'. {hint}"


def _format_overview(model: type[Section]) -> str:
    keys = [key for key in iterate_keys(model) if len(key.path) == 1]
    rows = [(key.dotted, _get_first_sentence(key.meaning)) for key in keys]
    tail = "`roll config explain SECTION` lists a section's keys, `roll config explain KEY` explains one."
    return f"{get_summary(model)}\n\n{_format_table(rows)}\n\n{tail}"


def get_summary(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


def _format_key(key: Key, model: type[Section]) -> str:
    chosen_by = f"  ({get_tag_key(key.owner)}: {', '.join(key.variants)})" if key.variants else ""
    lines = [key.dotted + chosen_by, textwrap.indent(textwrap.fill(key.meaning, _PAGE_WIDTH - 2), "  "), ""]
    if key.members:
        # The methods of the pipeline `diffusion` are members of a union; other algorithms are presets of one section.
        extra = _format_presets() if key.path == ("algorithm",) and len(key.members) == 1 else []
        return "\n".join([*lines, *_format_members(key), *extra]).rstrip()
    facts = [("type", key.type_description)]
    facts += [("unit", key.unit)] if key.unit else []
    facts += [("default", format_default(key))]
    facts += [("in", _describe_location(key, model))]
    facts += [("change", f"{key.dotted.replace('.N', '.0')}={_format_override_value(_choose_example(key))}")]
    return "\n".join(lines + [f"  {name:<9}{text}" for name, text in facts])


def _format_presets() -> list[str]:
    """Return the lines that show which keys each value of `algorithm.type` sets."""
    rows = [
        (name, ", ".join(format_settings(load_preset(name))) or "no key: it is the default") for name in PRESET_NAMES
    ]
    return ["", "  type: the preset, and the keys that it sets", "", _indent(_format_table(rows))]


def _format_members(key: Key) -> Iterator[str]:
    """Yield a table of a section's keys; for a union, first the keys that all members share, then the keys of each
    member."""
    tables = {
        tag: [Key(path=(name,), field=field, owner=section) for name, field in section.model_fields.items()]
        for tag, section in key.members
    }
    shared: list[Key] = []
    if len(tables) > 1:
        first, *others = tables.values()
        shared = [key for key in first if all(_build_row(key) in map(_build_row, keys) for keys in others)]
        yield from ("  Keys of all types:", "", _indent(_format_table([_TABLE_HEADER, *map(_build_row, shared)])), "")
    for tag, section in key.members:
        chosen_by = f"{get_tag_key(section)}: {tag}   " if tag else ""
        yield _indent(chosen_by + get_summary(section))
        rows = [_build_row(own) for own in tables[tag] if _build_row(own) not in map(_build_row, shared)]
        yield from ("", _indent(_format_table([_TABLE_HEADER, *rows])), "") if rows else ("",)


_TABLE_HEADER = ("key", "default", "description")


def _build_row(key: Key) -> tuple[str, str, str]:
    return (key.path[-1], format_default(key), _get_first_sentence(key.meaning))


def _indent(text: str) -> str:
    return textwrap.indent(text, "  ")


def _format_override_value(value: Any) -> str:
    return value if isinstance(value, str) else _format_short_value(value)


def _describe_location(key: Key, model: type[Section]) -> str:
    section = ".".join(key.path[:-1]) or "the top level"
    return f"{section}: {get_summary(key.owner)}" if key.owner is not model else "the top level"


def _choose_example(key: Key) -> Any:
    examples = key.field.examples
    if examples:
        return examples[0]
    return "VALUE" if key.required or key.default is None else key.default


def format_default(key: Key) -> str:
    """Format a key's default as it would be written in a file."""
    if key.required:
        return "required"
    value = key.default
    if isinstance(value, Section):
        return "the section's defaults"
    return _format_short_value(value)


def _format_short_value(value: Any) -> str:
    """Format a value as it would be written in a file; rewards are shortened to their types."""
    if isinstance(value, list) and value and all(isinstance(entry, Section) for entry in value):
        given = [entry.model_dump(exclude_unset=True) for entry in value]
        short = [entry["type"] if set(entry) == {"type"} else entry for entry in given]
        return format_value(short[0] if len(short) == 1 else short)
    return format_value(value)


def _get_first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; the last column is wrapped."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        head = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row[-1], max(30, _PAGE_WIDTH - indent)) or [""]
        lines += [(head + wrapped[0]).rstrip(), *(" " * indent + more for more in wrapped[1:])]
    return "\n".join(lines)
