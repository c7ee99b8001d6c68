"""`key=value` changes to a configuration before it is validated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from roll.config.base import Section
from roll.config.document import Document, KeyPath, check_text, dotted, parse
from roll.config.keys import Shape, child, shape_of, template
from roll.config.problems import show, unknown_key
from roll.config.renamed import rename_path, rename_tree, warn_renamed
from roll.config.rewards import as_reward_list
from roll.errors import ConfigError

__all__ = ["apply_overrides"]

_SHORTHANDS: dict[tuple[str, ...], Callable[[Any], Any]] = {
    ("model",): lambda value: {"path": value} if isinstance(value, str) else value,
    ("judge",): lambda value: {"model": value} if isinstance(value, str) else value,
    ("data", "N", "reward"): as_reward_list,
}
"""Keys with a short form, and their expansion, so that an override can set a key inside them."""


def apply_overrides(
    document: Document, overrides: Sequence[str] | Mapping[str, Any], model: type[Section]
) -> tuple[Document, list[str]]:
    """Apply overrides to a document, and return it with one line for each problem.

    Former names in either are replaced, with one warning; a problem is an override that cannot be applied, or a key
    that has its former and its current name.
    """
    # the document first: an override replaces a value, whichever of its names either of them uses
    document, renames = rename_tree(document)
    notes, lines = renames.notes, renames.problems
    result = replace(document, tree=copy.deepcopy(document.tree), origins=dict(document.origins))
    pairs = overrides.items() if isinstance(overrides, Mapping) else [(None, text) for text in overrides]
    written: dict[KeyPath, KeyPath] = {}
    for key, value in pairs:
        try:
            _apply(result, model, key, value, written)
        except ConfigError as error:
            lines.append(str(error))
    notes += [f"{dotted(path)} -> {dotted(new)}" for new, path in written.items() if new != path]
    result, renames = rename_tree(result)  # names in the values of overrides, such as training={...}
    warn_renamed(document.name, [*notes, *renames.notes])
    return result, [*lines, *renames.problems]


def _apply(
    document: Document, model: type[Section], key: str | None, value: Any, written: dict[KeyPath, KeyPath]
) -> None:
    origin = f"override '{key}'"
    text = None
    if key is None:
        key, equals, text = str(value).partition("=")
        origin = f"override {show(str(value))}"
        if not equals:
            raise ConfigError(f"{origin} has no '=': write key=value, such as training.num_steps=40.")
    key = key.strip()
    path: KeyPath = tuple(int(part) if part.isdecimal() and len(part) < 6 else part for part in key.split("."))
    if not key or "" in path:
        raise ConfigError(f"{origin} has no valid key: write key=value, such as training.num_steps=40.")
    given, path = path, rename_path(path)
    before = written.setdefault(path, given)
    if before != given:
        raise ConfigError(f"{origin}: '{dotted(before)}' and '{dotted(given)}' are two names of one key: give one.")
    # the replaced value and the keys inside it have other origins
    for inner in [known for known in document.origins if known[: len(path)] == path]:
        del document.origins[inner]
    document.origins[path] = origin
    container, shape = _descend(document, model, path, origin)
    found = child(shape, path[-1], container)
    if not found and not shape.is_dict:
        raise ConfigError(unknown_key(path, document, model))
    if text is not None:
        value = _read(text, shape_of(found[0][1]) if found else Shape(), origin)
    _put(container, path, value, origin)


def _descend(document: Document, model: type[Section], path: KeyPath, origin: str) -> tuple[Any, Shape]:
    """Return the container that holds the last part of `path`, created if it was not written, and its shape."""
    value: Any = document.tree
    shape = Shape(section=model)
    for depth, part in enumerate(path[:-1]):
        found = child(shape, part, value)
        if not found and not shape.is_dict:
            raise ConfigError(
                unknown_key(path[: depth + 1], replace_origin(document, path[: depth + 1], origin), model)
            )
        shape = shape_of(found[0][1]) if found else shape
        here = path[: depth + 1]
        if not (found and (shape.section or shape.variants or shape.is_list)) and not shape.is_dict:
            raise ConfigError(f"{origin}: '{dotted(here)}' is a single value, it has no '{path[depth + 1]}' inside.")
        inner = _get(value, here, origin)
        expand = _SHORTHANDS.get(template(here))
        if expand is not None and inner is not None:
            inner = expand(inner)
        if inner is None:
            inner = [] if shape.is_list else {}
        if not isinstance(inner, list if shape.is_list else dict):
            raise ConfigError(f"{origin}: '{dotted(here)}' is {show(inner)}, it has no '{path[depth + 1]}' inside.")
        _put(value, here, inner, origin)
        value = inner
    return value, shape


def replace_origin(document: Document, path: KeyPath, origin: str) -> Document:
    """Return the document with `origin` as the place where `path` was written."""
    return replace(document, origins={**document.origins, path: origin})


def _get(container: Any, path: KeyPath, origin: str) -> Any:
    part = path[-1]
    if isinstance(container, list):
        _check_index(container, path, origin)
        assert isinstance(part, int)
        return container[part] if part < len(container) else None
    return container.get(part)


def _put(container: Any, path: KeyPath, value: Any, origin: str) -> None:
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
            f"{origin}: '{dotted(path[:-1])}' is a list of {len(container)}; "
            f"write a position from 0 to {len(container)}."
        )


def _read(text: str, shape: Shape, origin: str) -> Any:
    """Parse the value as YAML; where only text is allowed, unquoted text is taken literally."""
    check_text(text, origin)
    try:
        value, _ = parse(text, origin)
    except ConfigError:
        if shape.scalar is str:
            return text
        raise
    if shape.scalar is str and not isinstance(value, str) and not (value is None and shape.nullable):
        return text
    return value
