"""The trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationInfo, field_validator

from roll.config.base import Section, option
from roll.config.deepspeed import DeepSpeedConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ConfigError
from roll.registry import Registry

if TYPE_CHECKING:
    from roll.protocols import TrainBackend

__all__ = ["TRAINERS", "TrainingConfig"]

TRAINERS: Registry[Callable[..., TrainBackend]] = Registry(
    "train back-end",
    {
        "torch": "roll.training.backend:TorchBackend",
        "deepspeed": "roll.training.deepspeed.backend:DeepSpeedBackend",
        "megatron": "roll.training.megatron.backend:MegatronBackend",
    },
)
"""By the name in `training.backend`, what makes one rank of a trainer from its `roll.training.TrainerSpec`. It is here
so that a name that nobody knows is refused when a configuration is loaded."""


class TrainingConfig(Section):
    """Optimisation of the policy."""

    num_steps: int = option(
        ...,
        "Steps of the run; each draws prompts, generates, and updates as `algorithm.updates` says.",
        ge=1,
        examples=[40],
    )
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "How the learning rate decays after warm-up, over all updates of the run."
    )
    warmup_steps: int = option(0, "Steps over which the learning rate rises from 0.", unit="steps", ge=0)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    beta1: float = option(0.9, "AdamW: decay of the first moment.", ge=0, lt=1)
    beta2: float = option(0.999, "AdamW: decay of the second moment.", ge=0, lt=1)
    epsilon: float = option(1e-8, "AdamW: added to the denominator.", gt=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.", gt=0)
    backend: str = option(
        "torch",
        "Train back-end: `torch`, `deepspeed` or `megatron` (extras), or a name that was added to `TRAINERS`.",
    )
    parallel: ParallelConfig = option(
        ParallelConfig(),
        "How ranks divide the model and its work (the back-end `torch`; `megatron` takes `tp` and `pp`).",
    )
    deepspeed: DeepSpeedConfig = option(DeepSpeedConfig(), "How the back-end `deepspeed` spreads a model over ranks.")
    max_tokens_per_micro_batch: int = option(
        4096,
        "Packed tokens that go through the network at once; bounds memory, never changes the result.",
        unit="tokens",
        ge=1,
    )
    share_prefix: bool = option(
        True, "Compute once what the contexts of a group have in common: the prompt, earlier turns."
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass to save memory.")
    router_replay: Literal["none", "old"] = option(
        "none",
        "`old`: updates of a mixture of experts use the experts that the policy before the update chose, token by "
        "token, so that ratios compare the same function, with the current gate's weights. Matters where a batch has "
        "several updates.",
    )
    num_threads: int | None = option(
        None, "CPU threads per rank; by default, all cores shared between the ranks.", ge=1
    )
    max_nonfinite_steps: int = option(3, "Stop after this many steps in a row with non-finite gradients.", ge=1)

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            TRAINERS.path(name)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return name

    @field_validator("parallel")
    @classmethod
    def _divisible(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if parallel.num_ranks > 1 and info.data.get("backend") == "deepspeed":
            raise ValueError(
                "the back-end deepspeed spreads weights over all ranks and divides nothing else: leave "
                "training.parallel out (training.deepspeed has settings of its own), or take the back-end torch"
            )
        if info.data.get("backend") == "megatron" and (parallel.cp, parallel.dp_replicate) != (1, 1):
            raise ValueError("of training.parallel, the back-end megatron takes tp and pp: leave out the others")
        return parallel

    @field_validator("deepspeed")
    @classmethod
    def _is_used(cls, deepspeed: DeepSpeedConfig, info: ValidationInfo) -> DeepSpeedConfig:
        if deepspeed != DeepSpeedConfig() and info.data.get("backend") == "torch":
            raise ValueError("only the back-end deepspeed reads this: set training.backend to it, or leave this out")
        return deepspeed

    @field_validator("warmup_steps")
    @classmethod
    def _warm_up_ends(cls, value: int, info: ValidationInfo) -> int:
        num_steps = info.data.get("num_steps", value)
        if 0 < num_steps < value:  # without a number of its own, the data decide
            raise ValueError(f"{value} exceeds training.num_steps {num_steps}: lower the one or raise the other")
        return value
