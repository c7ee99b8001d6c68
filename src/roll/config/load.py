"""Loads a file or a dictionary, with overrides, as a validated configuration.

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
from roll.config.document import Document, KeyPath, dump, format_path, read
from roll.config.former_names import rename_config
from roll.config.history import CONFIG_FILE, format_override, read_origin
from roll.config.overrides import apply_overrides
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.problems import describe_errors, format_location, format_problems, format_value
from roll.config.run import RunConfig
from roll.errors import ConfigError, RunDirectoryError
from roll.registry import did_you_mean

__all__ = [
    "ConfigSource",
    "Overrides",
    "dump_config",
    "dump_yaml",
    "format_overrides",
    "load_config",
    "load_plain_tree",
    "load_run_config",
]

ConfigSource: TypeAlias = "str | Path | Mapping[str, Any] | RunConfig"
Overrides: TypeAlias = "Sequence[str] | Mapping[str, Any]"


def load_config(source: ConfigSource, overrides: Overrides = ()) -> RunConfig:
    """Load and validate a configuration.

    Args:
        source: a YAML file, a dictionary of the same form, or a configuration to change.
        overrides: `"training.learning_rate=2e-5"` strings with YAML values, or a dictionary from dotted keys to values.
            Positions in lists are numbers: `data.0.max_operand=20`.

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
    document = _build_document(source)
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides must be a list of 'key=value' strings, got the string {format_value(overrides)}: put it in a "
            "list."
        )
    if isinstance(overrides, Mapping):
        overrides = _to_plain(overrides)
    if document.name and "device" in document.tree and "data" not in document.tree:
        raise ConfigError(
            f"'{document.name}' describes a simulation, not a run: use it with `roll simulate` or `roll plan`."
        )
    model = _select_pipeline(document, overrides)
    document, lines = apply_overrides(document, overrides, model)
    try:
        config = model.model_validate(document.tree)
    except ValidationError as error:
        raise ConfigError(format_problems([*lines, *describe_errors(error, document, model)])) from None
    if lines:
        raise ConfigError(format_problems(lines))
    return config


def _build_document(source: ConfigSource) -> Document:
    if isinstance(source, str | Path):
        return read(source)
    if isinstance(source, Section):
        return Document(name="", tree=dump_config(source))
    if isinstance(source, Mapping):
        return Document(name="", tree=_to_plain(source))
    raise ConfigError(f"a configuration must be a file or a dictionary, got {type(source).__name__}.")


def load_plain_tree(source: ConfigSource) -> dict[str, Any]:
    """Load a configuration as plain data, as YAML would load it, without validation.

    Raises:
        ConfigError: the file cannot be read, or the source is not a configuration.
    """
    return rename_config(_build_document(source).tree)


def _to_plain(value: Any, path: KeyPath = ()) -> Any:
    """Convert a Python value to plain data, as YAML would load it."""
    match value:
        case Section():
            return value.model_dump(mode="json")
        case Mapping():
            return {_check_key(key, path): _to_plain(entry, (*path, key)) for key, entry in value.items()}
        case list() | tuple():
            return [_to_plain(entry, (*path, index)) for index, entry in enumerate(value)]
        case Path():
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    kind = type(value).__name__
    raise ConfigError(f"'{format_path(path)}' must be a number, string, list or dictionary, got a Python {kind}.")


def _check_key(key: Any, path: KeyPath) -> str:
    if isinstance(key, str):
        return key
    raise ConfigError(f"'{format_path(path) or 'the configuration'}' has the key {key!r}, but keys must be strings.")


def _select_pipeline(document: Document, overrides: Overrides) -> type[RunConfig]:
    """Return the configuration class for the value of the key `pipeline`."""
    name, origin = _find_pipeline_name(document, overrides)
    if isinstance(name, str) and name in PIPELINES:
        return PIPELINES.get(name)
    hint = did_you_mean(str(name), list(PIPELINES))
    known = ", ".join([*PIPELINES, "path/to/file.py:Class"])
    raise ConfigError(f"'pipeline'{origin} must be one of {known}, got {format_value(name)}.{hint}")


def _find_pipeline_name(document: Document, overrides: Overrides) -> tuple[Any, str]:
    """Return the value of the key `pipeline`, and the location where it was written, for messages."""
    name, origin = document.tree.get("pipeline", DEFAULT_PIPELINE), format_location(document, ("pipeline",))
    for text in format_overrides(overrides):
        key, _, value = text.partition("=")
        if key.strip() == "pipeline":
            name, origin = value.strip().strip("\"'"), f" (override {format_value(text)})"
    return name, origin


def dump_config(config: Section) -> dict[str, Any]:
    """Dump a configuration as plain data with every key, from which `load_config` builds the same configuration."""
    return config.model_dump(mode="json")


def dump_yaml(config: Section) -> str:
    """Dump a resolved configuration as the text of a configuration file."""
    return dump(dump_config(config))


def format_overrides(overrides: Overrides) -> list[str]:
    """Convert overrides from a dictionary to `key=value` strings."""
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [format_override(key, _to_plain(value)) for key, value in overrides.items()]


_KEYS_FIXED_ON_RESUME = ("pipeline", "name", "output_dir", "model.path", "seed", "training.optimizer")


def _get_value(config: Section, key: str) -> Any:
    """Return the value of a dotted key; `None` if the pipeline does not have the section."""
    return reduce(lambda section, part: getattr(section, part, None), key.split("."), config)


def load_run_config(run: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Load the configuration of a run directory, with overrides for its continuation.

    Raises:
        RunDirectoryError: the directory is not a run.
        ConfigError: an override is invalid, or changes a key that must stay the same in a run.
    """
    path = Path(run) / CONFIG_FILE
    if not path.is_file():
        raise RunDirectoryError(f"'{run}' is not a run: it has no config.yaml.")
    before = _load_recorded_config(path)
    edited = "" if overrides else ", or restore it in config.yaml"

    def check_unchanged(key: str, new: Any) -> None:
        if (old := _get_value(before, key)) != new:
            raise ConfigError(
                f"'{key}' is {format_value(old)} in this run and cannot change to {format_value(new)} when it is "
                f"resumed: start a new run{edited}."
            )

    if not isinstance(overrides, str):
        # checked first: with another pipeline, every other key of the run would be reported as a problem, too
        check_unchanged("pipeline", _find_pipeline_name(_build_document(path), overrides)[0])
    after = load_config(path, overrides)
    for key in _KEYS_FIXED_ON_RESUME:
        check_unchanged(key, _get_value(after, key))
    return after


def _load_recorded_config(path: Path) -> RunConfig:
    """Load the configuration that ROLL last wrote, without later edits by the user."""
    origin = read_origin(path.parent)
    try:
        return load_config(path if origin is None else origin.config)
    except ConfigError:  # for example of an older version: the user may have corrected config.yaml for this version
        return load_config(path)
