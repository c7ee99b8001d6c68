"""Applies overrides, `key=value`, to a configuration before it is validated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.config.base import Section
from roll.config.document import Document, KeyPath, check_text, format_path, parse
from roll.config.former_names import rename_path, rename_tree, warn_renamed
from roll.config.keys import ValueType, find_children, parse_annotation, replace_indices
from roll.config.problems import describe_unknown_key, format_value
from roll.config.rewards import expand_rewards
from roll.errors import ConfigError

__all__ = ["apply_overrides"]

_SHORTHANDS: dict[tuple[str, ...], Callable[[Any], Any]] = {
    ("model",): lambda value: {"path": value} if isinstance(value, str) else value,
    ("judge",): lambda value: {"model": value} if isinstance(value, str) else value,
    ("data", "N", "reward"): expand_rewards,
}
"""Functions that expand the short forms of keys, so that an override can set a key inside a short form."""


def apply_overrides(
    document: Document, overrides: Sequence[str] | Mapping[str, Any], model: type[Section]
) -> tuple[Document, list[str]]:
    """Apply overrides to a document, and return the new document and one line for each problem.

    Former names in the document and in overrides are replaced, with one warning. A problem is an override that cannot
    be applied, or a key that is set under both its former and its current name.
    """
    # the document is renamed first, so that an override replaces a value under either name of the key
    document, renames = rename_tree(document)
    notes, lines = renames.notes, renames.problems
    result = replace(document, tree=copy.deepcopy(document.tree), origins=dict(document.origins))
    pairs = overrides.items() if isinstance(overrides, Mapping) else [(None, text) for text in overrides]
    written: dict[KeyPath, KeyPath] = {}
    for key, value in pairs:
        try:
            _apply_override(result, model, key, value, written)
        except ConfigError as error:
            lines.append(str(error))
    notes += [f"{format_path(path)} -> {format_path(new)}" for new, path in written.items() if new != path]
    result, renames = rename_tree(result)  # names in the values of overrides, such as training={...}
    warn_renamed(document.name, [*notes, *renames.notes])
    return result, [*lines, *renames.problems]


def _apply_override(
    document: Document, model: type[Section], key: str | None, value: Any, written: dict[KeyPath, KeyPath]
) -> None:
    origin = f"override '{key}'"
    text = None
    if key is None:
        key, equals, text = str(value).partition("=")
        origin = f"override {format_value(str(value))}"
        if not equals:
            raise ConfigError(f"{origin} is invalid: expected key=value, such as training.num_steps=40.")
    key = key.strip()
    path: KeyPath = tuple(int(part) if part.isdecimal() and len(part) < 6 else part for part in key.split("."))
    if not key or "" in path:
        raise ConfigError(f"{origin} has an invalid key: expected key=value, such as training.num_steps=40.")
    given, path = path, rename_path(path)
    before = written.setdefault(path, given)
    if before != given:
        raise ConfigError(
            f"{origin}: '{format_path(before)}' and '{format_path(given)}' are names of the same key: set one."
        )
    # the replaced value and the keys inside it have other origins
    for inner in [known for known in document.origins if known[: len(path)] == path]:
        del document.origins[inner]
    document.origins[path] = origin
    container, value_type = _descend(document, model, path, origin)
    found = find_children(value_type, path[-1], container)
    if not found and not value_type.is_dict:
        raise ConfigError(describe_unknown_key(path, document, model))
    if text is not None:
        value = _parse_value(text, parse_annotation(found[0][1]) if found else ValueType(), origin)
    _set_entry(container, path, value, origin)


def _descend(document: Document, model: type[Section], path: KeyPath, origin: str) -> tuple[Any, ValueType]:
    """Return the section or list that contains the last part of a path, and its type; create it if it is missing."""
    value: Any = document.tree
    value_type = ValueType(section=model)
    for depth, part in enumerate(path[:-1]):
        found = find_children(value_type, part, value)
        if not found and not value_type.is_dict:
            raise ConfigError(
                describe_unknown_key(path[: depth + 1], replace_origin(document, path[: depth + 1], origin), model)
            )
        value_type = parse_annotation(found[0][1]) if found else value_type
        here = path[: depth + 1]
        if not (found and (value_type.section or value_type.variants or value_type.is_list)) and not value_type.is_dict:
            raise ConfigError(f"{origin}: '{format_path(here)}' is a single value and has no key '{path[depth + 1]}'.")
        inner = _get_entry(value, here, origin)
        expand = _SHORTHANDS.get(replace_indices(here))
        if expand is not None and inner is not None:
            inner = expand(inner)
        if inner is None:
            inner = [] if value_type.is_list else {}
        if not isinstance(inner, list if value_type.is_list else dict):
            raise ConfigError(
                f"{origin}: '{format_path(here)}' is {format_value(inner)} and has no key '{path[depth + 1]}'."
            )
        _set_entry(value, here, inner, origin)
        value = inner
    return value, value_type


def replace_origin(document: Document, path: KeyPath, origin: str) -> Document:
    """Record `origin` as the place where a key was written, and return the new document."""
    return replace(document, origins={**document.origins, path: origin})


def _get_entry(container: Any, path: KeyPath, origin: str) -> Any:
    part = path[-1]
    if isinstance(container, list):
        _check_index(container, path, origin)
        assert isinstance(part, int)
        return container[part] if part < len(container) else None
    return container.get(part)


def _set_entry(container: Any, path: KeyPath, value: Any, origin: str) -> None:
    part = path[-1]
    if isinstance(container, list):
        _check_index(container, path, origin)
        if part == len(container):
            container.append(value)
            return
    container[part] = value


def _check_index(container: list[Any], path: KeyPath, origin: str) -> None:
    part = path[-1]
    if not isinstance(part, int) or part > len(container):
        raise ConfigError(
            f"{origin}: '{format_path(path[:-1])}' is a list with {len(container)} entries: use an index from 0 to "
            f"{len(container)}."
        )


def _parse_value(text: str, value_type: ValueType, origin: str) -> Any:
    """Parse the value of an override as YAML, or return it unchanged if the key allows only strings."""
    check_text(text, origin)
    try:
        value, _ = parse(text, origin)
    except ConfigError:
        if value_type.scalar is str:
            return text
        raise
    if value_type.scalar is str and not isinstance(value, str) and not (value is None and value_type.nullable):
        return text
    return value
