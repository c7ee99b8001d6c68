"""The algorithm: five independent choices, KL, correction and filters. A named one is a preset of these."""

from __future__ import annotations

from typing import Literal

from roll.config.base import Section, option

__all__ = ["AlgorithmConfig", "KLConfig"]


class KLConfig(Section):
    """A penalty on moving away from the reference model; at coefficient 0 it is off and none is loaded."""

    coefficient: float = option(0.0, "Weight of the penalty in the loss.", ge=0)
    estimator: Literal["k1", "k2", "k3"] = option("k3", "Estimator of the KL divergence per token (Schulman 2020).")


class AlgorithmConfig(Section):
    """GRPO (arXiv 2402.03300) and its options."""

    type: Literal["grpo"] = option("grpo", "Preset that the other keys start from.")
    advantage_mean: Literal["none", "group", "batch"] = option(
        "group", "What is subtracted from a reward: nothing, its group's mean, or the batch's."
    )
    advantage_std: Literal["none", "group", "batch"] = option(
        "group", "What the difference is divided by: nothing, its group's standard deviation, or the batch's."
    )
    clip_low: float = option(0.2, "The ratio is clipped at 1 - clip_low from below.", ge=0, le=1)
    clip_high: float = option(0.2, "The ratio is clipped at 1 + clip_high from above.", ge=0)
    aggregation: Literal["sequence_mean", "token_mean", "constant_length"] = option(
        "sequence_mean",
        "`sequence_mean`: mean over a rollout's tokens, then over rollouts (GRPO). "
        "`token_mean`: over all tokens (DAPO). "
        "`constant_length`: sum over tokens divided by max_new_tokens, then over rollouts (Dr. GRPO).",
    )
    kl: KLConfig = option(KLConfig(), "Penalty on the distance to the reference model.")
    skip_zero_variance: bool = option(
        True, "Leave out groups whose rewards are all equal: they have no gradient. They are counted."
    )
