"""How `rollout.top_p` and `top_k` affect ratios to the engine's probabilities.

An engine's log-probs are those of the truncated distribution from which it sampled, as an importance weight needs them.
The trainer's are those of the whole distribution. So old/rollout is not 1 but the probability mass that truncation
kept, between top_p and 1 at every token, even if both compute the same; and over an answer these factors multiply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll.config.algorithm import AlgorithmConfig
from roll.config.rollout import RolloutConfig

if TYPE_CHECKING:  # imports NumPy, which takes longer than finding a misspelled key
    from roll.config.distillation import DistillationConfig

__all__ = ["distillation_truncation_note", "distillation_truncation_problem", "truncation_note", "truncation_problem"]


def _setting(rollout: RolloutConfig) -> str:
    """Return the keys that truncate sampling, as written; empty if none does."""
    keys = [f"rollout.top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    return " and ".join([*keys, *([f"rollout.top_k {rollout.top_k}"] if rollout.top_k else [])])


def _uses_ratio(algorithm: AlgorithmConfig) -> bool:
    return algorithm.ratio.against == "rollout" and algorithm.gate.type != "log_prob"


def truncation_problem(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> str:
    """Return why the algorithm cannot be used with truncated sampling; empty if it can."""
    setting, correction, ratio = _setting(rollout), algorithm.correction, algorithm.ratio
    if not setting or algorithm.loss is not None:
        return ""
    divides = correction.corrects != "staleness"  # old/behavior does not involve the engine
    corrects = divides and any(
        bound is not None for bound in (correction.upper, correction.mask_low, correction.mask_high)
    )
    products = []
    if correction.level == "sequence" and corrects:
        products.append(("algorithm.correction.level sequence", "algorithm.correction.level to token or geometric"))
    if _uses_ratio(algorithm) and ratio.level != "token" and ratio.reduce == "product":
        products.append(("algorithm.ratio.reduce product", "algorithm.ratio.reduce to geometric"))
    if not products:
        return ""
    (key, instead), *_ = products
    return (
        f"{setting} makes every token's old/rollout the probability of what the engine kept, which is below 1, and the "
        f"product of an answer's that {key} takes vanishes: set {instead}, or rollout.top_p to 1 and rollout.top_k to 0"
    )


def truncation_note(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> str:
    """Return what a user of truncated sampling should know; empty if nothing divides by the engine's probabilities."""
    setting, correction = _setting(rollout), algorithm.correction
    bounds = (correction.upper, correction.mask_low, correction.mask_high, correction.veto)
    corrects = correction.corrects != "staleness" and any(bound is not None for bound in bounds)
    if not setting or algorithm.loss is not None or not (corrects or _uses_ratio(algorithm)):
        return ""
    least = f"at least {rollout.top_p:g}" if rollout.top_p < 1 and not rollout.top_k else "below 1"
    what = "the ratio" if _uses_ratio(algorithm) else "the correction"
    return (
        f"{setting}: old/rollout is the probability of what the engine kept, {least} at every token, also where engine "
        f"and trainer agree; {what} weighs tokens by it, and mismatch/… and agreement/… show it."
    )


def distillation_truncation_problem(distillation: DistillationConfig, rollout: RolloutConfig) -> str:
    """Return why a teacher's rewards and truncated sampling cannot be used together; empty if they can.

    The student's log-probs are the engine's, of the truncated distribution, and the teacher's are of the whole one:
    each advantage would be too low by the logarithm of the probability mass that was kept, so that even a student equal
    to its teacher would change.
    """
    setting = _setting(rollout)
    if not setting or distillation.place != "reward":
        return ""
    return (
        f"{setting}: the engine's log-probs are of the tokens that it kept, and the teacher's are of all, so with "
        "distillation.place reward every advantage would be wrong by the log of the probability that was kept: set "
        "rollout.top_p to 1 and rollout.top_k to 0, or distillation.place to loss"
    )


def distillation_truncation_note(distillation: DistillationConfig, rollout: RolloutConfig) -> str:
    """Return what a user should know about rewards learned from truncated samples; empty if there are none."""
    setting = _setting(rollout)
    if not setting or not distillation.reward_weight:
        return ""
    return (
        f"{setting}: old/rollout is the probability of what the engine kept, below 1, also where engine and trainer "
        "agree; the ratio that distillation.reward_weight is learned by weighs tokens by it."
    )
