"""Hypothesis strategies for values that a JSON schema allows, and for values that it does not allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st

__all__ = ["ANYTHING", "TEXT", "allowed"]

TEXT = st.text(max_size=12) | st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "\x00", "\ud7ff", "{}"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def allowed(
    schema: Any, definitions: Mapping[str, Any], named: Mapping[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[Any]:
    """Return a strategy for small values that a schema allows.

    Args:
        schema: The schema.
        definitions: The schemas to which `$ref` refers, by the last part of their path.
        named: Strategies for fields of these names, instead of those of their schemas.
    """
    named = named or {}
    if "$ref" in schema:
        return allowed(definitions[schema["$ref"].rpartition("/")[2]], definitions, named)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of(*(allowed(option, definitions, named) for option in options))
    match schema.get("type"):
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case "integer":
            least = schema.get("minimum", -9)
            return st.integers(least, min(schema.get("maximum", least + 9), least + 9))
        case "number":
            least = schema.get("minimum", schema.get("exclusiveMinimum", -9))
            return st.floats(least, schema.get("maximum", least + 9), exclude_min="exclusiveMinimum" in schema)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            items = allowed(schema["items"], definitions, named)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
        case "object" if "properties" in schema:
            fields = {
                name: named.get(name, allowed(each, definitions, named)) for name, each in schema["properties"].items()
            }
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=fields)
        case _:
            return st.dictionaries(TEXT, ANYTHING, max_size=2)
