"""Checks of truncated sampling (`rollout.top_p`, `top_k`), which changes the ratio of trainer to engine probabilities.

The engine's log-probs come from the truncated distribution, and the trainer's log-probs come from the full
distribution. Even with identical logits, the ratio old/rollout of a token is therefore the probability mass that
truncation kept, between top_p and 1. The ratio of a whole answer is the product over its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.algorithm import AlgorithmConfig
from roll.config.rollout import RolloutConfig

if TYPE_CHECKING:  # imports NumPy, which takes longer than finding a misspelled key
    from roll.config.distillation import DistillationConfig

__all__ = [
    "describe_distillation_truncation",
    "describe_truncation",
    "find_distillation_truncation_problem",
    "find_truncation_problem",
]


def _format_setting(rollout: RolloutConfig) -> str:
    """Return the keys that truncate sampling with their values, as in `rollout.top_p 0.9`; empty if no key does."""
    keys = [f"rollout.top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return " and ".join([*keys, *([f"rollout.top_k {rollout.top_k}"] if rollout.top_k else [])])


def _has_engine_ratio(algorithm: AlgorithmConfig) -> bool:
    return algorithm.ratio.against == "rollout" and algorithm.gate.type != "log_prob"


def find_truncation_problem(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> str:
    """Return the reason why the algorithm does not support truncated sampling; empty if it does."""
    setting, correction, ratio = _format_setting(rollout), algorithm.correction, algorithm.ratio
    if not setting or algorithm.loss is not None:
        return ""
    divides = correction.corrects != "staleness"  # old/behavior does not involve the engine
    corrects = divides and any(
        bound is not None for bound in (correction.upper, correction.mask_low, correction.mask_high)
    )
    products = []
    if correction.level == "sequence" and corrects:
        products.append(("algorithm.correction.level sequence", "algorithm.correction.level to token or geometric"))
    if _has_engine_ratio(algorithm) and ratio.level != "token" and ratio.reduce == "product":
        products.append(("algorithm.ratio.reduce product", "algorithm.ratio.reduce to geometric"))
    if not products:
        return ""
    (key, instead), *_ = products
    return (
        f"with {setting}, the ratio old/rollout of every token equals the probability mass that the engine kept, "
        f"which is below 1, so the product over the tokens of an answer ({key}) is close to 0: set {instead}, or "
        "rollout.top_p to 1 and rollout.top_k to 0"
    )


def describe_truncation(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> str:
    """Describe the effect of truncated sampling; empty if the algorithm does not use the engine's probabilities."""
    setting, correction = _format_setting(rollout), algorithm.correction
    bounds = (correction.upper, correction.mask_low, correction.mask_high, correction.veto)
    corrects = correction.corrects != "staleness" and any(bound is not None for bound in bounds)
    if not setting or algorithm.loss is not None or not (corrects or _has_engine_ratio(algorithm)):
        return ""
    least = f"at least {rollout.top_p:g}" if rollout.top_p < 1 and not rollout.top_k else "below 1"
    what = "the ratio" if _has_engine_ratio(algorithm) else "the correction"
    return (
        f"{setting}: the ratio old/rollout equals the probability mass that the engine kept ({least} for every "
        f"token), even if engine and trainer agree; {what} weights tokens by it, and the metrics mismatch/… and "
        "agreement/… include it."
    )


def find_distillation_truncation_problem(distillation: DistillationConfig, rollout: RolloutConfig) -> str:
    """Return the reason why distillation with `mode: reward` does not support truncated sampling; empty if it does.

    The student's log-probs come from the engine, under the truncated distribution; the teacher's log-probs come from
    the full distribution. Each advantage would be too low by the log of the probability mass that truncation kept, so
    even a student that is identical to its teacher would change.
    """
    setting = _format_setting(rollout)
    if not setting or distillation.mode != "reward":
        return ""
    return (
        f"{setting}: the engine's log-probs come from the truncated distribution and the teacher's from the full "
        "distribution, so with distillation.mode reward every advantage would be biased by the log of the kept "
        "probability mass: set rollout.top_p to 1 and rollout.top_k to 0, or distillation.mode to loss"
    )


def describe_distillation_truncation(distillation: DistillationConfig, rollout: RolloutConfig) -> str:
    """Describe the effect of truncated sampling on rewards; empty without rewards or without truncation."""
    setting = _format_setting(rollout)
    if not setting or not distillation.reward_weight:
        return ""
    return (
        f"{setting}: the ratio old/rollout equals the probability mass that the engine kept, which is below 1 even if "
        "engine and trainer agree; with distillation.reward_weight, tokens are weighted by this ratio."
    )
