"""The tree of configuration keys, derived from the section classes.

`explain`, the error messages and the reference page are built from this tree, so they always agree with the classes. A
position in a list is written `N`, as in `data.N.max_operand`, and so is a name in a mapping of sections, as in
`cluster.device_classes.N.devices`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll.config.base import PATTERN_DESCRIPTIONS, Section

__all__ = [
    "Key",
    "ValueType",
    "describe_type",
    "find_children",
    "get_tag_key",
    "iterate_keys",
    "parse_annotation",
    "replace_indices",
    "select_sections",
]


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """The type of a key's values: section, union of sections, list, mapping or scalar."""

    nullable: bool = False
    section: type[Section] | None = None
    variants: tuple[tuple[str, type[Section]], ...] = ()
    """Members of a union of sections: the tag that selects each, and the section."""
    item: Any = None
    """Annotation of a list's entries, or of a mapping's values if they are sections."""
    is_list: bool = False
    is_dict: bool = False
    alternatives: tuple[Any, ...] = ()
    """Annotations of an untagged union of plain values."""
    scalar: Any = None
    """`int`, `float`, `bool`, `str`, or a `Literal[…]`."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the configuration."""

    path: tuple[str, ...]
    field: FieldInfo
    owner: type[Section]
    variants: tuple[str, ...] = ()
    """Tags of the union members that have this key, such as `arithmetic`; empty outside unions."""

    @property
    def dotted(self) -> str:
        """The path with dots, as in `data.N.max_operand`."""
        return ".".join(self.path)

    @property
    def value_type(self) -> ValueType:
        """The type of the value."""
        return parse_annotation(self.field.annotation)

    @property
    def required(self) -> bool:
        """True if the key has no default."""
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The default; `PydanticUndefined` for a required key."""
        return PydanticUndefined if self.required else self.field.get_default(call_default_factory=True)

    @property
    def meaning(self) -> str:
        """The key's description."""
        return self.field.description or ""

    @property
    def unit(self) -> str:
        """The unit of a number, or an empty string."""
        extra = self.field.json_schema_extra
        return str(extra.get("unit", "")) if isinstance(extra, dict) else ""

    @property
    def type_description(self) -> str:
        """A description of the allowed values, such as `an integer >= 1`."""
        return describe_type(self.field.annotation, self.field)

    @property
    def members(self) -> tuple[tuple[str, type[Section]], ...]:
        """The sections below this key, each with the tag that selects it; the tag of a single section is empty."""
        value_type = parse_annotation(self.value_type.item) if self.value_type.item is not None else self.value_type
        return (("", value_type.section),) if value_type.section else value_type.variants


def parse_annotation(annotation: Any) -> ValueType:
    """Parse the type annotation of a field."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        members = get_args(annotation)
        nullable = type(None) in members
        rest = [member for member in members if member is not type(None)]
        if len(rest) == 1:
            inner = parse_annotation(rest[0])
            return replace(inner, nullable=nullable)
        tagged = [(_get_tag(member), _strip_annotated(member)) for member in rest]
        if all(isinstance(section, type) and issubclass(section, Section) for _, section in tagged):
            return ValueType(nullable=nullable, variants=tuple(tagged))
        return ValueType(nullable=nullable, alternatives=tuple(rest))
    if origin is list:
        return ValueType(is_list=True, item=get_args(annotation)[0])
    if origin is dict:
        values = parse_annotation(get_args(annotation)[1])
        return ValueType(is_dict=True, item=get_args(annotation)[1] if values.section or values.variants else None)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return ValueType(section=annotation)
    return ValueType(scalar=annotation)


def _strip_annotated(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def get_tag_key(section: type[Section]) -> str:
    """Return the key whose value selects a union member: `source` for prompt sources, `tool` for tools, else `type`."""
    return next((key for key in ("source", "tool") if key in section.model_fields), "type")


def _get_tag(member: Any) -> str:
    for extra in get_args(member)[1:] if get_origin(member) is Annotated else ():
        if isinstance(extra, Tag):
            return extra.tag
    section = _strip_annotated(member)
    if isinstance(section, type) and issubclass(section, Section):
        return str(get_args(section.model_fields[get_tag_key(section)].annotation)[0])
    return ""


def find_children(value_type: ValueType, part: str | int, value: Any = None) -> list[tuple[FieldInfo | None, Any]]:
    """Find the fields (with annotations) to which one part of a path may refer in a value of type `value_type`.

    Args:
        value_type: Type of the enclosing value.
        part: Part of the path: a key, or a position in a list.
        value: The enclosing value as written; its tag selects the member of a union.
    """
    if value_type.is_list:
        is_index = isinstance(part, int) or part == "N" or part.isdigit()
        return [(None, value_type.item)] if is_index else []
    if value_type.is_dict and value_type.item is not None:
        return [(None, value_type.item)]
    fields = [section.model_fields.get(str(part)) for section in select_sections(value_type, value)]
    return [(field, field.annotation) for field in fields if field is not None]


def select_sections(value_type: ValueType, value: Any) -> list[type[Section]]:
    """Return the possible sections of a value: the union member that is selected by the value's tag, or all members."""
    sections = [value_type.section] if value_type.section else [section for _, section in value_type.variants]
    if value_type.variants and isinstance(value, dict):
        tag = str(value.get(get_tag_key(value_type.variants[0][1]))).partition(":")[0]
        sections = [section for name, section in value_type.variants if name == tag] or sections
    return sections


def iterate_keys(model: type[Section]) -> Iterator[Key]:
    """Yield every key of a section class, in declaration order; a section precedes its keys."""
    yield from _collect_keys(model)


@cache
def _collect_keys(model: type[Section]) -> tuple[Key, ...]:
    return tuple(_iterate_section(model, (), ()))


def _iterate_section(section: type[Section], prefix: tuple[str, ...], variants: tuple[str, ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield Key(path=path, field=field, owner=section, variants=variants)
        value_type = parse_annotation(field.annotation)
        if value_type.item is not None:
            value_type, path = parse_annotation(value_type.item), (*path, "N")
        if value_type.section:
            yield from _iterate_section(value_type.section, path, ())
        for tag, member in value_type.variants:
            yield from _iterate_section(member, path, (tag,))


def replace_indices(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """Replace list positions in a path by `N`."""
    return tuple("N" if isinstance(part, int) or part.isdigit() else part for part in path)


_SCALAR_DESCRIPTIONS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Any: "any value"}
_ITEM_DESCRIPTIONS = {int: "integers", float: "numbers", str: "strings", bool: "true or false"}


def describe_type(annotation: Any, field: FieldInfo | None = None) -> str:
    """Describe the values that an annotation with its limits allows, in plain words."""
    value_type = parse_annotation(annotation)
    words = _describe_values(value_type, field.metadata if field else [])
    if not value_type.nullable:
        return words
    if words == _SCALAR_DESCRIPTIONS[bool]:
        return "true, false or null"
    return f"{words}, or null" if any(part in words for part in (", ", " and ", " or ", "`")) else f"{words} or null"


def _describe_values(value_type: ValueType, limits: list[Any]) -> str:
    if value_type.is_list:
        return _describe_list(_describe_items(parse_annotation(value_type.item)), *_get_length_limits(limits))
    if get_origin(value_type.scalar) is tuple:
        items = get_args(value_type.scalar)
        return _describe_list(_describe_items(parse_annotation(items[0])), len(items), len(items))
    if value_type.section or value_type.variants:
        return "a section"
    if value_type.is_dict:
        return f"a mapping of names to {'values' if value_type.item is None else 'sections'}"
    if value_type.alternatives:
        words = [describe_type(alternative) for alternative in value_type.alternatives]
        return " or ".join(words).replace(" or true or false", ", true or false")
    if get_origin(value_type.scalar) is Literal:
        choices = [_quote(choice) for choice in get_args(value_type.scalar)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    words = _SCALAR_DESCRIPTIONS.get(value_type.scalar, str(value_type.scalar))
    if value_type.scalar is str:
        return _describe_string(words, limits)
    bounds = _describe_bounds(limits)
    return f"{words} {bounds}" if bounds else words


def _quote(choice: Any) -> str:
    return f"'{choice}'" if isinstance(choice, str) else str(choice).lower()


def _describe_list(items: str, at_least: int, at_most: int | None) -> str:
    if at_least == at_most:
        return f"a list of {at_least} {items}"
    if at_most is not None:
        items = f"at most {at_most} {items}"
    elif at_least > 1:
        items = f"at least {at_least} {items}"
    return f"a non-empty list of {items}" if at_least == 1 else f"a list of {items}"


def _describe_items(value_type: ValueType) -> str:
    if get_origin(value_type.scalar) is Literal:
        return f"values from {', '.join(_quote(choice) for choice in get_args(value_type.scalar))}"
    return _ITEM_DESCRIPTIONS.get(value_type.scalar, "sections")


def _describe_string(description: str, limits: list[Any]) -> str:
    if _get_length_limits(limits)[0]:
        description = f"a non-empty {description.removeprefix('a ')}"
    pattern = next((item.pattern for item in limits if getattr(item, "pattern", None)), None)
    return (
        description
        if pattern is None
        else f"{description} {PATTERN_DESCRIPTIONS.get(pattern, f'that matches `{pattern}`')}"
    )


def _get_length_limits(limits: list[Any]) -> tuple[int, int | None]:
    at_least = next((item.min_length for item in limits if isinstance(item, MinLen)), 0)
    at_most = next((item.max_length for item in limits if isinstance(item, MaxLen)), None)
    return at_least, at_most


def _describe_bounds(limits: list[Any]) -> str:
    """Describe the bounds of a number, as in `>= 0 and < 1`; an empty string if it has none."""
    bounds: list[str] = []
    for item in limits:
        match item:
            case Ge(ge=limit):
                bounds.append(f">= {limit}")
            case Gt(gt=limit):
                bounds.append(f"> {limit}")
            case Le(le=limit):
                bounds.append(f"<= {limit}")
            case Lt(lt=limit):
                bounds.append(f"< {limit}")
    return " and ".join(bounds)
