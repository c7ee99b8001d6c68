"""Reads configuration files as plain data, and records the file and line of each key.

The format is YAML 1.2's core schema, read with PyYAML: `1e-5` is a number, and `yes`, `on`, `010` and `2026-01-01` do
not have their YAML 1.1 meaning. Duplicate keys, keys that are not strings, tags, recursive aliases, and strings that
cannot be written to a file are rejected, with the line in the message. ruamel.yaml is three times slower, and accepts
tags and keys that are not strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from roll.errors import ConfigError

__all__ = ["Document", "KeyPath", "check_text", "dump", "format_path", "parse", "read"]

KeyPath: TypeAlias = tuple[str | int, ...]

_YAML_TAG_PREFIX = "tag:yaml.org,2002:"
_MAX_NODES = 20_000
"""Maximum number of values, so that a few lines of nested aliases cannot fill the memory."""

_MAX_FILE_BYTES = 16 * 2**20
"""Maximum bytes of a file."""
_TOO_MANY_VALUES_MESSAGE = f"more than {_MAX_NODES} values: this is not a configuration"
_INT_PATTERN = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT_PATTERN = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", _INT_PATTERN.pattern, "-+0123456789"),
    ("float", _FLOAT_PATTERN.pattern, "-+.0123456789"),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """Loader that only composes YAML nodes; `_Builder` then converts them to plain data."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (PyYAML's own protocol)
    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.num_nodes += 1
        if self.num_nodes > _MAX_NODES:
            raise yaml.YAMLError(_TOO_MANY_VALUES_MESSAGE)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes all strings that YAML 1.1 or 1.2 would not parse as strings."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Represent a string, quoted if it contains a line break other than `\\n`, such as U+2028.

    PyYAML would write these characters unescaped and read them back as spaces.
    """
    style = '"' if any(end in text for end in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(_YAML_TAG_PREFIX + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)

for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _chars = [*_first, ""] if _name == "null" else list(_first)
        _class.add_implicit_resolver(_YAML_TAG_PREFIX + _name, re.compile(rf"^(?:{_pattern})$"), _chars)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A configuration as written by the user."""

    name: str
    """Path of the file as given by the user; empty for a dictionary from Python."""
    tree: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)
    """File and line, or override, of each key: `quickstart.yaml:9`, or `override 'training.num_steps=4'`."""

    def find_origin(self, path: KeyPath) -> str:
        """Return the file and line, or the override, in which the user wrote a key.

        For a key that the user did not write, return the origin of the nearest enclosing section that the user wrote,
        or the document's name.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.name


def format_path(path: KeyPath) -> str:
    """Format `("data", 0, "source")` as `data.0.source`, always on one line."""
    parts = (str(part) for part in path)
    return ".".join((part if part.isprintable() else repr(part)[1:-1])[:80] for part in parts)


def check_text(text: str, location: str) -> str:
    """Check that a text can be written to a file, and return it.

    Raises:
        ConfigError: the text has a NUL or a lone surrogate, which cannot be written to a file.
    """
    if "\0" in text or (not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)):
        raise ConfigError(f"{location}: the text {text[:40]!r} contains a character that cannot be written to a file.")
    return text


def read(path: str | Path) -> Document:
    """Read a configuration file.

    Raises:
        ConfigError: the file is missing, unreadable, larger than 16 MiB, not text, not YAML, or not a mapping.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        from roll.registry import format_search_directory

        where = format_search_directory(path)
        raise ConfigError(
            f"configuration file '{name}' does not exist{where}.{_suggest_similar_file(Path(path))}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        inside = Path(path) / "config.yaml"
        is_run = isinstance(error, IsADirectoryError) and inside.is_file()
        hint = f" The configuration of this run is '{inside}'." if is_run else ""
        raise ConfigError(f"configuration file '{name}' cannot be read: {reason}.{hint}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"configuration file '{name}' is larger than {_MAX_FILE_BYTES // 2**20} MiB, the maximum size."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: this is not a text file (invalid UTF-8); expected YAML.") from None
    tree, origins = parse(text, name)
    if tree is None:
        raise ConfigError(f"configuration file '{name}' is empty.")
    if not isinstance(tree, dict):
        raise ConfigError(f"{name}:1: expected keys and values such as 'name: my-run', found {_describe_type(tree)}.")
    return Document(name=name, tree=tree, origins=origins)


def _suggest_similar_file(path: Path) -> str:
    from roll.registry import did_you_mean

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except OSError:
        return f" The directory '{path.parent}' does not exist."
    return did_you_mean(path.name, names)


def _describe_type(value: object) -> str:
    return "a list" if isinstance(value, list) else f"only the value {str(value)[:40]!r}"


def parse(text: str, name: str) -> tuple[Any, dict[KeyPath, str]]:
    """Parse one YAML document.

    Returns:
        Plain data (dict, list, str, int, float, bool, None), and `name:line` of each key in it.

    Raises:
        ConfigError: the text is not one YAML document of plain data; the message contains the line number.
    """
    loader = None
    try:
        loader = _Loader(text)  # reads ahead, so it may already raise for control characters
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{where}: not valid YAML: {problem}.{_suggest_yaml_fix(error)}") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{name}: not valid YAML: {reason}.") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply.") from None
    finally:
        if loader is not None:
            loader.dispose()
    builder = _Builder(name)
    return (None if node is None else builder.build(node, ())), builder.origins


def _suggest_yaml_fix(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "\\t" in problem:
        return " Indent with spaces, not tabs."
    if "mapping values are not allowed" in problem:
        return " Check the indentation, and quote text that contains ': '."
    if "expected a single document" in (error.context or ""):
        return " A configuration is one document: remove the '---' line."
    return ""


class _Builder:
    """Converts YAML nodes to plain data."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.origins: dict[KeyPath, str] = {}
        self._open: set[int] = set()
        self._count = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > _MAX_NODES:
            raise ConfigError(f"{self.name}: {_TOO_MANY_VALUES_MESSAGE}.")
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node)
        if id(node) in self._open:
            raise ConfigError(f"{self._locate(node)}: an alias (*) must not refer to a part that contains it.")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self._expect_tag(node, "seq")
                items = []
                for index, item in enumerate(node.value):
                    self.origins.setdefault((*path, index), self._locate(item))
                    items.append(self.build(item, (*path, index)))
                return items
            assert isinstance(node, yaml.MappingNode), "YAML has no fourth type of node"
            self._expect_tag(node, "map")
            return self._build_mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, str] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _YAML_TAG_PREFIX + "merge":
                merged = {**self._build_merged(value_node, path), **merged}
                continue
            key = self._build_key(key_node)
            if key in lines:
                raise ConfigError(
                    f"{self._locate(key_node)}: duplicate key '{format_path((*path, key))}', first defined at "
                    f"{lines[key]}. Remove one."
                )
            lines[key] = self._locate(key_node)
            self.origins[(*path, key)] = lines[key]
            result[key] = self.build(value_node, (*path, key))
        return {**merged, **result}

    def _build_merged(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for part in reversed(parts):
            value = self.build(part, path)
            if not isinstance(value, dict):
                raise ConfigError(f"{self._locate(node)}: '<<' requires a mapping (an alias such as *defaults).")
            merged |= value
        return merged

    def _build_key(self, node: yaml.Node) -> str:
        key = self.build(node, ()) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(f"{self._locate(node)}: keys must be strings, got {str(shown)[:40]!r}: put it in quotes.")
        return key

    def _build_scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_YAML_TAG_PREFIX), node.value
        match kind:
            case "str" | "merge":
                return check_text(text, self._locate(node))
            case "null" if text in {"", "~", "null", "Null", "NULL"}:
                return None
            case "bool" if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            case "int" if _INT_PATTERN.fullmatch(text):
                return self._parse_int(text, node)
            case "float" if _FLOAT_PATTERN.fullmatch(text):
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        raise ConfigError(f"{self._locate(node)}: {text[:40]!r} with the tag '{kind[:40]}' is not a plain value.")

    def _parse_int(self, text: str, node: yaml.Node) -> int:
        try:
            number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            str(number)
        except ValueError:  # Python's limit on digits
            raise ConfigError(f"{self._locate(node)}: the number {text[:20]}… is too long.") from None
        return number

    def _expect_tag(self, node: yaml.Node, kind: str) -> None:
        if node.tag != _YAML_TAG_PREFIX + kind:
            tag = node.tag.removeprefix(_YAML_TAG_PREFIX)
            raise ConfigError(f"{self._locate(node)}: the tag '{tag[:60]}' is not supported: write plain values.")

    def _locate(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def dump(data: Mapping[str, Any], *, flow: bool = False) -> str:
    """Dump plain data as YAML that `parse` reads back unchanged, with keys in their given order."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=110
    )
