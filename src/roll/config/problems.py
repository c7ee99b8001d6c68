"""Error messages for invalid configurations: one line per problem, with keys and values as the user wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roll.config.base import Section
from roll.config.document import Document, KeyPath, dump, format_path
from roll.config.keys import (
    ValueType,
    describe_type,
    find_children,
    get_tag_key,
    iterate_keys,
    parse_annotation,
    select_sections,
)
from roll.registry import count_edits, did_you_mean, find_similar_names

__all__ = ["describe_errors", "describe_unknown_key", "format_problems", "format_value"]

NAMES_IN_OTHER_LIBRARIES = {
    "adv_estimator": "algorithm.type",
    "domain_batch_size": "data.N.weight",
    "exp_name": "name",
    "gradient_accumulation_steps": "training.max_tokens_per_micro_batch",
    "init_kl_coef": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "logging_dir": "output_dir",
    "lr": "training.learning_rate",
    "lr_scheduler_type": "training.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "training.num_steps",
    "max_tokens": "rollout.max_new_tokens",
    "micro_batch_size": "training.max_tokens_per_micro_batch",
    "model_name_or_path": "model.path",
    "num_generations": "rollout.group_size",
    "num_return_sequences_in_group": "rollout.group_size",
    "per_device_train_batch_size": "training.max_tokens_per_micro_batch",
    "pretrain": "model.path",
    "rollout_batch_size": "rollout.prompts_per_step",
    "save_steps": "checkpoint.every_num_steps",
    "track_with": "tracking.wandb",
    "train_batch_size": "rollout.prompts_per_step",
}
"""Maps names of settings in other libraries to the corresponding keys."""

_EQUIVALENT_COLUMNS = {"answer_key": "completion_key", "completion_key": "answer_key"}
"""Maps a column's key in sources of prompts to its key in sources of examples and vice versa, for suggestions."""

MAX_LINES = 20
"""Maximum number of problems in one message."""

_DOTTED_KEY_PATTERN = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


def format_problems(lines: Iterable[str]) -> str:
    """Format problems as one message: a single line, or a heading and a list."""
    unique = list(dict.fromkeys(lines))
    if len(unique) == 1:
        return unique[0]
    shown = [f"  {line}" for line in unique[:MAX_LINES]]
    more = [f"  ... and {len(unique) - MAX_LINES} more"] if len(unique) > MAX_LINES else []
    return "\n".join([f"{len(unique)} problems in the configuration:", *shown, *more])


def describe_errors(error: ValidationError, document: Document, model: type[Section]) -> list[str]:
    """Return one line for each validation error."""
    return [_describe_error(detail, document, model) for detail in error.errors(include_url=False)]


def format_value(value: Any) -> str:
    """Format a value as a user would write it, shortened."""
    if isinstance(value, str):
        text = f"'{value}'" if value.isprintable() else repr(value)
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            try:
                text = repr(value)
            except ValueError:  # Python does not format integers of more than 4,300 digits
                text = "a number that is too long"
    return text if len(text) <= 80 else text[:76] + " ..."


def format_location(document: Document, path: KeyPath) -> str:
    """Format the place where a key was written, as in ` (quickstart.yaml:9)`; empty for a dictionary from Python."""
    origin = document.find_origin(path)
    return f" ({origin})" if origin else ""


def _describe_error(detail: ErrorDetails, document: Document, model: type[Section]) -> str:
    path, field, value_type = _locate_field(detail["loc"], model)
    where, kind, value = format_location(document, path), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return describe_unknown_key(path, document, model)
    if kind == "missing":
        return f"missing key '{format_path(path)}'{where}: {_describe_missing_key(field, str(path[-1]))}"
    if kind == "value_error":
        return _format_value_error(str(detail.get("ctx", {}).get("error", detail["msg"])), path, document)
    if value_type.variants and (kind in {"union_tag_invalid", "union_tag_not_found"} or not isinstance(value, dict)):
        return _describe_unknown_tag(path, value_type, value, document)
    whole = field is not None and _concerns_whole_value(detail, field)
    expected = describe_type(field.annotation, field) if field is not None and whole else _describe_expected(value_type)
    hint = _suggest_fix(value_type, value) or _suggest_section(path, value_type, value)
    return f"'{format_path(path)}'{where} must be {expected}, got {format_value(value)}.{hint}"


def _describe_missing_key(field: FieldInfo | None, name: str) -> str:
    """Describe the meaning of a missing key, and how to write it."""
    if field is None:
        return "set it."
    example = dump({name: field.examples[0]}, flow=True).strip()[1:-1] if field.examples else ""
    how = f"Example: `{example}`" if example else f"Expected {describe_type(field.annotation, field)}"
    return f"{field.description or name} {how}."


def _locate_field(loc: tuple[str | int, ...], model: type[Section]) -> tuple[KeyPath, FieldInfo | None, ValueType]:
    """Convert Pydantic's location `loc` to a path without union tags; return the path, its field and its type."""
    path: list[str | int] = []
    field: FieldInfo | None = None
    value_type = ValueType(section=model)
    for part in loc:
        if value_type.variants and part in dict(value_type.variants):
            value_type = ValueType(section=dict(value_type.variants)[str(part)])
            continue
        if value_type.alternatives or part == "[key]":
            break
        path.append(part)
        found = find_children(value_type, part)
        if found:
            # An entry of a mapping has no field of its own, and the field of the mapping does not describe it.
            kept = None if value_type.is_dict else field
            field, value_type = found[0][0] or kept, parse_annotation(found[0][1])
        elif not value_type.is_dict:
            field, value_type = None, ValueType()
    return tuple(path), field, value_type


def _concerns_whole_value(detail: ErrorDetails, field: FieldInfo) -> bool:
    """Return whether a validation error concerns the key's whole value, and not a single entry of a list."""
    return not (parse_annotation(field.annotation).is_list and isinstance(detail["loc"][-1], int))


def _describe_expected(value_type: ValueType) -> str:
    if value_type.section or value_type.variants:
        return "a section (keys and values)"
    return describe_type(value_type.scalar) if value_type.scalar is not None else "something else"


def _suggest_fix(value_type: ValueType, value: Any) -> str:
    choices = [str(choice) for choice in get_args(value_type.scalar)]
    if choices and isinstance(value, str):
        return did_you_mean(value, choices)
    if isinstance(value, str) and value_type.scalar in (int, float) and _is_number(value):
        return f" Remove the quotes: {value}."
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 and value_type.scalar is int:
        return f" Write {int(value)}."
    if value_type.scalar is str and isinstance(value, int | float | bool):
        return f" Put it in quotes: '{format_value(value)}'."
    if value is None and (value_type.section or value_type.variants):
        return " The section is empty: remove the key, or write {}."
    if value_type.scalar is bool and isinstance(value, str) and value.lower() in {"yes", "no", "on", "off"}:
        return f" Write {'true' if value.lower() in {'yes', 'on'} else 'false'}."
    return ""


def _suggest_section(path: KeyPath, value_type: ValueType, value: Any) -> str:
    """Return a hint on how to write a section if the user wrote only its type; otherwise an empty string."""
    if value_type.section is None or not isinstance(value, str):
        return ""
    key = get_tag_key(value_type.section)
    field = value_type.section.model_fields.get(key)
    kinds = [str(kind) for kind in get_args(parse_annotation(field.annotation).scalar)] if field else []
    close = find_similar_names(value, kinds, cutoff=0.6)
    return (
        f" Write `{format_path((*path, key))}={close[0]}`, or in a file `{path[-1]}: {{{key}: {close[0]}}}`."
        if close
        else ""
    )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _format_value_error(text: str, path: KeyPath, document: Document) -> str:
    """Format a validator's message with the key and the place where it was written."""
    if path:
        separator = " " if text.startswith("must ") else ": "
        return f"'{format_path(path)}'{format_location(document, path)}{separator}{text}."
    for name in _DOTTED_KEY_PATTERN.findall(text):
        key = tuple(name.split("."))
        if key in document.origins:
            return f"{text} ({document.origins[key]})."
    return f"{text}{format_location(document, ())}."


def _describe_unknown_tag(path: KeyPath, value_type: ValueType, value: Any, document: Document) -> str:
    known = dict(value_type.variants)
    key = get_tag_key(next(iter(known.values())))
    where, names = format_location(document, (*path, key)), ", ".join(known)
    if not isinstance(value, dict):
        expected = f"a section with the key '{key}' (one of {names})"
        return f"'{format_path(path)}'{where} must be {expected}, got {format_value(value)}."
    if key not in value:
        fields = {name for section in known.values() for name in section.model_fields}
        strange = [name for name in value if name not in fields]
        hint = (
            f" Did you mean '{key}' instead of '{format_path((_find_closest(key, strange)[0],))}'?" if strange else ""
        )
        return f"missing key '{format_path((*path, key))}'{where}: expected one of {names}.{hint}"
    tag = value[key]
    hint = did_you_mean(str(tag), list(known))
    return f"'{format_path((*path, key))}'{where} must be one of {names}, got {format_value(tag)}.{hint}"


def describe_unknown_key(path: KeyPath, document: Document, model: type[Section]) -> str:
    """Describe a key that does not exist, with a suggestion."""
    hint = _suggest_key(str(path[-1]), _list_siblings(path, document, model), model)
    return f"unknown key '{format_path(path)}'{format_location(document, path)}.{hint}"


def _count_parts(key: str) -> int:
    return sum(part != "N" for part in key.split("."))


def _suggest_key(name: str, siblings: list[str], model: type[Section]) -> str:
    """Return a hint with the key that was probably meant, or with all known keys; empty if there are no keys.

    Candidates, in order: a similar key of the section or its equivalent column, a key with this name in another
    section, the key that corresponds to another library's name, the most similar key of any section.
    """
    places: dict[str, list[str]] = {}
    for key in iterate_keys(model):
        places.setdefault(key.path[-1], []).append(key.dotted)
    sibling, likeness = _find_closest(name, siblings)
    if likeness >= 0.85:
        return f" Did you mean '{sibling}'?"
    if (twin := _EQUIVALENT_COLUMNS.get(name)) in siblings:
        return f" Did you mean '{twin}'?"
    if name in places:
        depth = min(map(_count_parts, places[name]))  # most users mean the most general place
        parents = {place.rpartition(".")[0] for place in places[name] if _count_parts(place) == depth}
        shown = sorted(f"'{parent}'" if parent else "the top level" for parent in parents)
        return f" '{name}' belongs under {' or '.join(shown)}." if len(shown) <= 3 else ""
    other = NAMES_IN_OTHER_LIBRARIES.get(name, "")
    if other in places.get(other.rpartition(".")[2], ()):
        return f" Did you mean '{other}'?"
    other, other_likeness = _find_closest(name, list(places))
    if other_likeness >= 0.8 and other_likeness > likeness and len(set(places[other])) <= 3:
        shown = [f"'{place}'" for place in dict.fromkeys(places[other])]
        return f" Did you mean {' or '.join(shown)}?"
    if likeness >= 0.5:
        return f" Did you mean '{sibling}'?"
    return f" Known keys: {', '.join(siblings)}." if siblings else ""


def _find_closest(name: str, known: list[str]) -> tuple[str, float]:
    """Return the known name most similar to `name`, and their similarity from 0 to 1."""
    likeness = {other: SequenceMatcher(None, other.lower(), name.lower()).ratio() for other in known}
    best = max(likeness, key=lambda other: (likeness[other], -count_edits(name, other)), default="")
    return best, likeness.get(best, 0.0)


def _list_siblings(path: KeyPath, document: Document, model: type[Section]) -> list[str]:
    """Return the keys in the same section as `path`; in a union, the tag that the user wrote selects the section."""
    value_type, value = ValueType(section=model), document.tree
    for part in path[:-1]:
        found = find_children(value_type, part, value)
        value = _get_item(value, part)
        if not found:
            return []
        value_type = parse_annotation(found[0][1])
    return list(dict.fromkeys(name for section in select_sections(value_type, value) for name in section.model_fields))


def _get_item(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return None
