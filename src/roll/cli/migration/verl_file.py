"""Reads a file of a verl run: a YAML tree, or the overrides of a command line, as in verl's example scripts."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.document import parse
from roll.errors import ConfigError
from roll.registry import format_search_directory

__all__ = ["find_shell_parts", "read_keys"]

_OVERRIDE_PATTERN = re.compile(r"^\+{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(.*)$", re.DOTALL)
_VARIABLE_PATTERN = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_MAX_LENGTH = 100_000
"""Maximum length of a value: nested variables could otherwise fill the memory from a few lines."""
_MAX_FILE_BYTES = 2**20
"""Maximum bytes of a file."""
_MAX_SUM_LENGTH = 1000
_VARIABLE_USE_PATTERN = re.compile(r"\$\{(\w+)(?::-([^}]{0,1000}))?\}|\$(\w+)")
_ARITHMETIC_EXPANSION_PATTERN = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_HOME = "HOME"
"""A variable that every shell defines; it is expanded only when a path is opened."""
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_keys(path: str | Path) -> dict[str, Any]:
    """Return the values in a file of verl by dotted key, without values that only Hydra can resolve.

    Raises:
        ConfigError: the file cannot be read, is larger than 1 MiB, or has neither a tree nor overrides.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        text = content[:_MAX_FILE_BYTES].decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file '{path}' does not exist{format_search_directory(path)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"'{path}' cannot be read: {reason}.") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"'{path}' exceeds {_MAX_FILE_BYTES / 2**20:g} MiB, the maximum size of a verl configuration."
        )
    if Path(path).suffix in (".yaml", ".yml", ".json"):
        tree, _ = parse(text, str(path))
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path}: the file has no sections such as `actor_rollout_ref:`.")
        keys = {key: value for key, value in _flatten(tree) if not key.startswith(("defaults", "hydra"))}
    else:
        keys = dict(_read_overrides(text, str(path)))
    keys = {key: value for key, value in keys.items() if not _is_reference(key, value)}
    if not keys:
        raise ConfigError(f"{path}: no keys of verl were found, such as `data.train_batch_size=1024`.")
    return keys


def find_shell_parts(value: Any) -> list[str]:
    """Return the parts of a value that only a shell could resolve: commands, and variables that the script does not
    set.
    """
    names = {f"${use[1] or use[3]}" for use in _VARIABLE_USE_PATTERN.finditer(str(value))} - {f"${_HOME}"}
    return sorted(names | ({"$(…)"} if "$(" in str(value) else set()))


def _is_reference(key: str, value: Any) -> bool:
    """Return whether only Hydra can resolve the value: a reference (`${data.seed}`, `${oc.env:…}`), a missing value
    (`???`), or the class of an object to build (`_target_`).
    """
    is_text = isinstance(value, str)
    return (
        key.split(".")[-1] == "_target_"
        or value == "???"
        or (is_text and "${" in value and not _VARIABLE_USE_PATTERN.search(value))
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_overrides(text: str, name: str) -> Iterator[tuple[str, Any]]:
    try:
        # Without spaces, shlex keeps `$((a + b))` as one word.
        joined = _ARITHMETIC_EXPANSION_PATTERN.sub(
            lambda found: re.sub(r"\s+", "", found[0]), text.replace("\\\n", " ")
        )
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError(f"{name}: the file is not a valid shell script: {error}.") from None
    variables: dict[str, str] = {}
    for word in words:
        found = _OVERRIDE_PATTERN.match(word)
        if found is None:
            if assigned := _VARIABLE_PATTERN.match(word):
                variables[assigned[1]] = _substitute_variables(assigned[2], variables, name)
            continue
        value = _substitute_variables(found[2], variables, name)
        try:
            yield found[1], parse(value, name)[0]
        except ConfigError:
            yield found[1], value


def _substitute_variables(text: str, variables: Mapping[str, str], name: str) -> str:
    """Replace `$NAME` by the value in `variables`, and `$((…))` by its result; other text is unchanged."""
    left = _MAX_LENGTH

    def replace_variable(match: re.Match[str]) -> str:
        default = match[2] if match[2] is not None else match[0]
        found = variables.get(match[1] or match[3], default)
        nonlocal left
        left -= len(found)
        if left < 0:
            raise ConfigError(f"{name}: a value exceeds {_MAX_LENGTH} characters, the maximum for a verl script.")
        return found

    def replace_sum(match: re.Match[str]) -> str:
        inner = re.sub(
            r"\b[A-Za-z_]\w*\b",
            lambda word: f"({variables.get(word[0], word[0])})",
            _VARIABLE_USE_PATTERN.sub(replace_variable, match[1]),
        )
        try:
            return (
                str(_evaluate_arithmetic(ast.parse(inner, mode="eval").body))
                if len(inner) <= _MAX_SUM_LENGTH
                else match[0]
            )
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # the last two: many signs
            return match[0]

    return _VARIABLE_USE_PATTERN.sub(replace_variable, _ARITHMETIC_EXPANSION_PATTERN.sub(replace_sum, text))


def _evaluate_arithmetic(node: ast.expr) -> int:
    """Return the value of integer arithmetic, as a shell computes it.

    Raises:
        ValueError: the expression is not integer arithmetic.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_evaluate_arithmetic(node.left), _evaluate_arithmetic(node.right))
        if abs(found) < 2**63:
            return found
    raise ValueError("the expression is not integer arithmetic")
