"""The tree of configuration keys, as the section classes declare it.

`explain`, the error messages and the reference page all use it, so none of them can drift from the classes. A position
in a list is written `N`: `data.N.max_operand`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll.config.base import PATTERN_WORDS, Section

__all__ = ["Key", "Shape", "all_keys", "child", "sections_of", "shape_of", "tag_key", "template", "type_words"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The parts of a key's annotation."""

    nullable: bool = False
    section: type[Section] | None = None
    variants: tuple[tuple[str, type[Section]], ...] = ()
    """Members of a union of sections: the tag that selects each, and the section."""
    item: Any = None
    """Annotation of a list's entries."""
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
        """The path as `data.N.max_operand`."""
        return ".".join(self.path)

    @property
    def shape(self) -> Shape:
        """The shape of the value."""
        return shape_of(self.field.annotation)

    @property
    def required(self) -> bool:
        """Whether the key has no default."""
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
    def type_words(self) -> str:
        """The allowed values in plain words: `a whole number >= 1`."""
        return type_words(self.field.annotation, self.field)

    @property
    def members(self) -> tuple[tuple[str, type[Section]], ...]:
        """The sections below this key, each with the tag that selects it; the tag of a single section is empty."""
        shape = shape_of(self.shape.item) if self.shape.is_list else self.shape
        return (("", shape.section),) if shape.section else shape.variants


def shape_of(annotation: Any) -> Shape:
    """Parse an annotation."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        members = get_args(annotation)
        nullable = type(None) in members
        rest = [member for member in members if member is not type(None)]
        if len(rest) == 1:
            inner = shape_of(rest[0])
            return replace(inner, nullable=nullable)
        tagged = [(_tag(member), _strip(member)) for member in rest]
        if all(isinstance(section, type) and issubclass(section, Section) for _, section in tagged):
            return Shape(nullable=nullable, variants=tuple(tagged))
        return Shape(nullable=nullable, alternatives=tuple(rest))
    if origin is list:
        return Shape(is_list=True, item=get_args(annotation)[0])
    if origin is dict:
        return Shape(is_dict=True)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Shape(section=annotation)
    return Shape(scalar=annotation)


def _strip(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def tag_key(section: type[Section]) -> str:
    """Return the key whose value selects a union member: `source` for prompt sources, `tool` for tools, else `type`."""
    return next((key for key in ("source", "tool") if key in section.model_fields), "type")


def _tag(member: Any) -> str:
    for extra in get_args(member)[1:] if get_origin(member) is Annotated else ():
        if isinstance(extra, Tag):
            return extra.tag
    section = _strip(member)
    if isinstance(section, type) and issubclass(section, Section):
        return str(get_args(section.model_fields[tag_key(section)].annotation)[0])
    return ""


def child(shape: Shape, part: str | int, value: Any = None) -> list[tuple[FieldInfo | None, Any]]:
    """Return the (field, annotation) pairs that `part` may mean inside `shape`.

    `value`, the data written at this place, selects the member of a union if it can.
    """
    if shape.is_list:
        is_index = isinstance(part, int) or part == "N" or part.isdigit()
        return [(None, shape.item)] if is_index else []
    fields = [section.model_fields.get(str(part)) for section in sections_of(shape, value)]
    return [(field, field.annotation) for field in fields if field is not None]


def sections_of(shape: Shape, value: Any) -> list[type[Section]]:
    """Return the sections that `value` may be: the union member that its tag selects, or all members."""
    sections = [shape.section] if shape.section else [section for _, section in shape.variants]
    if shape.variants and isinstance(value, dict):
        tag = str(value.get(tag_key(shape.variants[0][1]))).partition(":")[0]
        sections = [section for name, section in shape.variants if name == tag] or sections
    return sections


def all_keys(model: type[Section]) -> Iterator[Key]:
    """Yield every key below `model`, in declaration order; a section comes before the keys inside it."""
    yield from _keys(model, (), ())


def _keys(section: type[Section], prefix: tuple[str, ...], variants: tuple[str, ...]) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield Key(path=path, field=field, owner=section, variants=variants)
        shape = shape_of(field.annotation)
        if shape.is_list:
            shape, path = shape_of(shape.item), (*path, "N")
        if shape.section:
            yield from _keys(shape.section, path, ())
        for tag, member in shape.variants:
            yield from _keys(member, path, (tag,))


def template(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """Return a path with its list positions written as `N`."""
    return tuple("N" if isinstance(part, int) or part.isdigit() else part for part in path)


_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "any value"}


def type_words(annotation: Any, field: FieldInfo | None = None) -> str:
    """Describe the values that an annotation with its limits allows, in plain words."""
    shape = shape_of(annotation)
    if shape.is_list:
        words = f"a list of {_plural(shape_of(shape.item))}"
    elif shape.section or shape.variants:
        words = "a section"
    elif shape.is_dict:
        words = "a mapping of names to values"
    elif shape.alternatives:
        words = " or ".join(type_words(alternative) for alternative in shape.alternatives)
    elif get_origin(shape.scalar) is Literal:
        choices = [f"'{choice}'" for choice in get_args(shape.scalar)]
        words = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    else:
        words = _SCALARS.get(shape.scalar, str(shape.scalar))
    limits = limit_words(field) if field else ""
    return f"{words}{limits}{' or null' if shape.nullable else ''}"


def _plural(shape: Shape) -> str:
    if get_origin(shape.scalar) is Literal:
        return " / ".join(f"'{choice}'" for choice in get_args(shape.scalar))
    return {int: "whole numbers", float: "numbers", str: "texts", bool: "true or false"}.get(shape.scalar, "sections")


def limit_words(field: FieldInfo) -> str:
    """Describe the limits of a field, as ` >= 0 and < 1`."""
    bounds: list[str] = []
    lengths: list[str] = []
    for item in field.metadata:
        match item:
            case Ge(ge=limit):
                bounds.append(f">= {limit}")
            case Gt(gt=limit):
                bounds.append(f"> {limit}")
            case Le(le=limit):
                bounds.append(f"<= {limit}")
            case Lt(lt=limit):
                bounds.append(f"< {limit}")
            case MinLen(min_length=limit):
                lengths.append("not empty" if limit == 1 else f"with at least {limit} entries")
            case MaxLen(max_length=limit):
                lengths.append(f"with at most {limit} entries")
            case _:
                pattern = getattr(item, "pattern", None)
                if pattern:
                    lengths.append(PATTERN_WORDS.get(pattern, f"that matches {pattern}"))
    words = " " + " and ".join(bounds) if bounds else ""
    return words + ("".join(f", {length}" for length in lengths))
