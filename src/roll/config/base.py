"""The base class of configuration sections, whose fields are strict, frozen and documented."""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from roll.errors import shorten

__all__ = [
    "EXTENSION_PATTERN",
    "FUNCTION_PATTERN",
    "LABEL_PATTERN",
    "NAME_PATTERN",
    "PATTERN_DESCRIPTIONS",
    "Section",
    "expand_path",
    "option",
    "path_option",
]

_VARIABLE_PATTERN = re.compile(r"\$(?:\w+|\{[^}]*\})")
MAX_NAME_LENGTH = 255
"""Maximum bytes of a file name, as in most file systems."""

FUNCTION_PATTERN = r"^(?:\w+(?:\.\w+)*|[^:]+\.py):\w+$"
"""Pattern of a key that names a function: `package.module:function`, or `path/to/file.py:function`."""
EXTENSION_PATTERN = r"^(?:\w[\w.-]*|(?:\w+(?:\.\w+)*|[^:]+\.py):\w+)$"
"""Pattern of a key that names an implementation: a registered name, or an import path as in `FUNCTION_PATTERN`."""
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of a name that becomes a directory name."""
LABEL_PATTERN = r"^[^=\s!]+=[^=\s!]+$"
"""Pattern of a label of Ray nodes."""
PATTERN_DESCRIPTIONS = {
    FUNCTION_PATTERN: "(`package.module:function` or `path/to/file.py:function`)",
    EXTENSION_PATTERN: "(a name, `package.module:Name` or `path/to/file.py:Name`)",
    LABEL_PATTERN: "(`key=value`, such as `market=spot`)",
    NAME_PATTERN: "of letters (A to Z, a to z), digits, '.', '_' and '-' that begins with a letter or a digit",
}
"""Descriptions of patterns, for messages."""


class Section(BaseModel):
    """A part of the configuration: unknown keys are rejected, and values cannot change after loading.

    Types are strict: `true` is not a number, `"8"` is a string, and `8.0` is not an integer. An integer is accepted as
    a float.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


def expand_path(value: Any) -> Any:
    """Expand `~` and environment variables in a path, or in all paths of a mapping.

    Args:
        value: a path, a mapping to paths, or `None`. Names that are not paths (such as hub IDs) and existing files
            whose names contain these characters are unchanged.

    Raises:
        ValueError: a variable is not set or empty, a user is unknown, or no file can have this name.
    """
    if isinstance(value, dict):
        return {name: expand_path(each) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if "\x00" in value or any(len(os.fsencode(name)) > MAX_NAME_LENGTH for name in value.split("/")):
        raise ValueError(
            f"{shorten(value)} is not a valid file name: it contains a null byte or exceeds {MAX_NAME_LENGTH} bytes"
        )
    if not ("$" in value or value.startswith("~")):
        return value
    empty = next((name for name in _VARIABLE_PATTERN.findall(value) if os.environ.get(name.strip("${}")) == ""), None)
    if empty is not None:
        raise ValueError(f"{value!r} uses the environment variable {empty}, which is empty: write the full path")
    path = os.path.expanduser(os.path.expandvars(value))
    unset = _VARIABLE_PATTERN.search(path)
    if (unset is None and not path.startswith("~")) or os.path.exists(path.rpartition(":")[0] or path):
        return path
    what = f"the user '{path.partition('/')[0]}'" if unset is None else f"the environment variable {unset.group()}"
    raise ValueError(f"{value!r} uses {what}, which is not defined on this machine: write the full path")


def path_option(default: Any, meaning: str, **limits: Any) -> Any:
    """Create a field like `option`, for a key whose value may be a path; `expand_path` is applied to the value."""
    field = option(default, meaning, **limits)
    field.metadata.append(AfterValidator(expand_path))
    return field


def option(default: Any, meaning: str, *, unit: str | None = None, **limits: Any) -> Any:
    """Create a field with a default, a description (shown by `roll config explain`) and an optional unit.

    `default=...` makes the field required; a `list` or `dict` instance is copied for every configuration.
    """
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    if isinstance(default, list | dict):
        return Field(
            default_factory=type(default)(default).copy,
            description=meaning,
            json_schema_extra=extra,
            **limits,
        )
    return Field(default, description=meaning, json_schema_extra=extra, **limits)
