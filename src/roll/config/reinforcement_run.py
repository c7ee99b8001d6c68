"""Common base of the configurations of runs with an `algorithm`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.base import option
from roll.config.cluster import RoleDevices
from roll.config.engines import LOGPROBS, EngineRequirement
from roll.config.rollout_run import RolloutRunConfig
from roll.config.streaming import find_streaming_problem
from roll.config.truncation import find_truncation_problem

__all__ = ["ReinforcementRunConfig"]


class ReinforcementRunConfig(RolloutRunConfig):
    """A run with rollouts, rewards, and an RL algorithm."""

    algorithm: AlgorithmConfig = option(AlgorithmConfig(), "RL algorithm.")

    @model_validator(mode="after")
    def _check_algorithm(self) -> Self:
        self._check_groups()
        self._check_lengths()
        self._check_demonstrations()
        problem = find_truncation_problem(self.algorithm, self.rollout)
        if self.streams_training:
            problem = problem or self.find_streaming_problem()
        if problem:
            raise ValueError(problem)
        if self.num_snapshots and self.training.backend != "torch":
            raise ValueError(
                f"training.backend {self.training.backend} does not support snapshots of earlier policy versions, "
                "which algorithm.correction.snapshots, correction.corrects mismatch or staleness, and ratio.against "
                "behavior require with an async_ratio above 0: set training.backend to torch, or correction.corrects "
                "to both"
            )
        return self

    @property
    def supports_stream_training(self) -> bool:
        """True if the pipeline can train with `rollout.scheduling.stream_training`."""
        return True

    @property
    def num_snapshots(self) -> int:
        """Number of earlier policy versions whose weights the policy's trainer keeps in host memory."""
        return self.rollout.scheduling.max_staleness if self.algorithm.uses_snapshots else 0

    def find_streaming_problem(self) -> str:
        """Return the reason why the run cannot train on finished groups before other groups finish; empty if it can."""
        key = self.stream_training_key
        if self.has_demonstrations:
            return f"{key} does not support demonstrations: remove expert_key or anchors from data, or remove the key"
        if self.cluster.sharing == "colocated":
            return (
                f"{key} does not support cluster.sharing colocated, because trainers compute while engines generate: "
                "set sharing to stream_training or auto, and map actor_train to fewer devices than actor_infer "
                "(cluster.device_mapping)"
            )
        return find_streaming_problem(key, self.algorithm, self.training, self.rollout.scheduling.type)

    def _check_groups(self) -> None:
        size, advantage, critic = self.rollout.group_size, self.algorithm.advantage, self.algorithm.critic
        compared = {"group", "leave_one_out", "length_weighted"} & {advantage.mean, advantage.std}
        if size == 1 and compared and advantage.function is None:
            raise ValueError(
                f"algorithm.advantage: {' and '.join(sorted(compared))} normalization requires rollout.group_size >= "
                "2, got 1 (every advantage would be 0): raise group_size, or set advantage.mean and advantage.std to "
                "batch or none"
            )
        if size == 1 and self.algorithm.filters.skip_zero_variance:
            raise ValueError(
                "algorithm.filters.skip_zero_variance drops every group if rollout.group_size is 1: set "
                "skip_zero_variance to false, or rollout.group_size to 2 or more"
            )
        if (
            advantage.estimator == "anchor_state"
            and advantage.function is None
            and all(e.turns == 1 for e in self.data)
        ):
            raise ValueError(
                "algorithm.advantage.estimator anchor_state requires a source under data with several turns: use a "
                "source such as guess_number, or set algorithm.type to grpo"
            )
        parts, prompts = self.algorithm.updates.num_minibatches, self.rollout.prompts_per_step
        if parts > prompts:
            raise ValueError(
                "algorithm.updates.num_minibatches must be <= rollout.prompts_per_step, because a mini-batch contains "
                f"at least one group, got {parts} and {prompts}: lower num_minibatches, or raise prompts_per_step"
            )
        if self.algorithm.uses_critic and size < critic.num_critics:
            raise ValueError(
                "algorithm.critic.num_critics must be <= rollout.group_size, because each critic learns from "
                f"different rollouts of a group, got {critic.num_critics} and {size}: raise group_size, or lower "
                "num_critics"
            )

    def _check_lengths(self) -> None:
        buffer = self.algorithm.reward.overlong_buffer
        answer = self.rollout.max_new_tokens * min(entry.turns for entry in self.data)
        if buffer > answer:
            raise ValueError(
                f"algorithm.reward.overlong_buffer must be <= rollout.max_new_tokens, got {buffer} and {answer} (all "
                "answers would be penalized): lower overlong_buffer, or raise max_new_tokens"
            )

    def _check_demonstrations(self) -> None:
        imitation = self.algorithm.imitation
        if imitation != type(imitation)() and not self.has_demonstrations:
            raise ValueError(
                "algorithm.imitation has no effect, because no source under data has demonstrations: set "
                "expert_key to the column with demonstrations (or, with the pipeline agentic, set anchors), or remove "
                "algorithm.imitation"
            )

    @property
    def required_engine_capabilities(self) -> list[EngineRequirement]:
        """Capabilities that the run requires from its engines, including log-probs of sampled tokens."""
        return [*super().required_engine_capabilities, LOGPROBS]

    @property
    def has_demonstrations(self) -> bool:
        """True if the data may have demonstrations to imitate."""
        return any(entry.has_demonstrations for entry in self.data)

    def describe_missing_role(self, role: str) -> str:
        """Describe why a role in the device mapping does not exist in this run, and a remedy."""
        algorithm = self.algorithm
        if role == "critic":
            if algorithm.shares_critic:
                return (
                    "the critic is a value head on the policy's network: remove the key, or set "
                    "algorithm.critic.shared to false"
                )
            return "no critic is used: remove the key, or set algorithm.advantage.estimator to gae"
        if role == "reference":
            if not algorithm.uses_reference:
                return "no reference is used: remove the key, or set algorithm.kl.coefficient"
            if self.trainer_loads_reference:
                return "with algorithm.kl.estimator full, the reference is in the policy's trainer: remove the key"
            return "with model.lora, the reference is the policy without its adapters: remove the key"
        return super().describe_missing_role(role)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name, including critics and reference if they are separate roles."""
        mapping, roles = self.cluster.device_mapping, super().roles
        if self.algorithm.num_critic_models:
            roles["critic"] = RoleDevices(kind="trainer", devices=mapping.critic or mapping.actor_train)
        if self.has_reference_role:
            roles["reference"] = RoleDevices(kind="trainer", devices=mapping.reference or mapping.actor_train)
        return roles

    @property
    def trainer_loads_reference(self) -> bool:
        """True if the policy's loss needs the reference model's whole distribution."""
        return self.algorithm.uses_reference and self.algorithm.kl.estimator == "full"

    @property
    def has_reference_role(self) -> bool:
        """True if the reference model is a separate role, not the policy without adapters or loaded in the trainer."""
        return self.algorithm.uses_reference and self.model.lora is None and not self.trainer_loads_reference
