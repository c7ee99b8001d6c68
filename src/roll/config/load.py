"""From a file or a dictionary, and overrides, to a validated configuration.

file ──► Document (plain data + line numbers) ──► overrides ──► pydantic ──► the pipeline's class
                                 every problem of every stage ──► one ConfigError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from roll.config.base import Section
from roll.config.document import Document, KeyPath, dotted, dump, read
from roll.config.history import CONFIG, as_override, read_origin
from roll.config.overrides import apply_overrides
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.problems import at, describe, message, show
from roll.config.renamed import rename_config
from roll.config.run import RunConfig
from roll.errors import ConfigError, RunDirectoryError
from roll.registry import did_you_mean

__all__ = [
    "ConfigSource",
    "Overrides",
    "as_override_list",
    "dump_config",
    "dump_yaml",
    "load_config",
    "load_run_config",
    "plain_tree",
]

ConfigSource: TypeAlias = "str | Path | Mapping[str, Any] | RunConfig"
Overrides: TypeAlias = "Sequence[str] | Mapping[str, Any]"


def load_config(source: ConfigSource, overrides: Overrides = ()) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: a YAML file, a dictionary of the same form, or a configuration to change.
        overrides: `"training.learning_rate=2e-5"` strings, values written as in YAML, or a dictionary from
            dotted keys to values. Positions in lists are numbers: `data.0.max_operand=20`.

    Raises:
        ConfigError: the file cannot be read, or is not a valid configuration; one line for each problem.
    """
    if isinstance(source, RunConfig) and not overrides:
        return source
    try:
        return _load(source, overrides)
    except RecursionError:
        name = f"'{source}'" if isinstance(source, str | Path) else "the configuration"
        raise ConfigError(f"{name} is nested too deeply.") from None


def _load(source: ConfigSource, overrides: Overrides) -> RunConfig:
    document = _document(source)
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'key=value', got the text {show(overrides)}: put it in a list.")
    if isinstance(overrides, Mapping):
        overrides = _plain(overrides)
    if document.name and "device" in document.tree and "data" not in document.tree:
        raise ConfigError(
            f"'{document.name}' describes a simulation, not a run: give it to `roll simulate` or `roll plan`."
        )
    model = _pipeline(document, overrides)
    document, lines = apply_overrides(document, overrides, model)
    try:
        config = model.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(message([*lines, *describe(error, document, model)])) from None
    if lines:
        raise ConfigError(message(lines))
    return config


def _document(source: ConfigSource) -> Document:
    if isinstance(source, str | Path):
        return read(source)
    if isinstance(source, Section):
        return Document(name="", tree=dump_config(source))
    if isinstance(source, Mapping):
        return Document(name="", tree=_plain(source))
    raise ConfigError(f"a configuration is a file or a dictionary, got {type(source).__name__}.")


def plain_tree(source: ConfigSource) -> dict[str, Any]:
    """Return a configuration as plain data, as YAML would load it, before it is validated.

    Raises:
        ConfigError: the file cannot be read, or the source is not a configuration.
    """
    return rename_config(_document(source).tree)


def _plain(value: Any, path: KeyPath = ()) -> Any:
    """Convert a Python value to plain data, as YAML would load it."""
    match value:
        case Section():
            return value.model_dump(mode="json")
        case Mapping():
            return {_key(key, path): _plain(entry, (*path, key)) for key, entry in value.items()}
        case list() | tuple():
            return [_plain(entry, (*path, index)) for index, entry in enumerate(value)]
        case Path():
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    kind = type(value).__name__
    raise ConfigError(f"'{dotted(path)}' is a Python {kind}: write a plain number, text, list or dictionary.")


def _key(key: Any, path: KeyPath) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(f"'{dotted(path) or 'the configuration'}' has the key {key!r}: keys are text.")


def _pipeline(document: Document, overrides: Overrides) -> type[RunConfig]:
    """Return the class that the key `pipeline` selects."""
    name, origin = _pipeline_name(document, overrides)
    if isinstance(name, str) and name in PIPELINES:
        return PIPELINES.get(name)
    hint = did_you_mean(str(name), list(PIPELINES))
    known = ", ".join([*PIPELINES, "path/to/file.py:Class"])
    raise ConfigError(f"'pipeline'{origin}: {show(name)} is not known.{hint} Known: {known}.")


def _pipeline_name(document: Document, overrides: Overrides) -> tuple[Any, str]:
    """Return the value of the key `pipeline`, and where it was written, as messages show it."""
    name, origin = document.tree.get("pipeline", DEFAULT_PIPELINE), at(document, ("pipeline",))
    for text in as_override_list(overrides):
        key, _, value = text.partition("=")
        if key.strip() == "pipeline":
            name, origin = value.strip().strip("\"'"), f" (override {show(text)})"
    return name, origin


def dump_config(config: Section) -> dict[str, Any]:
    """Return every key with its value as plain data, from which `load_config` builds the same configuration."""
    return config.model_dump(mode="json")


def dump_yaml(config: Section) -> str:
    """Return the resolved configuration as the text of a configuration file."""
    return dump(dump_config(config))


def as_override_list(overrides: Overrides) -> list[str]:
    """Convert overrides from a dictionary to `key=value` text."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [as_override(key, _plain(value)) for key, value in overrides.items()]


_KEPT_ON_RESUME = ("pipeline", "name", "output_dir", "model.path", "seed", "training.optimizer")


def _value(config: Section, key: str) -> Any:
    """Return the value of a dotted key, or `None`: not every pipeline has every section."""
    return reduce(lambda section, part: getattr(section, part, None), key.split("."), config)


def load_run_config(run: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Load the configuration of a run directory, with overrides for its continuation.

    Raises:
        RunDirectoryError: the directory is not a run.
        ConfigError: an override is wrong, or changes a key that must stay the same in a run.
    """
    path = Path(run) / CONFIG
    if not path.is_file():
        raise RunDirectoryError(f"'{run}' is not a run: it has no config.yaml.")
    before = _as_written(path)
    edited = "" if overrides else ", or restore it in config.yaml"

    def check_kept(key: str, new: Any) -> None:
        if (old := _value(before, key)) != new:
            raise ConfigError(
                f"'{key}' is {show(old)} in this run and cannot change to {show(new)} when it is resumed: start a new "
                f"run{edited}."
            )

    if not isinstance(overrides, str):
        # checked first: with another pipeline, every other key of the run would be reported as a problem, too
        check_kept("pipeline", _pipeline_name(_document(path), overrides)[0])
    after = load_config(path, overrides)
    for key in _KEPT_ON_RESUME:
        check_kept(key, _value(after, key))
    return after


def _as_written(path: Path) -> RunConfig:
    """Load the configuration as ROLL last wrote it, without later edits by the user."""
    origin = read_origin(path.parent)
    try:
        return load_config(path if origin is None else origin.config)
    except ConfigError:  # for example of an older version: the user may have corrected config.yaml for this version
        return load_config(path)
