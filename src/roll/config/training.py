"""The trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import ValidationInfo, field_validator

from roll.config.base import EXTENSION, Section, option
from roll.config.deepspeed import DeepSpeedConfig
from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.extensions import ExtensibleRegistry
from roll.user_code import check_kind

if TYPE_CHECKING:
    from roll.protocols import TrainBackend

__all__ = ["TRAINERS", "Fp8Recipe", "TrainingConfig", "check_back_end", "trims_heap"]

Fp8Recipe: TypeAlias = Literal["none", "rowwise_with_gw_hp", "rowwise"]

TRAINERS: ExtensibleRegistry[Callable[..., TrainBackend]] = ExtensibleRegistry(
    "train back-end",
    {
        "torch": "roll.training.backend:TorchBackend",
        "deepspeed": "roll.training.deepspeed.backend:DeepSpeedBackend",
        "megatron": "roll.training.megatron.backend:MegatronBackend",
    },
    group="roll.trainers",
)
"""By name in `training.backend`, the class that builds one rank of a trainer from its `roll.training.TrainerSpec`.
It is defined here so that an unknown name is rejected when a configuration is loaded.
"""


def check_back_end(name: str) -> None:
    """Check that a train back-end of the user's own can be used, before a run starts.

    Raises:
        ConfigError: It cannot be imported, does not take a spec, or its class lacks a method.
    """
    if name in TRAINERS.built_in:
        return
    from roll.protocols import TrainBackend

    methods = [each for each, value in vars(TrainBackend).items() if not each.startswith("_") and callable(value)]
    check_kind(TRAINERS.get(name), f"training.backend '{name}'", methods, "spec")


class TrainingConfig(Section):
    """Optimisation of the policy."""

    num_steps: int = option(
        ...,
        "Steps of the run; each draws prompts, generates, and updates as `algorithm.updates` says.",
        ge=1,
        examples=[40],
    )
    optimizer: Literal["adamw", "adamw_8bit"] = option(
        "adamw",
        "`adamw_8bit` keeps AdamW's moments of matrices in 8 bits, block by block (arXiv 2110.02861): 2 bytes a weight "
        "instead of 8.",
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
        "Train back-end: `torch`, `deepspeed` or `megatron` (extras). Or one of your own: a name that an installed "
        "package gives (entry points `roll.trainers`), or `path/to/file.py:Class`.",
        pattern=EXTENSION,
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
    activation_checkpointing: bool = option(
        False,
        "Keep only every decoder layer's input, and compute the layer again in the backward pass: about a third more "
        "computation, and a small part of the activations' memory.",
    )
    fp8: Fp8Recipe = option(
        "none",
        "Compute linear layers of the decoder with products of 8-bit floating point (e4m3), by a recipe of torchao; "
        "the model's dtype is bfloat16, and weights are kept as without. Every token, output and input has a scale of "
        "its own. `rowwise_with_gw_hp` leaves weights' gradients in bfloat16; `rowwise` computes these in 8 bits, too: "
        "a third faster at best, less exact. Takes an H100 or the like; on a CPU it runs, slower. The back-end "
        "`torch`.",
    )
    tiled_mlp_tokens: int | None = option(
        None,
        "Tiled MLP: compute MLPs over this many tokens at a time and recompute them in the backward pass, so that only "
        "the input of a layer's MLP is stored. For long sequences, also with activation_checkpointing.",
        unit="tokens",
        ge=1,
    )
    offload_optimizer: bool = option(
        False,
        "Offload master weights, AdamW's moments and accumulated gradients to host memory, and run AdamW on the CPU: "
        "the device holds only the weights. Costs the CPU's update and the transfers. Back-end `torch`.",
    )
    offload_activations: bool = option(
        False,
        "Offload activations that the forward pass saves to host memory. Cheapest with activation_checkpointing, "
        "because then only the inputs of layers are transferred. Back-end `torch`.",
    )
    malloc_trim: bool | None = option(
        None,
        "On a CPU, call malloc_trim as soon as free heap memory exceeds an eighth of the live tensors; without it, "
        "fragmentation can cost as much memory as the activations. Costs up to a seventh of a step. By default on with "
        "another memory-saving setting (activation_checkpointing, tiled_mlp_tokens, adamw_8bit, nf4), and with several "
        "ranks.",
    )
    router_replay: Literal["none", "old", "engine"] = option(
        "none",
        "Which experts a mixture uses in updates, token by token and layer by layer, with the current gate's weights. "
        "`old`: those that the policy before the update chose, so that ratios compare the same function; matters where "
        "a batch has several updates. `engine`: those that the inference engine chose for prompt and answer, so that "
        "trainer and engine compute the same function, too; costs layers × experts per token in bytes for every token "
        "(twice that beyond 128 experts).",
    )
    router_aux_loss: float = option(
        0.0,
        "Coefficient of the loss by which a mixture's routers are kept even (Switch, arXiv 2101.03961), over all "
        "tokens of a batch; what `router_aux_loss_coef` is in the model's configuration. 0 by default: a reward is "
        "what is trained on, and the model comes balanced. Costs one more forward pass.",
        ge=0,
    )
    router_bias_rate: float = option(
        0.0,
        "By how much the bias of each expert (`e_score_correction_bias`: DeepSeek-V3, GLM-MoE) moves after an update: "
        "up where it was chosen less than the mean, down where more (arXiv 2408.15664, with 0.001 in pretraining).",
        ge=0,
    )
    num_threads: int | None = option(
        None, "CPU threads per rank; by default, all cores shared between the ranks.", ge=1
    )
    max_nonfinite_steps: int = option(3, "Stop after this many steps in a row with non-finite gradients.", ge=1)

    @field_validator("backend")
    @classmethod
    def _known(cls, name: str, info: ValidationInfo) -> str:
        if name == "deepspeed" and info.data.get("optimizer") != "adamw":
            raise ValueError("the back-end deepspeed has AdamW in 32 bits alone: set training.optimizer to adamw")
        return TRAINERS.checked(name)

    @field_validator("parallel")
    @classmethod
    def _divisible(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if parallel.num_ranks > 1 and info.data.get("backend") == "deepspeed":
            raise ValueError(
                "the back-end deepspeed spreads weights over all ranks and divides nothing else: leave "
                "training.parallel out (training.deepspeed has settings of its own), or take the back-end torch"
            )
        if info.data.get("backend") == "megatron" and (parallel.cp, parallel.dp_replicate, parallel.vpp) != (1, 1, 1):
            raise ValueError("of training.parallel, the back-end megatron takes tp and pp: leave out the others")
        return parallel

    @field_validator("router_aux_loss", "router_bias_rate")
    @classmethod
    def _balanced_by_torch(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("backend") == "deepspeed":
            raise ValueError("only the back-end torch keeps experts even: set it to 0, or training.backend to torch")
        return value

    @field_validator("offload_optimizer", "offload_activations", "fp8")
    @classmethod
    def _read_by_torch(cls, value: bool | Fp8Recipe, info: ValidationInfo) -> bool | Fp8Recipe:
        backend = info.data.get("backend")
        if value not in (False, "none") and backend in ("deepspeed", "megatron"):
            has_own = backend == "deepspeed" and info.field_name != "fp8"
            own = " (DeepSpeed's own is training.deepspeed.offload_optimizer)" if has_own else ""
            raise ValueError(
                f"the back-end {backend} does not read this: set training.backend to torch, or leave this out{own}"
            )
        return value

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
        if 0 < num_steps < value:  # 0: the data determines the number of steps
            raise ValueError(f"{value} exceeds training.num_steps {num_steps}: lower the one or raise the other")
        return value


def trims_heap(model: ModelConfig, training: TrainingConfig, num_ranks: int) -> bool:
    """Return whether a trainer with `num_ranks` ranks on a CPU returns free heap memory to the system."""
    if training.malloc_trim is not None or training.backend != "torch":
        return bool(training.malloc_trim) and training.backend == "torch"
    in_4_bits = model.lora is not None and model.lora.base == "nf4"
    smaller = training.activation_checkpointing or training.tiled_mlp_tokens is not None
    return smaller or in_4_bits or training.optimizer == "adamw_8bit" or num_ranks > 1
