"""Checks of 8-bit engines and of syncs in 8 bits before a run, and their description in `roll check`."""

from __future__ import annotations

from pathlib import Path

from roll.config.activation_memory import ModelSizes, get_element_bytes
from roll.config.estimate import count_quantized_parameters, estimate_sync_bytes
from roll.config.judge import JudgeConfig
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.models import check_quantizable, describe_model
from roll.models.multimodal import has_media_config
from roll.models.sizes import read_config

__all__ = [
    "check_judge_quantization",
    "check_quantization",
    "describe_answer_quantization",
    "describe_quantization",
    "describe_sync",
]


def check_quantization(config: RolloutRunConfig, directory: Path) -> None:
    """Check that the weights of the policy can be sent in 8 bits, and that engines can compute with them, if the run
    sets a quantization.

    Raises:
        ConfigError: Engines cannot compute in 8 bits with this model or dtype.
        ModelError: The checkpoint stores all experts of a layer in one tensor.
    """
    computed = config.inference.quantization
    if computed != "none":
        setting = f"{config.name_key('inference.quantization')} {computed}"
        _check_computable(directory, config.model.dtype, setting, "model.dtype", config.quantization_alternative)
    if config.sent_quantization != "none":
        key = "inference.quantization" if computed != "none" else "weight_sync.quantization"
        check_quantizable(directory, config.name_key(key))


def check_judge_quantization(judge: JudgeConfig, directory: Path) -> None:
    """Check that engines can compute in 8 bits with the judge's model, if the judge sets a quantization.

    Raises:
        ConfigError: They cannot.
    """
    if judge.quantization != "none":
        name, advice = f"judge.quantization {judge.quantization}", "set judge.quantization to none"
        _check_computable(directory, judge.dtype, name, "judge.dtype", advice)


def _check_computable(directory: Path, dtype: str, setting: str, dtype_key: str, advice: str) -> None:
    if "quantization_config" in read_config(directory):
        reason = "is already quantized"
    elif describe_model(directory).num_experts:
        reason = "is a mixture of experts"
    elif has_media_config(directory):
        reason = "reads media"
    elif dtype != "bfloat16":
        raise ConfigError(f"{setting} requires {dtype_key} bfloat16, got {dtype}: set it to bfloat16, or {advice}.")
    else:
        return
    raise ConfigError(f"{setting} is not supported for '{directory}', which {reason}: {advice}.")


def describe_quantization(config: RolloutRunConfig) -> list[str]:
    """Return notes about engines that compute in 8 bits, and about the correction for their mismatch."""
    form = config.inference.quantization
    notes = []
    if config.judge is not None and config.judge.quantization != "none":
        notes.append(f"the judge computes linear layers in {config.judge.quantization} (W8A8).")
    if form == "none":
        return notes
    limit = config.alarms.mismatch_above
    warns = "" if limit is None else f", and the run warns above {limit:g} nats per token (alarms.mismatch_above)"
    notes.append(
        f"engines compute linear layers in {form} (W8A8), with weights that are quantized at every sync; "
        f"agreement/divergence measures how much their log-probs differ from the trainer's{warns}."
    )
    if isinstance(config, ReinforcementRunConfig):
        notes.append(_describe_correction(config))
    return notes


def describe_answer_quantization(config: RolloutRunConfig) -> list[str]:
    """Return a note about the engines of `evaluation.answers`, if they compute in 8 bits."""
    form = config.inference.quantization
    if form == "none":
        return []
    return [
        f"the engines of evaluation.answers compute linear layers in {form} (W8A8), with weights that are quantized at "
        "every sync: their answers are those of the quantized model."
    ]


def describe_sync(config: RolloutRunConfig, sizes: ModelSizes) -> list[str]:
    """Describe the size of a weight sync, if it does not send all weights in the model's dtype."""
    form = config.sent_quantization
    sent = estimate_sync_bytes(form, sizes, get_element_bytes(config.model.dtype), config.synced_adapter) / 1e6
    if config.synced_adapter is not None:
        return [f"a weight sync sends {sent:,.1f} MB, only the adapter"]
    if not count_quantized_parameters(form, sizes):
        return []
    computes = config.inference.quantization != "none"
    use = f"compute in {form}" if computes else f"convert them back to {config.model.dtype}"
    return [f"a weight sync sends {sent:,.0f} MB, linear weights as {form}; engines {use}"]


def _describe_correction(config: ReinforcementRunConfig) -> str:
    algorithm = config.algorithm
    correction = algorithm.correction
    if algorithm.loss is not None:
        return "algorithm.loss replaces the correction for this mismatch: the loss must correct for it itself."
    if algorithm.ratio.against == "rollout":
        return "this mismatch is corrected, because algorithm.ratio.against is rollout."
    if correction.upper is not None and correction.corrects != "staleness":
        return (
            f"this mismatch is corrected by truncated importance sampling (algorithm.correction.upper "
            f"{correction.upper:g}, level {correction.level})."
        )
    return (
        "this mismatch is not corrected: set algorithm.correction.upper to 2 and algorithm.correction.corrects to both "
        "(truncated importance sampling), which is the default."
    )
