"""Checks of a replay: everything that the recording determines is compared before anything slow starts."""

from __future__ import annotations

import logging
from pathlib import Path

from roll.config.algorithm import AlgorithmConfig
from roll.config.load import load_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import CheckpointError, ConfigError, DataError, ModelError
from roll.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from roll.pipelines.checkpoint_files import SavedRun, find_checkpoint, read_checkpoint
from roll.pipelines.learning.state import LearningState
from roll.pipelines.preparation import Prepared
from roll.pipelines.recording.configuration import changed_keys, check_replayable
from roll.pipelines.recording.files import Recording
from roll.pipelines.recording.records import Session
from roll.pipelines.reinforcement.sampling import GREEDY

__all__ = ["check_prepared", "check_steps", "check_training", "open_recording", "start_of"]

logger = logging.getLogger(__name__)

_MATTERS = ("algorithm", "training", "model", "rollout", "data", "seed")


def open_recording(config: RLVRConfig) -> Recording:
    """Open the recording that is replayed.

    Raises:
        DataError: The recording does not exist, or is damaged.
        ConfigError: The configuration changes a recorded setting.
    """
    assert config.replay is not None, "this is a replay"
    recording = Recording.open(Path(config.replay.run))
    sessions = recording.used_sessions()
    check_replayable(config, sessions[0].config)
    for session in sessions[1:]:
        first = load_config(sessions[0].config)
        changed = changed_keys(session.config, first, _MATTERS)
        if changed:
            logger.warning(
                "The recorded run went on after step %d with other values of %s: the replay keeps one for all steps.",
                session.step,
                ", ".join(changed),
            )
    return recording


def check_steps(recording: Recording, first: int, last: int) -> None:
    """Check that steps `first` to `last` are recorded and that their files have the recorded sizes.

    Raises:
        ConfigError: A step is not recorded.
        DataError: A file is missing or cut off.
    """
    if last > recording.last:
        raise ConfigError(
            f"training.num_steps is {last}, but the recording '{recording.directory}' ends with step {recording.last}: "
            f"set training.num_steps={recording.last}, which is then also where a learning-rate schedule ends."
        )
    if first < recording.first:
        raise ConfigError(
            f"the recording '{recording.directory}' begins with step {recording.first}: start from the checkpoint of "
            f"step {recording.first - 1} with --checkpoint (replay.checkpoint), where the run still has it."
        )
    recording.check(range(first, last + 1))


def check_prepared(recorded: Session, prepared: Prepared) -> None:
    """Compare model, tokenizer and data with the recorded ones.

    Raises:
        ModelError: The model or the tokenizer differs.
        DataError: The prompts differ.
    """
    path = prepared.model_path
    if model_fingerprint(path) != recorded.model:
        raise ModelError(
            f"the model in '{path}' is not the one that the recorded run began with ('{_model_name(recorded)}'): its "
            "config.json or its weights differ. Replay with that model."
        )
    if tokenizer_fingerprint(prepared.tokenizer) != recorded.tokenizer:
        raise ModelError(
            f"the tokenizer in '{path}' is not the recorded run's: vocabulary, special tokens or chat template differ, "
            "so that recorded tokens would mean something else. Replay with that tokenizer."
        )
    try:
        prepared.data.train.restore(dict(recorded.stream))
    except CheckpointError as error:
        what = str(error).removeprefix("the data changed since the checkpoint: ").partition(". Resume")[0]
        raise DataError(
            f"the data are not those of the recorded run: {what}. Replay with the data as they were."
        ) from None


def _model_name(recorded: Session) -> str:
    model = recorded.config.get("model")
    return str(model.get("path")) if isinstance(model, dict) else str(model)


def check_training(config: RLVRConfig, recording: Recording, recorded: Session) -> None:
    """Check that the recording has the algorithm's inputs, and warn if off-policy answers are not corrected.

    Raises:
        ConfigError: The algorithm needs answers that were not recorded.
    """
    algorithm = config.algorithm
    first = recording.read(recording.first)
    if algorithm.advantage.mean == "greedy" and GREEDY not in first.companions:
        raise ConfigError(
            "algorithm.advantage.mean greedy compares with greedy answers, which the recorded run did not make: choose "
            "another mean."
        )
    before = load_config(recorded.config).section("algorithm", AlgorithmConfig)
    shown = any(entry.has_demonstrations for entry in config.data)
    if shown and algorithm.imitation.weight > 0 and before.imitation.weight == 0:
        raise ConfigError(
            "algorithm.imitation.weight is above 0, but the recorded run left demonstrations out: set it to 0."
        )
    changed = changed_keys(recorded.config, config, ("algorithm", "training", "model"))
    correction = algorithm.correction
    corrected = correction.upper is not None or correction.mask_low is not None or correction.mask_high is not None
    if changed and not corrected and algorithm.ratio.against == "old" and algorithm.loss is None:
        logger.warning(
            "%s differ from the recorded run, so the policy drifts from the one that answered, and nothing corrects "
            "for it: set algorithm.ratio.against=rollout, or algorithm.correction.upper=2.",
            ", ".join(changed[:3]) + (" and others" if len(changed) > 3 else ""),
        )


def start_of(config: RLVRConfig) -> SavedRun[LearningState] | None:
    """Return the checkpoint from which a training replay starts; `None` to start from the beginning.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The path is not a checkpoint.
    """
    assert config.replay is not None, "this is a replay"
    given = config.replay.checkpoint
    if given is None:
        return None
    path = Path(given)
    found = find_checkpoint(path / "checkpoints") if (path / "checkpoints").is_dir() else path
    if found is None or not (found / "state.json").is_file():
        raise ConfigError(f"replay.checkpoint '{given}' is not a checkpoint: give RUN/checkpoints/step-N.")
    return read_checkpoint(found, LearningState)
