"""Common base of the configurations of runs with rollouts of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.cluster import RoleDevices
from roll.config.data import DataConfig
from roll.config.device_classes import MEASURED, choose_class, find_engine_classes
from roll.config.engine_requirements import build_engine_requirements
from roll.config.engines import EngineRequirement
from roll.config.inference import InferenceConfig, find_quantization_conflict
from roll.config.judge import JudgeConfig, check_judge
from roll.config.model import LoRAConfig
from roll.config.operations import Quantization, WeightSyncConfig
from roll.config.rollout import EvaluationConfig, RolloutConfig
from roll.config.run import RunConfig
from roll.config.sandbox import SandboxConfig
from roll.config.sharing import find_sharing_problem
from roll.config.sources import validate_unique_names
from roll.config.training import TrainingConfig
from roll.config.widths import find_widths_conflict

__all__ = ["PromptRunConfig", "RolloutRunConfig"]


class RolloutRunConfig(RunConfig):
    """A run with rollouts: generation, scoring, training and evaluation. A pipeline adds its objective and its data."""

    rollout: RolloutConfig = option(RolloutConfig(), "Generation of each step's rollouts.")
    inference: InferenceConfig = option(InferenceConfig(), "The engines that generate answers.")
    judge: JudgeConfig | None = option(
        None, "The run's judge, for rewards of type `judge` without a `url`.", examples=["smollm2-135m-instruct"]
    )
    training: TrainingConfig = option(..., "Training of the model.", examples=[{"num_steps": 40}])
    evaluation: EvaluationConfig = option(EvaluationConfig(), "Evaluation of the policy on held-out prompts.")
    weight_sync: WeightSyncConfig = option(WeightSyncConfig(), "Transfer of new weights to the engines.")
    sandbox: SandboxConfig = option(SandboxConfig(), "Sandboxes in which the model's programs run.")

    if TYPE_CHECKING:

        @property
        def data(self) -> Sequence[DataConfig]:
            """Prompt sources; each pipeline has its own section for them."""
            ...

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        check_judge(self.judge, self.data, self.cluster, self.num_judges)
        self._check_quotas()
        if self.streams_training and not self.supports_stream_training:
            raise ValueError(
                f"{self.stream_training_key} is not supported with the pipeline {self.pipeline}, which has no "
                "`algorithm`: remove the key, or use the pipeline rlvr or agentic"
            )
        self._check_sharing()
        conflict = find_widths_conflict(
            self.inference.widths,
            sharing=self.cluster.sharing,
            is_elastic=self.cluster.elastic is not None,
            has_classes=bool(self.cluster.device_classes),
        )
        if conflict:
            raise ValueError(conflict)
        if self.cluster.device_classes or any(entry.device_class for entry in self.data):
            self._check_device_classes()
        transport = self.weight_sync.transport
        if self.cluster.elastic is not None and transport in ("in_process", "shared_memory"):
            raise ValueError(
                f"weight_sync.transport is '{transport}', which reaches engines on one machine only, but "
                "cluster.elastic adds engines on other nodes: set weight_sync.transport to auto, broadcast or store"
            )
        self._check_adapter_sync()
        if conflict := find_quantization_conflict(self.inference.quantization, self.weight_sync):
            raise ValueError(conflict)
        context, answer = self.inference.max_context, self.rollout.max_new_tokens
        if context is not None and context <= answer:
            longest, generated = map(self.name_key, ("inference.max_context", "rollout.max_new_tokens"))
            raise ValueError(
                f"{longest} must be > {generated} to leave space for prompts, got {context} and {answer}: raise "
                f"{longest}, or lower {generated}"
            )
        return self

    def _check_adapter_sync(self) -> None:
        if self.weight_sync.lora == "merged":
            return
        lora, advice = self.model.lora, "or set weight_sync.lora to merged"
        if lora is None:
            raise ValueError(f"weight_sync.lora is 'adapter', but no adapter is trained: set model.lora, {advice}")
        if lora.base != "as_is":
            raise ValueError(
                f"weight_sync.lora is 'adapter', but engines do not have the frozen weights of model.lora.base "
                f"'{lora.base}': set model.lora.base to as_is, {advice}"
            )

    def _check_sharing(self) -> None:
        rule = self.cluster.sharing
        if rule == "auto":
            return
        problem = find_sharing_problem(
            rule,
            async_ratio=self.rollout.scheduling.async_ratio,
            num_engines=self.num_engines,
            num_shared=len(self.find_shared_engines()),
        )
        if problem:
            raise ValueError(problem)

    def _check_device_classes(self) -> None:
        preferred, engine_classes = self.preferred_classes, self.engine_classes
        for domain, name in preferred.items():
            if name != MEASURED and name not in engine_classes:
                raise ValueError(
                    f"the source '{domain}' prefers the device class {name}, but no engine runs on devices of this "
                    "class: add them to cluster.device_mapping.actor_infer, or choose another device_class"
                )
        if preferred and self.rollout.scheduling.type == "batch":
            raise ValueError(
                f"the source '{next(iter(preferred))}' prefers a device class, but `rollout.scheduling.type: batch` "
                "assigns prompts to engines in turn: set the type to queue, or remove device_class"
            )

    def name_key(self, key: str) -> str:
        """Return the key of the user's configuration that sets `key`, for messages."""
        return key

    @property
    def quantization_alternative(self) -> str:
        """The advice in messages about engines that cannot compute in 8 bits."""
        return "set weight_sync.quantization instead, which only sends weights in 8 bits"

    @property
    def sent_quantization(self) -> Quantization:
        """The format in which weight syncs send linear weights."""
        return self.weight_sync.quantization if self.inference.quantization == "none" else self.inference.quantization

    @property
    def synced_adapter(self) -> LoRAConfig | None:
        """The adapter, if weight syncs send only the adapter."""
        return self.model.lora if self.weight_sync.lora == "adapter" else None

    @property
    def engine_classes(self) -> list[str]:
        """Device class of each engine; empty if the run has no device classes."""
        engines, classes = self.roles["actor_infer"], self.cluster.device_classes
        numbers = {name: each.devices for name, each in classes.items()}
        return find_engine_classes(engines.devices, engines.tensor_parallel, numbers) if classes else []

    @property
    def preferred_classes(self) -> dict[str, str]:
        """The preferred device class by domain, or `measured`; without the domains that prefer none."""
        classes = {
            name: (each.device or name, each.price_per_hour) for name, each in self.cluster.device_classes.items()
        }
        section = "environments" if "environments" in type(self).model_fields else "data"
        return {
            entry.domain or entry.source: choose_class(
                entry.device_class, classes, f"{section}.{number}.device_class", "cluster.device_classes"
            )
            for number, entry in enumerate(self.data)
            if entry.device_class is not None
        }

    def find_shared_engines(self) -> list[int]:
        """Find the indices of the policy's engines that share devices with trainers."""
        roles = self.roles
        engines = roles["actor_infer"]
        trained = {device for name in self.find_colocated_trainers("actor_infer") for device in roles[name].devices}
        return [index for index, devices in enumerate(engines.list_parts()) if trained & set(devices)]

    def with_first_width(self) -> Self:
        """Return the configuration with engines of the first width only, for a policy that is not trained."""
        inference = self.inference.model_copy(update={"tensor_parallel": self.inference.width})
        return self.model_copy(update={"inference": inference})

    @property
    def stream_training_key(self) -> str:
        """The key that enables training on finished groups while other groups are generated, for messages."""
        shares = self.cluster.sharing == "stream_training"
        return "cluster.sharing stream_training" if shares else "rollout.scheduling.stream_training"

    @property
    def streams_training(self) -> bool:
        """True if a synchronous run trains on finished groups while other groups are generated."""
        return self.rollout.scheduling.stream_training or self.cluster.sharing == "stream_training"

    def _check_quotas(self) -> None:
        if self.rollout.scheduling.domain_quotas:
            weights = {entry.domain or entry.source: entry.weight for entry in self.data}
            rarest = min(weights, key=weights.__getitem__)
            places = weights[rarest] / sum(weights.values()) * self.rollout.prompts_per_step
            if places < 1:
                raise ValueError(
                    f"rollout.scheduling.domain_quotas cannot be satisfied: '{rarest}' would get {places:.2g} of the "
                    f"{self.rollout.prompts_per_step} prompts of a step (rollout.prompts_per_step); raise "
                    "prompts_per_step or the weight of the source, or remove domain_quotas"
                )

    def describe_missing_role(self, role: str) -> str:
        """Describe why a role in the device mapping does not exist in this run, and a remedy."""
        if role == "judge":
            return "the run has no judge: remove the key, or add a section `judge`"
        return super().describe_missing_role(role)

    @property
    def roles(self) -> dict[str, RoleDevices]:
        """The roles of this run by name: the trainer, the engines and the judge."""
        mapping, roles, widths = self.cluster.device_mapping, super().roles, self.inference.widths
        roles["actor_infer"] = RoleDevices(
            kind="engine",
            devices=mapping.actor_infer,
            tensor_parallel=widths[0],
            wider=widths[1:],
            section="inference",
            log_name="engine",
        )
        if self.judge is not None:
            devices, width = self.judge_devices, self.judge.tensor_parallel
            roles["judge"] = RoleDevices(
                kind="engine", devices=devices, tensor_parallel=width, section="judge", log_name="judge"
            )
        return roles

    @property
    def required_engine_capabilities(self) -> list[EngineRequirement]:
        """Capabilities that the run requires from the engines in `inference`; a pipeline may add requirements."""
        return build_engine_requirements(self)

    @property
    def supports_elastic_engines(self) -> bool:
        """True if engines may join and leave during the run (`cluster.elastic`)."""
        return True

    @property
    def supports_stream_training(self) -> bool:
        """True if the pipeline can train with `rollout.scheduling.stream_training`."""
        return False

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks."""
        return self.roles["actor_train"].count

    @property
    def num_engines(self) -> int:
        """Number of inference engines that generate at once, at the start."""
        return self.roles["actor_infer"].count

    @property
    def num_judges(self) -> int:
        """Number of engines of the run's judge."""
        if self.judge is None:
            return 0
        mapped = self.cluster.device_mapping.judge if self.cluster.type == "ray" else None
        return self.judge.num_engines or len(mapped or ()) // self.judge.tensor_parallel or 1

    @property
    def judge_devices(self) -> list[int]:
        """Devices of the run's judge: its mapped devices, or the first devices of `actor_infer`."""
        if self.judge is None:
            return []
        mapping = self.cluster.device_mapping
        needed = self.num_judges * self.judge.tensor_parallel if self.cluster.type == "ray" else 1
        return mapping.actor_infer[:needed] if mapping.judge is None else mapping.judge

    @property
    def max_answer_tokens(self) -> int:
        """Maximum number of tokens that the policy can generate in one rollout, over all its turns."""
        return self.rollout.max_new_tokens * max(entry.turns for entry in self.data)

    @property
    def max_rollout_tokens(self) -> int:
        """Maximum number of tokens after a prompt, which must fit into the engines' context.

        This number includes all answers, and the observations that are not part of the prompt.
        """
        between = self.rollout.episodes.observation_tokens
        return self.rollout.max_new_tokens + max(
            (entry.turns - 1) * (self.rollout.max_new_tokens + between * (entry.environment_call is not None))
            + between * entry.environment_provides_prompt
            for entry in self.data
        )

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts generated for each step."""
        return self.rollout.prompts_per_step * self.rollout.group_size


class PromptRunConfig(RolloutRunConfig):
    """A run with prompts from data sources."""

    data: list[DataConfig] = option(
        ...,
        "Prompt sources. If there are several, every step mixes them by weight.",
        min_length=1,
        examples=[[{"source": "arithmetic", "reward": "math"}]],
    )

    _check_unique_names = field_validator("data")(validate_unique_names)
