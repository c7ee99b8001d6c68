"""The section `algorithm`, composed of independent parts; a named algorithm is a preset, whose keys can be changed."""

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
from roll.config.base import EXTENSION_PATTERN, Section, option, path_option
from roll.config.correction import CorrectionConfig
from roll.config.gates import LOSSES, GateConfig, MinClipConfig
from roll.config.presets import PresetName, expand_preset

__all__ = ["AlgorithmConfig"]


class AlgorithmConfig(Section):
    """The RL algorithm: reward shaping, advantages, ratio, surrogate objective (gate), aggregation, KL, correction and
    filters."""

    type: PresetName = option("grpo", "Preset that sets the defaults of the other keys, which can still be overridden.")
    reward: RewardShapingConfig = option(RewardShapingConfig(), "Reward shaping.")
    advantage: AdvantageConfig = option(AdvantageConfig(), "Advantage estimation.")
    ratio: RatioConfig = option(RatioConfig(), "Importance ratio of the surrogate objective.")
    gate: GateConfig = option(
        MinClipConfig(type="min_clip"), "Surrogate objective of a token as a function of its ratio and advantage."
    )
    aggregation: Literal["sequence_mean", "token_mean", "constant_length", "sequence_sum"] = option(
        "sequence_mean",
        "Aggregation of token losses. `sequence_mean`: mean over a rollout's tokens, then over rollouts (GRPO). "
        "`token_mean`: mean over all tokens (DAPO). "
        "`constant_length`: sum over tokens divided by max_new_tokens, then mean over rollouts (Dr. GRPO). "
        "`sequence_sum`: sum over tokens, then mean over rollouts.",
    )
    kl: KLConfig = option(KLConfig(), "KL penalty relative to the reference model.")
    entropy: EntropyConfig = option(EntropyConfig(), "Entropy bonus.")
    correction: CorrectionConfig = option(CorrectionConfig(), "Importance correction for mismatch and staleness.")
    filters: FilterConfig = option(FilterConfig(), "Filters of groups and rollouts.")
    weights: WeightConfig = option(WeightConfig(), "Weights of rollouts: factors on their advantages.")
    updates: UpdateConfig = option(UpdateConfig(), "Mini-batches and epochs of each batch.")
    critic: CriticConfig = option(CriticConfig(), "Value models for `advantage.estimator: gae`.")
    credit: CreditConfig = option(CreditConfig(), "Advantages weighted by attention.")
    imitation: ImitationConfig = option(
        ImitationConfig(), "Imitation of demonstrations, in addition to the policy's rollouts."
    )
    loss: str | None = path_option(
        None,
        "Your own loss, which replaces ratio, gate, KL, entropy and correction: `package.module:function`, "
        "`path/to/file.py:function`, or the name that an installed package registers (entry points `roll.losses`).",
        examples=["examples/algorithms/my_loss.py:loss"],
        pattern=EXTENSION_PATTERN,
    )

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, name: str | None) -> str | None:
        return None if name is None else LOSSES.validate_name(name)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        return expand_preset(value) if isinstance(value, dict) else value

    @property
    def uses_critic(self) -> bool:
        """True if value models are loaded."""
        return self.advantage.estimator == "gae" and self.advantage.function is None

    @property
    def num_critic_models(self) -> int:
        """Number of separate value models; 0 if the values are predicted by a head of the policy's network."""
        return self.critic.num_critics if self.uses_critic and not self.critic.shared else 0

    @property
    def shares_critic(self) -> bool:
        """True if the policy's network also predicts the values."""
        return self.uses_critic and self.critic.shared

    @property
    def uses_reference(self) -> bool:
        """True if a reference model is needed."""
        return self.kl.coefficient > 0

    @property
    def uses_snapshots(self) -> bool:
        """True if tokens are scored under the policy version that sampled them."""
        if self.loss is not None:
            return self.correction.snapshots
        used = self.ratio.against == "behavior" and self.gate.type != "log_prob"
        return self.correction.snapshots or self.correction.corrects != "both" or used

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps for each batch."""
        return self.updates.num_minibatches * self.updates.num_epochs

    @model_validator(mode="after")
    def _check_combinations(self) -> AlgorithmConfig:
        problem = self._find_conflict() or self._find_unused_key()
        if problem:
            raise ValueError(problem)
        return self

    def _find_conflict(self) -> str:
        """Return a message about two keys with incompatible values, and the remedy; empty if all are compatible."""
        advantage, critic, filters = self.advantage, self.critic, self.filters
        if advantage.estimator == "anchor_state" and advantage.mean != "group" and advantage.function is None:
            return (
                f"advantage.estimator anchor_state requires advantage.mean group, got {advantage.mean}: it compares "
                "the rollouts of a prompt"
            )
        if advantage.whiten == "turn" and advantage.estimator in ("token", "gae") and advantage.function is None:
            return (
                f"advantage.whiten turn is not supported with advantage.estimator {advantage.estimator}, whose "
                "advantages are per token: set advantage.whiten to token"
            )
        if self.ratio.against == "rollout" and self.correction.upper is not None and self.loss is None:
            return (
                "ratio.against rollout already includes the engine's probabilities in the ratio, so correction.upper "
                "would correct for them twice: set correction.upper to null (masks still work)"
            )
        if (
            self.ratio.against == "behavior"
            and self.correction.upper is not None
            and self.correction.corrects != "mismatch"
            and self.loss is None
        ):
            return (
                "ratio.against behavior already includes staleness in the ratio, so correction.upper would "
                f"correct for it twice with correction.corrects {self.correction.corrects}: set "
                "correction.corrects to mismatch, or correction.upper to null (masks still work)"
            )
        whole = advantage.estimator in ("outcome", "chunk", "anchor_state") and advantage.function is None
        penalizes_reward = self.uses_reference and self.kl.apply_to == "reward"
        if whole and penalizes_reward and "running" in (advantage.mean, advantage.std):
            return (
                "`kl.apply_to: reward` is not supported with running means and standard deviations, which do not "
                "include the penalty: set kl.apply_to to loss, or advantage.mean and advantage.std to group or batch"
            )
        if critic.drop_agreed + self.entropy.drop_divergent > 0 and critic.num_critics < 2:
            return (
                "critic.drop_agreed and entropy.drop_divergent require critic.num_critics >= 2, got "
                f"{critic.num_critics}"
            )
        own = ("model", "num_critics", "learning_rate", "warmup_steps", "num_epochs")
        set_anyway = [f"critic.{name}" for name in own if getattr(critic, name) != type(critic)().model_dump()[name]]
        if critic.shared and set_anyway:
            return (
                f"{' and '.join(set_anyway)} cannot be set with critic.shared, which is a single value head on the "
                f"policy's network: remove {set_anyway[0]}, or set critic.shared to false"
            )
        if self.shares_critic and self.loss is not None:
            return "critic.shared is not supported with a custom `loss`: set critic.shared to false"
        if filters.refill and not filters.can_drop_groups:
            return "filters.refill requires a filter that drops groups, such as skip_zero_variance: true"
        if filters.refill and filters.top_variance < 1:
            return (
                f"filters.top_variance {filters.top_variance:g} always drops groups, so filters.refill would always "
                "reach max_refills: set one of the two keys to its default"
            )
        return ""

    def _find_unused_key(self) -> str:
        """Return a message about a key that is set but has no effect; empty if every key has an effect.

        A key may be set to the preset's value even if it has no effect.
        """
        estimator = self.advantage.estimator
        off_policy = self.gate.type != "log_prob"
        pooled = off_policy and self.ratio.level != "token"
        critic = {f"critic.{name}": self.uses_critic for name in CriticConfig.model_fields if name != "drop_agreed"}
        head = "critic.shared is false: a separate critic has critic.learning_rate and a separate loss"
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
        preset, default = expand_preset({"type": self.type}), AlgorithmConfig.model_fields
        for key, (used, reason) in needed.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            usual = getattr(default[section].default, name)
            if not used and value != usual and value != preset.get(section, {}).get(name, usual):
                return f"{key} {value} has no effect, because {reason}"
        return ""
