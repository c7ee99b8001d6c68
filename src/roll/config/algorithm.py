"""The algorithm, built from independent parts. A named one is a preset of these, and every key can be changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll.config.algorithm_parts import (
    AdvantageConfig,
    CreditConfig,
    CriticConfig,
    EntropyConfig,
    FilterConfig,
    ImitationConfig,
    KLConfig,
    RatioConfig,
    RewardShapingConfig,
    UpdateConfig,
    WeightConfig,
)
from roll.config.base import EXTENSION, Section, option, path_option
from roll.config.correction import CorrectionConfig
from roll.config.gates import LOSSES, GateConfig, MinClip
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
    imitation: ImitationConfig = option(
        ImitationConfig(), "Demonstrations that are imitated with the policy's rollouts."
    )
    loss: str | None = path_option(
        None,
        "Your own loss instead of ratio, gate, KL, entropy and correction: `package.module:function`, "
        "`path/to/file.py:function`, or a name that an installed package gives (entry points `roll.losses`).",
        examples=["examples/algorithms/my_loss.py:loss"],
        pattern=EXTENSION,
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str | None) -> str | None:
        return None if name is None else LOSSES.checked(name)

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, value: Any) -> Any:
        return expand(value) if isinstance(value, dict) else value

    @property
    def uses_critic(self) -> bool:
        """Whether value models are loaded."""
        return self.advantage.estimator == "gae" and self.advantage.function is None

    @property
    def num_critic_models(self) -> int:
        """Number of value models next to the policy; 0 for a shared head."""
        return self.critic.num_critics if self.uses_critic and not self.critic.shared else 0

    @property
    def shares_critic(self) -> bool:
        """Whether the policy's own network predicts the values."""
        return self.uses_critic and self.critic.shared

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.kl.coefficient > 0

    @property
    def uses_snapshots(self) -> bool:
        """Whether tokens are scored under the policy version that sampled them."""
        if self.loss is not None:
            return self.correction.snapshots
        used = self.ratio.against == "behavior" and self.gate.type != "log_prob"
        return self.correction.snapshots or self.correction.corrects != "both" or used

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps for each batch."""
        return self.updates.num_minibatches * self.updates.num_epochs

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        problem = self._impossible() or self._without_effect()
        if problem:
            raise ValueError(problem)
        return self

    def _impossible(self) -> str:
        """Return why keys cannot be combined: a quantity cannot be computed, or would be twice; empty if they can."""
        advantage, critic, filters = self.advantage, self.critic, self.filters
        if advantage.estimator == "anchor_state" and advantage.mean != "group" and advantage.function is None:
            return (
                "advantage.estimator anchor_state compares rollouts of one prompt: set advantage.mean to group, got "
                f"{advantage.mean}"
            )
        if advantage.whiten == "turn" and advantage.estimator in ("token", "gae") and advantage.function is None:
            return (
                f"advantage.whiten turn: advantage.estimator {advantage.estimator} has a value for each token, not for "
                "each turn; set advantage.whiten to token"
            )
        if self.ratio.against == "rollout" and self.correction.upper is not None and self.loss is None:
            return (
                "ratio.against rollout has the engine's probabilities in the ratio already, so correction.upper would "
                "correct for them twice: set correction.upper to null (masks still work)"
            )
        if (
            self.ratio.against == "behavior"
            and self.correction.upper is not None
            and self.correction.corrects != "mismatch"
            and self.loss is None
        ):
            return (
                "ratio.against behavior has staleness in the ratio already, so correction.upper would correct for it "
                f"twice with correction.corrects {self.correction.corrects}: set that to mismatch, or correction.upper "
                "to null (masks still work)"
            )
        whole = advantage.estimator in ("outcome", "chunk", "anchor_state") and advantage.function is None
        if whole and "running" in (advantage.mean, advantage.std) and self.uses_reference and self.kl.place == "reward":
            return (
                "kl.place reward makes the penalty part of the reward before baseline and scaling, but running moments "
                "are of rewards without it: set kl.place to loss, or advantage.mean and advantage.std to group or batch"
            )
        if critic.drop_agreed + self.entropy.drop_divergent > 0 and critic.num_critics < 2:
            return (
                "critic.drop_agreed and entropy.drop_divergent compare several critics: set critic.num_critics to 2 "
                f"or more, got {critic.num_critics}"
            )
        own = ("model", "num_critics", "learning_rate", "warmup_steps", "num_epochs")
        set_anyway = [f"critic.{name}" for name in own if getattr(critic, name) != type(critic)().model_dump()[name]]
        if critic.shared and set_anyway:
            return (
                f"critic.shared has one value head on the policy's network, which learns in the policy's updates: "
                f"{' and '.join(set_anyway)} would need models of their own, so remove {set_anyway[0]} or critic.shared"
            )
        if self.shares_critic and self.loss is not None:
            return "critic.shared adds the value loss to the policy's, but loss is your own: set critic.shared to false"
        if filters.refill and not filters.leaves_groups_out:
            return "filters.refill needs a filter that leaves groups out, such as skip_zero_variance: true"
        if filters.refill and filters.top_variance < 1:
            return (
                f"filters.top_variance {filters.top_variance:g} always leaves groups out, so filters.refill would "
                "never end before max_refills: set one of them to its default"
            )
        return ""

    def _without_effect(self) -> str:
        """Return a message about a key that was set but changes nothing; empty if every key has an effect.

        Keys that have the value of the preset are allowed.
        """
        estimator = self.advantage.estimator
        off_policy = self.gate.type != "log_prob"
        pooled = off_policy and self.ratio.level != "token"
        critic = {f"critic.{name}": self.uses_critic for name in CriticConfig.model_fields if name != "drop_agreed"}
        head = "critic.shared is false, and a critic of its own has critic.learning_rate and its own loss"
        effective = {
            "advantage.gamma": estimator != "outcome",
            "advantage.gae_lambda": estimator == "gae",
            "advantage.step_weight": estimator == "anchor_state",
        }
        needed = {
            **{key: (used, f"advantage.estimator is {estimator}") for key, used in effective.items()},
            **{key: (used, "no critic is used: set advantage.estimator to gae") for key, used in critic.items()},
            **{f"critic.{n}": (self.shares_critic, head) for n in ("coefficient", "head_learning_rate")},
            "ratio.level": (off_policy, "gate.type log_prob has no ratio"),
            "ratio.against": (off_policy, "gate.type log_prob has no ratio"),
            "ratio.reduce": (pooled, "ratio.level is token: set it to chunk or sequence"),
            "ratio.max_token_log_ratio": (pooled, "ratio.level is token: set it to sequence"),
        }
        preset, default = expand({"type": self.type}), AlgorithmConfig.model_fields
        for key, (used, reason) in needed.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            usual = getattr(default[section].default, name)
            if not used and value != usual and value != preset.get(section, {}).get(name, usual):
                return f"{key} {value} would change nothing, since {reason}"
        return ""
