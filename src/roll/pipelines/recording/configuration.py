"""The configuration of a replay, from a recorded run and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from roll.config.algorithm import AlgorithmConfig
from roll.config.history import CONFIG, differences, first_recorded, value_at
from roll.config.load import Overrides, as_override_list, load_config
from roll.config.pipelines import DEFAULT_PIPELINE, PIPELINES
from roll.config.problems import show
from roll.config.replay import ReplayConfig
from roll.config.run import RunConfig
from roll.errors import ConfigError, RunDirectoryError

__all__ = ["changed_keys", "check_replayable", "load_replay_config"]

_FIXED = {
    "train": ("data", "rollout", "inference", "evaluation", "sandbox", "judge", "seed"),
    "rollout": ("data", "model.path", "seed"),
}
"""Sections and keys that a replay without engines (`train`) or trainer (`rollout`) takes from the recording."""


def load_replay_config(
    run: str | Path,
    overrides: Overrides = (),
    *,
    only: Literal["train", "rollout"] = "train",
    checkpoint: str | None = None,
) -> RunConfig:
    """Load the configuration of a replay: that of the first recorded session, with another name and the overrides.

    If the overrides choose another algorithm, settings of the recorded run's preset are dropped and the user's own are
    kept.

    Raises:
        RunDirectoryError: The run does not exist.
        ConfigError: An override is wrong, or the run's pipeline does not support replay.
    """
    path = Path(run) if Path(run).name not in ("", "..") else Path(run).resolve()
    if not (path / CONFIG).is_file():
        raise RunDirectoryError(f"'{run}' is not a run: it has no config.yaml.")
    changes = as_override_list(overrides)
    tree = first_recorded(path)
    pipeline = str(tree.get("pipeline", DEFAULT_PIPELINE))
    if "replay" not in PIPELINES.get(pipeline).model_fields:
        raise ConfigError(f"'{run}' ran the pipeline {pipeline}, which has no replay.")
    given = {change.partition("=")[0].strip() for change in changes}
    algorithm, tracking = tree.get("algorithm", {}), tree.get("tracking", {})
    if "algorithm.type" in given and isinstance(algorithm, dict):  # a value that is not a section is refused below
        tree["algorithm"] = _own_keys(algorithm)
    tree["replay"] = {"run": str(run), "only": only, "checkpoint": checkpoint}
    tree["name"] = f"{path.name}-{'replay' if only == 'train' else 'rollouts'}"
    tree["output_dir"] = str(path.parent)
    if isinstance(tracking, dict):
        tree["tracking"] = {**tracking, "record_rollouts": False}
    return load_config(tree, changes)


def _own_keys(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the preset: the keys that the user changed."""
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
    """Refuse changes of settings that the recording determines.

    Args:
        config: Configuration of the replay.
        recorded: Resolved configuration of the recorded session.

    Raises:
        ConfigError: A fixed setting was changed; the message lists all with both values.
    """
    replay = config.section("replay", ReplayConfig)
    only = replay.only
    now = config.model_dump(mode="json")
    problems = [
        f"  {key}: recorded {show(before)}, now {show(after)}"
        for section in _FIXED[only]
        for key, before, after in differences(value_at(recorded, section), value_at(now, section), section)
    ]
    if problems:
        without = "the engines" if only == "train" else "the trainer"
        raise ConfigError(
            f"a replay without {without} takes these from the recording of '{replay.run}', so that they cannot "
            "change:\n" + "\n".join(problems)
        )


def changed_keys(recorded: Mapping[str, Any], config: RunConfig, sections: Sequence[str]) -> list[str]:
    """Return the dotted keys below the sections whose values differ from the recorded ones."""
    now = config.model_dump(mode="json")
    return [key for s in sections for key, _, _ in differences(value_at(recorded, s), value_at(now, s), s)]
