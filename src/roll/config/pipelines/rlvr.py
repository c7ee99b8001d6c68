"""The configuration of reinforcement learning with verifiable rewards, and everything that is derived from it."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from roll.config.algorithm import AlgorithmConfig
from roll.config.base import option
from roll.config.cluster import RoleDevices
from roll.config.data import DataConfig
from roll.config.inference import InferenceConfig
from roll.config.judge import JudgeConfig, check_judge
from roll.config.operations import WeightSyncConfig
from roll.config.replay import ReplayConfig
from roll.config.rollout import EvaluationConfig, RolloutConfig
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.config.training import TrainingConfig
from roll.config.truncation import truncation_problem

__all__ = ["CONFIG", "RLVRConfig"]


class RLVRConfig(RunConfig):
    """Reinforcement learning with verifiable rewards."""

    pipeline: Literal["rlvr"] = option("rlvr", "Which pipeline runs.")
    algorithm: AlgorithmConfig = option(AlgorithmConfig(), "How rewards become updates.")
    data: list[DataConfig] = option(
        ...,
        "Prompt sources; several are mixed by weight within every step.",
        min_length=1,
        examples=[[{"source": "arithmetic", "reward": "math"}]],
    )
    rollout: RolloutConfig = option(RolloutConfig(), "What each step generates.")
    inference: InferenceConfig = option(InferenceConfig(), "The engines that generate.")
    judge: JudgeConfig | None = option(
        None, "The run's own judge, for rewards of type `judge` without a `url`.", examples=["smollm2-135m-instruct"]
    )
    training: TrainingConfig = option(..., "How the model is updated.", examples=[{"num_steps": 40}])
    evaluation: EvaluationConfig = option(EvaluationConfig(), "How the policy is measured on held-out prompts.")
    weight_sync: WeightSyncConfig = option(WeightSyncConfig(), "How new weights are brought to the engines.")
    sandbox: SandboxConfig = option(SandboxConfig(), "Where programs that the model writes run.")
    replay: ReplayConfig | None = option(None, "A recorded run that is run again; `roll replay` sets it.")

    @field_validator("data")
    @classmethod
    def _domains(cls, value: list[DataConfig]) -> list[DataConfig]:
        names = [entry.domain or entry.source for entry in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several sources are called {twice}: give each its own `domain`")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> RLVRConfig:
        self._check_groups()
        self._check_lengths()
        check_judge(self.judge, self.data, self.cluster, self.num_judges)
        self._check_demonstrations()
        problem = truncation_problem(self.algorithm, self.rollout)
        if problem:
            raise ValueError(problem)
        if self.replay is not None and self.tracking.record_rollouts:
            raise ValueError(
                "tracking.record_rollouts would record what replay.run has recorded already: set it to false"
            )
        if self.training.warmup_steps > self.training.num_steps:
            raise ValueError(
                f"training.warmup_steps {self.training.warmup_steps} exceeds training.num_steps "
                f"{self.training.num_steps}"
            )
        context, answer = self.inference.max_context, self.rollout.max_new_tokens
        if context is not None and context <= answer:
            raise ValueError(
                f"inference.max_context {context} leaves no room for prompts beside rollout.max_new_tokens {answer}: "
                "raise the one or lower the other"
            )
        return self

    def _check_groups(self) -> None:
        size, advantage, critic = self.rollout.group_size, self.algorithm.advantage, self.algorithm.critic
        compared = {"group", "leave_one_out", "length_weighted"} & {advantage.mean, advantage.std}
        if size == 1 and compared and advantage.function is None:
            raise ValueError(
                f"algorithm.advantage: {' and '.join(sorted(compared))} normalisation needs rollout.group_size >= 2, "
                "got 1 (a group of one equals its own mean); raise it, or set advantage.mean and advantage.std to "
                "batch or none"
            )
        if size == 1 and self.algorithm.filters.skip_zero_variance:
            raise ValueError(
                "algorithm.filters.skip_zero_variance leaves out every group of one, since its rewards are all equal: "
                "set it to false, or rollout.group_size to 2 or more, got 1"
            )
        if (
            advantage.estimator == "anchor_state"
            and advantage.function is None
            and all(e.turns == 1 for e in self.data)
        ):
            raise ValueError(
                "algorithm.advantage.estimator anchor_state compares turns that began in the same state, but no source "
                "under data has several turns: use one that has, such as guess_number, or set algorithm.type to grpo"
            )
        if self.rollout.scheduling.domain_quotas:
            weights = {entry.domain or entry.source: entry.weight for entry in self.data}
            rarest = min(weights, key=weights.__getitem__)
            places = weights[rarest] / sum(weights.values()) * self.rollout.prompts_per_step
            if places < 1:
                raise ValueError(
                    f"rollout.scheduling.domain_quotas cannot be met: '{rarest}' is due {places:.2g} of "
                    f"rollout.prompts_per_step {self.rollout.prompts_per_step} in a step; raise prompts_per_step, its "
                    "weight, or remove domain_quotas"
                )
        parts, prompts = self.algorithm.updates.num_minibatches, self.rollout.prompts_per_step
        if parts > prompts:
            raise ValueError(
                f"algorithm.updates.num_minibatches {parts} exceeds rollout.prompts_per_step {prompts}, but a "
                "mini-batch is made of whole groups: lower the one or raise the other"
            )
        if self.algorithm.uses_critic and size < critic.num_critics:
            raise ValueError(
                f"algorithm.critic.num_critics {critic.num_critics} critics share each group's rollouts, but "
                f"rollout.group_size is {size}: raise the one or lower the other"
            )

    def _check_lengths(self) -> None:
        buffer = self.algorithm.reward.overlong_buffer
        answer = self.rollout.max_new_tokens * min(entry.turns for entry in self.data)
        if buffer > answer:
            raise ValueError(
                f"algorithm.reward.overlong_buffer {buffer} exceeds rollout.max_new_tokens {answer}, so that the "
                "shortest answer is punished: lower the one or raise the other"
            )

    def _check_demonstrations(self) -> None:
        imitation = self.algorithm.imitation
        if imitation != type(imitation)() and not any(entry.has_demonstrations for entry in self.data):
            raise ValueError(
                "algorithm.imitation would change nothing, since no source under data has demonstrations: name their "
                "column as expert_key, or remove it"
            )

    def why_without(self, role: str) -> str:
        """See `RunConfig.why_without`."""
        algorithm = self.algorithm
        if role == "critic":
            if algorithm.shares_critic:
                return (
                    "the critic is a head on the policy's network: remove it, or set algorithm.critic.shared to false"
                )
            return "no critic is used: remove it, or set algorithm.advantage.estimator to gae"
        if role == "reference":
            if not algorithm.uses_reference:
                return "no reference is used: remove it, or set algorithm.kl.coefficient"
            if self.trainer_holds_reference:
                return "with algorithm.kl.estimator full the trainer itself keeps the reference: remove it"
            return "with model.lora the reference is the policy without its adapters: remove it"
        return "the run has no judge of its own: remove it, or add a section `judge`"

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """See `RunConfig.roles`."""
        mapping, roles, width = self.cluster.device_mapping, super().roles, self.inference.tensor_parallel
        roles["actor_infer"] = RoleDevices(
            kind="engine", devices=mapping.actor_infer, tensor_parallel=width, section="inference", log_name="engine"
        )
        if self.algorithm.num_critic_models:
            roles["critic"] = RoleDevices(kind="trainer", devices=mapping.critic or mapping.actor_train)
        if self.starts_reference:
            roles["reference"] = RoleDevices(kind="trainer", devices=mapping.reference or mapping.actor_train)
        if self.judge is not None:
            devices, width = self.judge_devices, self.judge.tensor_parallel
            roles["judge"] = RoleDevices(
                kind="engine", devices=devices, tensor_parallel=width, section="judge", log_name="judge"
            )
        return roles

    @property
    def trainer_holds_reference(self) -> bool:
        """Whether the policy's own loss needs the reference's whole distribution."""
        return self.algorithm.uses_reference and self.algorithm.kl.estimator == "full"

    @property
    def starts_reference(self) -> bool:
        """Whether the reference is a role of its own: neither the policy without adapters, nor kept by the trainer."""
        return self.algorithm.uses_reference and self.model.lora is None and not self.trainer_holds_reference

    @property
    def num_ranks(self) -> int:
        """Trainer ranks."""
        return self.roles["actor_train"].count

    @property
    def num_engines(self) -> int:
        """Inference engines."""
        return self.roles["actor_infer"].count

    @property
    def num_judges(self) -> int:
        """Engines of the run's own judge."""
        if self.judge is None:
            return 0
        mapped = self.cluster.device_mapping.judge if self.cluster.type == "ray" else None
        return self.judge.num_engines or len(mapped or ()) // self.judge.tensor_parallel or 1

    @property
    def judge_devices(self) -> list[int]:
        """Of the run's own judge: those that are mapped to it, or the first of `actor_infer`."""
        if self.judge is None:
            return []
        mapping = self.cluster.device_mapping
        needed = self.num_judges * self.judge.tensor_parallel if self.cluster.type == "ray" else 1
        return mapping.actor_infer[:needed] if mapping.judge is None else mapping.judge

    @property
    def max_answer_tokens(self) -> int:
        """Most tokens that the policy can write in one rollout, over all its turns."""
        return self.rollout.max_new_tokens * max(entry.turns for entry in self.data)

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts generated for each step."""
        return self.rollout.prompts_per_step * self.rollout.group_size


CONFIG = RLVRConfig
