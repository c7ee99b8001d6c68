"""What a file says of a run of verl: a YAML tree, or the overrides of a command line, as in its example scripts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.document import parse
from roll.errors import ConfigError

__all__ = ["read_keys"]

_OVERRIDE = re.compile(r"^\+{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_LONGEST = 100_000
"""Of a value: variables of variables would otherwise fill the memory from a few lines."""
_USE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")


def read_keys(path: str | Path) -> dict[str, Any]:
    """Dotted keys and their values.

    Raises:
        ConfigError: the file cannot be read, or has neither a tree nor overrides.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}.") from None
    if Path(path).suffix in (".yaml", ".yml", ".json"):
        tree, _ = parse(text, str(path))
        if not isinstance(tree, Mapping):
            raise ConfigError(f"{path}: expected sections such as `actor_rollout_ref:`.")
        keys = {key: value for key, value in _flat(tree) if not key.startswith(("defaults", "hydra"))}
    else:
        keys = dict(_overrides(text, str(path)))
    keys = {key: value for key, value in keys.items() if not _is_reference(key, value)}
    if not keys:
        raise ConfigError(f"{path}: no override such as `data.train_batch_size=1024` in it.")
    return keys


def _is_reference(key: str, value: Any) -> bool:
    """Whether Hydra gives the value from another key, or makes an object of it."""
    return key.split(".")[-1] == "_target_" or value == "???" or (isinstance(value, str) and "${" in value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _overrides(text: str, name: str) -> Iterator[tuple[str, Any]]:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{name}: not a shell command: {error}.") from None
    variables: dict[str, str] = {}
    for word in words:
        found = _OVERRIDE.match(word)
        if found is None:
            if assigned := _VARIABLE.match(word):
                variables[assigned[1]] = _substituted(assigned[2], variables, name)
            continue
        value = _substituted(found[2], variables, name)
        try:
            yield found[1], parse(value, name)[0]
        except ConfigError:
            yield found[1], value


def _substituted(text: str, variables: Mapping[str, str], name: str) -> str:
    """`$NAME` of variables that the script sets; others stay as they are written."""
    left = _LONGEST

    def value(use: re.Match[str]) -> str:
        default = use[2] if use[2] is not None else use[0]
        found = variables.get(use[1] or use[3], default)
        nonlocal left
        left -= len(found)
        if left < 0:
            raise ConfigError(f"{name}: a value of more than {_LONGEST} characters: this is not a script of verl.")
        return found

    return _USE.sub(value, text)
