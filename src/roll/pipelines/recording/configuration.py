"""The configuration of a replay, from a recorded run and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from roll.config.algorithm import AlgorithmConfig
from roll.config.history import CONFIG_FILE, find_differences, find_first_recorded_config, get_value
from roll.config.load import Overrides, format_overrides, load_config
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.problems import format_value
from roll.config.replay import ReplayConfig
from roll.config.run import RunConfig
from roll.errors import ConfigError, RunDirectoryError

__all__ = ["check_replayable", "list_changed_keys", "load_replay_config"]

_FIXED_KEYS = {
    "train": ("data", "rollout", "inference", "evaluation", "sandbox", "judge", "seed"),
    "rollout": ("data", "model.path", "seed"),
}
"""Sections and keys that the recording determines in a replay without engines (`train`) or without a trainer
(`rollout`)."""


def load_replay_config(
    run: str | Path,
    overrides: Overrides = (),
    *,
    only: Literal["train", "rollout"] = "train",
    checkpoint: str | None = None,
) -> RunConfig:
    """Load the configuration of a replay: the first recorded session's configuration, with a new name and overrides.

    If the overrides select a different algorithm, the preset of the recorded run is dropped, and only settings that the
    user changed are kept.

    Raises:
        RunDirectoryError: The run does not exist.
        ConfigError: An override is invalid, or the run's pipeline does not support replay.
    """
    path = Path(run) if Path(run).name not in ("", "..") else Path(run).resolve()
    if not (path / CONFIG_FILE).is_file():
        raise RunDirectoryError(f"'{run}' is not a run: it has no config.yaml.")
    changes = format_overrides(overrides)
    tree = find_first_recorded_config(path)
    pipeline = str(tree.get("pipeline", DEFAULT_PIPELINE))
    if "replay" not in PIPELINES.get(pipeline).model_fields:
        raise ConfigError(f"'{run}' ran the pipeline {pipeline}, which does not support replays.")
    given = {change.partition("=")[0].strip() for change in changes}
    algorithm, tracking = tree.get("algorithm", {}), tree.get("tracking", {})
    if "algorithm.type" in given and isinstance(algorithm, dict):  # a value that is not a section is refused below
        tree["algorithm"] = _select_user_keys(algorithm)
    tree["replay"] = {"run": str(run), "only": only, "checkpoint": checkpoint}
    tree["name"] = f"{path.name}-{'replay' if only == 'train' else 'rollouts'}"
    tree["output_dir"] = str(path.parent)
    if isinstance(tracking, dict):
        tree["tracking"] = {**tracking, "record_rollouts": False}
    return load_config(tree, changes)


def _select_user_keys(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm settings that differ from the preset."""
    try:
        usual = AlgorithmConfig(type=algorithm.get("type", "grpo")).model_dump(mode="json")
    except ValidationError:  # the preset does not exist
        return dict(algorithm)
    kept = {"type": algorithm.get("type", "grpo")}
    for key, value in algorithm.items():
        before = usual.get(key)
        if value == before:
            continue
        same_kind = isinstance(value, dict) and isinstance(before, dict) and value.get("type") == before.get("type")
        if same_kind:
            kept[key] = {k: v for k, v in value.items() if k == "type" or v != before.get(k)}
        else:
            kept[key] = value
    return kept


def check_replayable(config: RunConfig, recorded: Mapping[str, Any]) -> None:
    """Check that the replay does not change settings that the recording determines.

    Args:
        config: Configuration of the replay.
        recorded: Resolved configuration of the recorded session.

    Raises:
        ConfigError: A recorded setting was changed; the message lists all changed settings with both values.
    """
    replay = config.get_section("replay", ReplayConfig)
    only = replay.only
    recorded, now = _add_new_keys(recorded, config), config.model_dump(mode="json")
    problems = [
        f"  {key}: recorded {format_value(before)}, now {format_value(after)}"
        for section in _FIXED_KEYS[only]
        for key, before, after in find_differences(get_value(recorded, section), get_value(now, section), section)
    ]
    if problems:
        without = "the engines" if only == "train" else "the trainer"
        raise ConfigError(
            f"a replay without {without} uses the values recorded in '{replay.run}', so these keys cannot "
            "change:\n" + "\n".join(problems)
        )


def list_changed_keys(recorded: Mapping[str, Any], config: RunConfig, sections: Sequence[str]) -> list[str]:
    """Return the dotted keys in the sections whose values differ from the recorded values."""
    recorded, now = _add_new_keys(recorded, config), config.model_dump(mode="json")
    return [key for s in sections for key, _, _ in find_differences(get_value(recorded, s), get_value(now, s), s)]


def _add_new_keys(recorded: Mapping[str, Any], config: RunConfig) -> Mapping[str, Any]:
    """Return the recorded configuration with the defaults of keys that an earlier version of ROLL did not have."""
    try:
        return type(config).model_validate(dict(recorded)).model_dump(mode="json")
    except ValidationError:  # a value that is not valid any more is reported as a difference
        return recorded
