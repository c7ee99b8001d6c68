"""The description of a trainer rank. Plain data: it is sent to the process that runs the rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from roll.config.inference import Quantization
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.training.schedule import Schedule

__all__ = ["Role", "TrainerSpec", "without_fp8"]

Role: TypeAlias = Literal["policy", "critic", "reference", "reward_model"]
"""The role of a trainer.

`policy`: log-probs, trained, sent to engines. `critic`: a value per token, trained. `reference`: the initial policy,
frozen, without master weights, gradients or optimizer. `reward_model`: a score of a whole text, trained.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """The complete description of one rank of a trainer."""

    model_path: str
    """A Hugging Face model directory."""
    model: ModelConfig
    """The model's configuration. With `lora`, critics train adapters too; a reference has none."""
    training: TrainingConfig
    role: Role = "policy"
    holds_reference: bool = False
    """For a policy: whether losses may need the divergence from the initial policy, over the whole vocabulary. Without
    an adapter to switch off, the trainer then holds a frozen copy of the model, in the compute dtype."""
    teachers: tuple[str, ...] = ()
    """For a policy: Hugging Face model directories of teachers, frozen and in the compute dtype, for divergences over
    the whole vocabulary. A sample selects its teacher by index."""
    value_head_learning_rate: float | None = None
    """For a policy: the peak learning rate of a value head on its own network; `None`: no value head."""
    quantization: Quantization = "none"
    """For a policy: the format of its linear weights for the engines."""
    schedule: Schedule | None = None
    """The learning rate schedule; by default that of `training` with one update per step."""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    init_method: str | None = None
    """The rendezvous of the ranks, `file:///…` or `tcp://host:port`; needed with several ranks unless the process has
    joined its process group already."""
    ranks_per_node: int | None = None
    """The number of ranks that share this machine's cores and devices; by default all ranks."""
    device: str | None = None
    """`cpu`, `cuda`, …; by default the accelerator, if there is one."""

    @classmethod
    def frozen(cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int) -> TrainerSpec:
        """Return the spec of a frozen model without adapters on a single rank."""
        whole = model.model_copy(update={"lora": None})
        return cls(model_path=str(model_path), model=whole, training=training, role="reference", seed=seed)

    @classmethod
    def teacher(cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int) -> TrainerSpec:
        """Return the spec of a frozen teacher, which computes in its own dtype, whatever the student's is."""
        return cls.frozen(model_path, model, without_fp8(training), seed)

    @property
    def node_ranks(self) -> int:
        """The number of ranks on this machine."""
        return self.ranks_per_node or self.world_size


def without_fp8(training: TrainingConfig) -> TrainingConfig:
    """Return the configuration without FP8."""
    return training if training.fp8 == "none" else training.model_copy(update={"fp8": "none"})
