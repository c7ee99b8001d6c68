"""The capabilities that a run with rollouts requires from its engines, with the settings that require them."""

from __future__ import annotations

from typing import Protocol

from roll.config.cluster import ClusterConfig
from roll.config.engines import EngineRequirement
from roll.config.inference import InferenceConfig
from roll.config.model import LoRAConfig
from roll.config.operations import WeightSyncConfig
from roll.config.rollout import RolloutConfig
from roll.config.training import TrainingConfig

__all__ = ["build_engine_requirements"]


class _Run(Protocol):
    """The parts of a run's configuration that require capabilities."""

    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def inference(self) -> InferenceConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def weight_sync(self) -> WeightSyncConfig: ...
    @property
    def synced_adapter(self) -> LoRAConfig | None: ...
    @property
    def quantization_alternative(self) -> str: ...
    def name_key(self, key: str) -> str: ...


def build_engine_requirements(config: _Run) -> list[EngineRequirement]:
    """Return the capabilities that a run requires from the engines in `inference`, with reasons and alternatives."""
    inference, sync, replay = config.inference, config.weight_sync, config.training.router_replay
    width_key, computes = map(config.name_key, ("inference.tensor_parallel", "inference.quantization"))
    parallel, switches = f"{width_key} {inference.tensor_parallel}", len(inference.widths) > 1
    key, sent = "weight_sync.quantization", sync.quantization
    required = {
        "updates_weights": (True, "a policy that is trained", ""),
        "can_sleep": (
            config.cluster.sharing == "colocated" or switches,
            parallel if switches else "cluster.sharing colocated",
            f"set {width_key} to one number" if switches else "set cluster.sharing to auto",
        ),
        "tensor_parallel": (inference.widths[-1] > 1, parallel, f"set {width_key} to 1"),
        "quantized_compute": (
            inference.quantization != "none",
            f"{computes} {inference.quantization}",
            config.quantization_alternative,
        ),
        "quantized_sync": (sent != "none", f"{key} {sent}", f"set {key} to none"),
        "lora": (sync.lora == "adapter", "weight_sync.lora adapter", "set weight_sync.lora to merged"),
        "dora": (
            config.synced_adapter is not None and config.synced_adapter.use_dora,
            "weight_sync.lora adapter with model.lora.use_dora",
            "set weight_sync.lora to merged",
        ),
        "truncates_sampling": (
            config.rollout.top_p < 1 or config.rollout.top_k > 0,
            f"rollout.top_p {config.rollout.top_p:g} with rollout.top_k {config.rollout.top_k}",
            "set rollout.top_p to 1 and rollout.top_k to 0",
        ),
        "records_experts": (
            replay == "engine",
            f"training.router_replay {replay}",
            "set training.router_replay to old",
        ),
        "shares_process": (
            sync.transport == "in_process",
            "weight_sync.transport in_process",
            "set weight_sync.transport to auto",
        ),
        "scores_sequences": (
            sync.probe_every_num_steps > 0,
            f"weight_sync.probe_every_num_steps {sync.probe_every_num_steps}",
            "set weight_sync.probe_every_num_steps to 0",
        ),
    }
    return [
        EngineRequirement(capability=name, reason=reason, alternative=alternative)
        for name, (is_needed, reason, alternative) in required.items()
        if is_needed
    ]
