"""Checks of a replay before it starts: compares the configuration, the model and the data with the recording."""

from __future__ import annotations

import logging
from pathlib import Path

from roll.config.algorithm import AlgorithmConfig
from roll.config.load import load_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import CheckpointError, ConfigError, DataError, ModelError
from roll.media import copy_store
from roll.models.fingerprint import compute_model_fingerprint, compute_tokenizer_fingerprint
from roll.pipelines.checkpoint_files import SavedRun, find_checkpoint, read_checkpoint
from roll.pipelines.learning.state import LearningState
from roll.pipelines.preparation import PreparedRun
from roll.pipelines.recording.configuration import check_replayable, list_changed_keys
from roll.pipelines.recording.files import Recording
from roll.pipelines.recording.records import RecordedSession
from roll.pipelines.reinforcement.sampling import GREEDY_PURPOSE
from roll.tracking import RunDirectory

__all__ = [
    "check_recorded_inputs",
    "check_steps",
    "check_training",
    "copy_media",
    "find_start_checkpoint",
    "open_recording",
]

logger = logging.getLogger(__name__)

_COMPARED_SECTIONS = ("algorithm", "training", "model", "rollout", "data", "seed")


def open_recording(config: RLVRConfig) -> Recording:
    """Open the recording that the configuration replays.

    Raises:
        DataError: The recording does not exist, or is corrupted.
        ConfigError: The configuration changes a recorded setting.
    """
    assert config.replay is not None, "this is a replay"
    recording = Recording.open(Path(config.replay.run))
    sessions = recording.list_used_sessions()
    check_replayable(config, sessions[0].config)
    for session in sessions[1:]:
        first = load_config(sessions[0].config)
        changed = list_changed_keys(session.config, first, _COMPARED_SECTIONS)
        if changed:
            logger.warning(
                "the recorded run was resumed after step %d with changed values of %s: the replay uses the values of "
                "its own configuration for all steps",
                session.step,
                ", ".join(changed),
            )
    return recording


def copy_media(recording: Recording, directory: RunDirectory) -> None:
    """Copy the images of the recorded run to the run that replays it, without decoding them.

    Images that environments and agents created are stored only in the recorded run.
    """
    copy_store(recording.directory.parent / directory.media_dir.name, directory.media_dir)


def check_steps(recording: Recording, first_step: int, last_step: int) -> None:
    """Check that steps `first_step` to `last_step` are recorded and that their files have the recorded sizes.

    Raises:
        ConfigError: A step is not recorded.
        DataError: A file is missing or truncated.
    """
    if last_step > recording.last_step:
        raise ConfigError(
            f"training.num_steps must be <= {recording.last_step}, the last step of the recording "
            f"'{recording.directory}', got {last_step}: set training.num_steps={recording.last_step} (this also "
            "shortens the learning-rate schedule)."
        )
    if first_step < recording.first_step:
        raise ConfigError(
            f"the recording '{recording.directory}' begins with step {recording.first_step}: start from the "
            f"checkpoint of step {recording.first_step - 1} with --checkpoint (replay.checkpoint), if the run still "
            "has this checkpoint."
        )
    recording.check(range(first_step, last_step + 1))


def check_recorded_inputs(recorded: RecordedSession, prepared: PreparedRun) -> None:
    """Check that model, tokenizer and data are the same as in the recorded session.

    Raises:
        ModelError: The model or the tokenizer differs.
        DataError: The prompts differ.
    """
    path = prepared.model_path
    if compute_model_fingerprint(path) != recorded.model:
        raise ModelError(
            f"the model in '{path}' differs from the model of the recorded run ('{_format_model_name(recorded)}') in "
            "config.json or in the weights: replay with the recorded run's model."
        )
    if compute_tokenizer_fingerprint(prepared.tokenizer) != recorded.tokenizer:
        raise ModelError(
            f"the tokenizer in '{path}' and the recorded run's differ in vocabulary, special tokens or chat "
            "template, so the recorded tokens would encode other text: replay with the recorded run's tokenizer."
        )
    try:
        prepared.data.train.restore(dict(recorded.stream))
    except CheckpointError as error:
        what = str(error).removeprefix("the data changed since the checkpoint: ").partition(". Resume")[0]
        raise DataError(
            f"the data differ from those of the recorded run: {what}. Replay with the original data."
        ) from None


def _format_model_name(recorded: RecordedSession) -> str:
    model = recorded.config.get("model")
    return str(model.get("path")) if isinstance(model, dict) else str(model)


def check_training(config: RLVRConfig, recording: Recording, recorded: RecordedSession) -> None:
    """Check that the recording has the algorithm's inputs; warn if the algorithm has no off-policy correction.

    Raises:
        ConfigError: The algorithm needs answers that were not recorded.
    """
    algorithm = config.algorithm
    first = recording.read(recording.first_step)
    if algorithm.advantage.mean == "greedy" and GREEDY_PURPOSE not in first.companions:
        raise ConfigError(
            "algorithm.advantage.mean greedy requires the rewards of greedy answers, but the recorded run has no "
            "greedy answers: choose another mean."
        )
    before = load_config(recorded.config).get_section("algorithm", AlgorithmConfig)
    shown = any(entry.has_demonstrations for entry in config.data)
    if shown and algorithm.imitation.weight > 0 and before.imitation.weight == 0:
        raise ConfigError(
            "algorithm.imitation.weight is above 0, but the recorded run had weight 0, so no demonstrations were "
            "recorded: set algorithm.imitation.weight to 0."
        )
    changed = list_changed_keys(recorded.config, config, ("algorithm", "training", "model"))
    correction = algorithm.correction
    corrected = correction.upper is not None or correction.mask_low is not None or correction.mask_high is not None
    if changed and not corrected and algorithm.ratio.against == "old" and algorithm.loss is None:
        logger.warning(
            "%s differ from the recorded run, so the trained policy differs from the one that generated the answers, "
            "but no correction is configured: set algorithm.ratio.against=rollout, or algorithm.correction.upper=2.",
            ", ".join(changed[:3]) + (" and others" if len(changed) > 3 else ""),
        )


def find_start_checkpoint(config: RLVRConfig) -> SavedRun[LearningState] | None:
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
        raise ConfigError(f"replay.checkpoint '{given}' is not a checkpoint: expected RUN/checkpoints/step-N.")
    return read_checkpoint(found, LearningState)
