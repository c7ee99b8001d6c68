"""The algorithm: independent parts. A named one is a preset of these, a starting point that every key may change."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from roll.config.algorithm_parts import (
    FUNCTION,
    AdvantageConfig,
    CorrectionConfig,
    CreditConfig,
    CriticConfig,
    EntropyConfig,
    FilterConfig,
    GateConfig,
    KLConfig,
    MinClip,
    RatioConfig,
    RewardShapingConfig,
    UpdateConfig,
    WeightConfig,
)
from roll.config.base import Section, option
from roll.config.presets import PresetName, expand

__all__ = ["AlgorithmConfig"]


class AlgorithmConfig(Section):
    """From rewards to an update: rewards, advantages, ratio, gate, aggregation, KL, correction, filters."""

    type: PresetName = option("grpo", "Preset that the other keys start from; any of them may be changed.")
    reward: RewardShapingConfig = option(RewardShapingConfig(), "What is done to rewards first.")
    advantage: AdvantageConfig = option(AdvantageConfig(), "From rewards to a weight per token.")
    ratio: RatioConfig = option(RatioConfig(), "The ratio that the gate sees.")
    gate: GateConfig = option(MinClip(type="min_clip"), "How ratio and advantage become an objective.")
    aggregation: Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"] = option(
        "sequence_mean",
        "`sequence_mean`: mean over a rollout's tokens, then over rollouts (GRPO). "
        "`token_mean`: over all tokens (DAPO). "
        "`constant_length`: sum over tokens divided by max_new_tokens, then over rollouts (Dr. GRPO). "
        "`sequence_sum`: sum over tokens, then mean over rollouts.",
    )
    kl: KLConfig = option(KLConfig(), "Penalty on the distance to the reference model.")
    entropy: EntropyConfig = option(EntropyConfig(), "Bonus for entropy.")
    correction: CorrectionConfig = option(CorrectionConfig(), "Engine's probabilities against the trainer's.")
    filters: FilterConfig = option(FilterConfig(), "Which groups and rollouts are trained.")
    weights: WeightConfig = option(WeightConfig(), "Factors on whole rollouts.")
    updates: UpdateConfig = option(UpdateConfig(), "How often a batch is used.")
    critic: CriticConfig = option(CriticConfig(), "Value models.")
    credit: CreditConfig = option(CreditConfig(), "Advantages weighted by attention.")
    imitation_weight: float = option(1.0, "IPA: factor on the tokens of expert rollouts.", ge=0)
    loss: str | None = option(
        None,
        "Your own loss in place of ratio, gate, KL, entropy and correction: `package.module:function` or "
        "`path/to/file.py:function`.",
        examples=["examples/algorithms/my_loss.py:loss"],
        pattern=FUNCTION,
    )

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, value: Any) -> Any:
        return expand(value) if isinstance(value, dict) else value

    @property
    def uses_critic(self) -> bool:
        """Whether value models are loaded."""
        return self.advantage.estimator == "gae" and self.advantage.function is None

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl.coefficient > 0

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps for each batch."""
        return self.updates.num_minibatches * self.updates.num_epochs

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        advantage, gate = self.advantage, self.gate
        if advantage.estimator == "anchor_state" and advantage.mean != "group":
            raise ValueError(
                f"advantage.estimator anchor_state compares rollouts of one prompt: set advantage.mean to group, "
                f"got {advantage.mean}"
            )
        lower, upper = getattr(gate, "lower", 0.0), getattr(gate, "upper", 1.0)
        if lower > upper:
            raise ValueError(f"gate.lower {lower} exceeds gate.upper {upper}")
        if self.critic.drop_agreed + self.entropy.drop_divergent > 0 and self.critic.num_critics < 2:
            raise ValueError(
                "critic.drop_agreed and entropy.drop_divergent compare several critics: set critic.num_critics to 2 "
                f"or more, got {self.critic.num_critics}"
            )
        for name in ("num_critics", "warmup_steps", "value_clip"):
            default = CriticConfig.model_fields[name].default
            if not self.uses_critic and getattr(self.critic, name) != default:
                raise ValueError(
                    f"critic.{name} is set but no critic is used: set advantage.estimator to gae, got "
                    f"{advantage.estimator}"
                )
        low, high = self.correction.mask_low, self.correction.mask_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"correction.mask_low {low} exceeds correction.mask_high {high}")
        if self.filters.refill and not (
            self.filters.skip_zero_variance
            or self.filters.min_mean is not None
            or self.filters.max_mean is not None
            or self.filters.min_std is not None
        ):
            raise ValueError("filters.refill needs a filter that leaves groups out, such as skip_zero_variance: true")
        return self
