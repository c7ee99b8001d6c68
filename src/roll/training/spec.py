"""The description of a trainer rank. Plain data: it is sent to the process that runs the rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from roll.config.model import ModelConfig
from roll.config.operations import Quantization
from roll.config.training import TrainingConfig
from roll.training.schedule import Schedule

__all__ = ["Role", "TrainerSpec", "disable_fp8"]

Role: TypeAlias = Literal["policy", "critic", "reference", "reward_model"]
"""The role of a trainer.

`policy`: computes log-probs; trained; its weights are sent to engines. `critic`: computes a value per token; trained.
`reference`: the initial policy, frozen, without master weights, gradients or optimizer. `reward_model`: computes a
score per sequence; trained.
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
    """(Policy only) True if losses may need the divergence from the initial policy, over the whole vocabulary. Without
    an adapter to switch off, the trainer then holds a frozen copy of the model, in the compute dtype."""
    teachers: tuple[str, ...] = ()
    """(Policy only) Hugging Face model directories of teachers, frozen and in the compute dtype, for divergences over
    the whole vocabulary. A sample selects its teacher by index."""
    value_head_learning_rate: float | None = None
    """(Policy only) The peak learning rate of the policy's value head. If `None`, there is no value head."""
    quantization: Quantization = "none"
    """(Policy only) The format of the linear weights that are sent to engines."""
    sends_adapter: bool = False
    """(Policy only) True if only the adapter is sent to engines, which have the frozen weights."""
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
    media_dir: Path | None = None
    """The run's media store (`roll.media.MediaStore`), for models that read images; `None` for text only."""
    device: str | None = None
    """`cpu`, `cuda`, …; by default the accelerator, if available."""

    @classmethod
    def for_frozen_model(
        cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int
    ) -> TrainerSpec:
        """Return the spec of a frozen model without adapters on a single rank."""
        whole = model.model_copy(update={"lora": None})
        return cls(model_path=str(model_path), model=whole, training=training, role="reference", seed=seed)

    @classmethod
    def for_teacher(
        cls, model_path: str | Path, model: ModelConfig, training: TrainingConfig, seed: int
    ) -> TrainerSpec:
        """Return the spec of a frozen teacher, like `for_frozen_model` but without FP8, because only the student uses
        FP8.
        """
        return cls.for_frozen_model(model_path, model, disable_fp8(training), seed)

    @property
    def node_ranks(self) -> int:
        """The number of ranks on this machine."""
        return self.ranks_per_node or self.world_size


def disable_fp8(training: TrainingConfig) -> TrainingConfig:
    """Return the configuration without FP8."""
    return training if training.fp8 == "none" else training.model_copy(update={"fp8": "none"})
