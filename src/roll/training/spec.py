"""The description of one trainer rank. Plain data: it travels to the process that runs the rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from roll.config.inference import Quantization
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.training.schedule import Schedule

__all__ = ["Role", "TrainerSpec", "in_full"]

Role: TypeAlias = Literal["policy", "critic", "reference", "reward_model"]
"""`policy`: log-probs, trained, sent to engines. `critic`: a value per token, trained. `reference`: the policy as it
was at first, frozen: no master weights, no gradients, no optimizer. `reward_model`: a score of a
whole text, trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """One rank of a trainer, fully described."""

    model_path: str
    """A Hugging Face model directory."""
    model: ModelConfig
    """A critic trains adapters as the policy does, where `lora` is set; a reference has none."""
    training: TrainingConfig
    role: Role = "policy"
    holds_reference: bool = False
    """A policy: losses may ask for the divergence from the policy as it was at first, over the whole vocabulary. Unless
    it has an adapter to leave out, it then keeps a frozen copy of the model, in the compute dtype."""
    teachers: tuple[str, ...] = ()
    """A policy: Hugging Face model directories, frozen and in the compute dtype, which losses may compare it with over
    the whole vocabulary. A sample says which one, by its place here."""
    value_head_learning_rate: float | None = None
    """A policy: it also says values, by a head on its own network; this is the head's peak learning rate."""
    quantization: Quantization = "none"
    """A policy: how its linear weights go to the engines."""
    schedule: Schedule | None = None
    """By default that of `training` with one update a step."""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    init_method: str | None = None
    """Where the ranks meet, `file:///…` or `tcp://host:port`; needed with several ranks unless the process
    has joined its process group already."""
    ranks_per_node: int | None = None
    """Ranks that share this machine's cores and devices; by default all."""
    device: str | None = None
    """`cpu`, `cuda`, …; by default the accelerator, where there is one."""

    @classmethod
    def frozen(cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int) -> TrainerSpec:
        """Return the spec of a frozen model without adapters on a single rank."""
        whole = model.model_copy(update={"lora": None})
        return cls(model_path=str(model_path), model=whole, training=training, role="reference", seed=seed)

    @classmethod
    def teacher(cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int) -> TrainerSpec:
        """Return the spec of a frozen teacher, which computes in its own dtype, whatever the student's is."""
        return cls.frozen(model_path, model, in_full(training), seed)

    @property
    def node_ranks(self) -> int:
        """Ranks on this machine."""
        return self.ranks_per_node or self.world_size


def in_full(training: TrainingConfig) -> TrainingConfig:
    """Return the configuration without FP8."""
    return training if training.fp8 == "none" else training.model_copy(update={"fp8": "none"})
