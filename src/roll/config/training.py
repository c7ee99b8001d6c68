"""The section `training`: the trainer's back-end, optimizer and memory settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import ValidationInfo, field_validator

from roll.config.base import EXTENSION_PATTERN, Section, option
from roll.config.deepspeed import DeepSpeedConfig
from roll.config.model import ModelConfig
from roll.config.parallel import ParallelConfig
from roll.extensions import ExtensibleRegistry
from roll.user_code import check_factory

if TYPE_CHECKING:
    from roll.protocols import TrainBackend

__all__ = ["TRAINERS", "Fp8Recipe", "TrainingConfig", "check_back_end", "should_trim_heap"]

Fp8Recipe: TypeAlias = Literal["none", "rowwise_with_gw_hp", "rowwise"]

TRAINERS: ExtensibleRegistry[Callable[..., TrainBackend]] = ExtensibleRegistry(
    "training back-end",
    {
        "torch": "roll.training.backend:TorchBackend",
        "deepspeed": "roll.training.deepspeed.backend:DeepSpeedBackend",
        "megatron": "roll.training.megatron.backend:MegatronBackend",
    },
    group="roll.trainers",
)
"""The training back-ends by name: classes that build one rank of a trainer from a `roll.training.TrainerSpec`.

They are registered here so that an unknown name is rejected when a configuration is loaded."""


def check_back_end(name: str) -> None:
    """Check, before a run starts, that a user-defined training back-end can be used.

    Raises:
        ConfigError: The back-end cannot be imported, does not accept a spec, or its class lacks a method.
    """
    if name in TRAINERS.built_in_names:
        return
    from roll.protocols import TrainBackend

    methods = [each for each, value in vars(TrainBackend).items() if not each.startswith("_") and callable(value)]
    check_factory(TRAINERS.get(name), f"training.backend '{name}'", methods, "spec")


class TrainingConfig(Section):
    """Training of the policy."""

    num_steps: int = option(
        ...,
        "Number of steps of the run. Each step samples prompts, generates rollouts, and updates the policy as "
        "configured in `algorithm.updates`.",
        ge=1,
        examples=[40],
    )
    optimizer: Literal["adamw", "adamw_8bit"] = option(
        "adamw",
        "`adamw`: AdamW. `adamw_8bit`: AdamW with blockwise 8-bit moments for matrices (arXiv 2110.02861), which take "
        "2 bytes per weight instead of 8.",
    )
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Decay of the learning rate after warm-up, over all updates of the run."
    )
    warmup_steps: int = option(0, "Number of steps over which the learning rate increases from 0.", unit="steps", ge=0)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    beta1: float = option(0.9, "AdamW: decay of the first moment.", ge=0, lt=1)
    beta2: float = option(0.999, "AdamW: decay of the second moment.", ge=0, lt=1)
    epsilon: float = option(1e-8, "AdamW: constant that is added to the denominator.", gt=0)
    max_grad_norm: float = option(1.0, "Maximum gradient norm; larger gradients are scaled down to it.", gt=0)
    backend: str = option(
        "torch",
        "Training back-end: `torch`, or one of the extras `deepspeed` and `megatron`. For your own back-end, the name "
        "that an installed package registers (entry points `roll.trainers`), or `path/to/file.py:Class`.",
        pattern=EXTENSION_PATTERN,
    )
    parallel: ParallelConfig = option(
        ParallelConfig(),
        "Parallel layout of the ranks (back-end `torch`; `megatron` supports all sizes except `vpp` and "
        "`dp_replicate`).",
    )
    deepspeed: DeepSpeedConfig = option(DeepSpeedConfig(), "Sharding and offload of the back-end `deepspeed`.")
    max_tokens_per_micro_batch: int = option(
        4096,
        "Maximum number of packed tokens per micro-batch; limits memory and does not change the result.",
        unit="tokens",
        ge=1,
    )
    share_prefix: bool = option(
        True, "Whether the common prefix of a group's rollouts (the prompt and earlier turns) is computed only once."
    )
    activation_checkpointing: bool = option(
        False,
        "Whether to store only the input of every decoder layer and recompute the layer in the backward pass "
        "(gradient checkpointing). This greatly reduces activation memory and adds about a third of the computation.",
    )
    fp8: Fp8Recipe = option(
        "none",
        "Torchao recipe for computing the decoder's linear layers with FP8 (e4m3) matmuls. "
        "`rowwise_with_gw_hp`: the gradients of weights are computed in bfloat16. `rowwise`: they are also computed in "
        "FP8, which is at most a third faster and less accurate. Each token, output feature and input feature has its "
        "own scale. The model's dtype must be bfloat16; master weights do not change. FP8 needs an H100 or newer; on a "
        "CPU it is slow. Only the back-end `torch` supports it.",
    )
    tiled_mlp_tokens: int | None = option(
        None,
        "Number of tokens that an MLP processes at a time (tiled MLP). Only the input of each layer's MLP is stored, "
        "and the MLP is recomputed in the backward pass. For long sequences, set activation_checkpointing as well.",
        unit="tokens",
        ge=1,
    )
    offload_optimizer: bool = option(
        False,
        "Whether master weights, AdamW's moments and accumulated gradients are offloaded to host memory and AdamW "
        "runs on the CPU. The device then stores only the weights. Updates take longer, because they run on the CPU "
        "and transfer data. Only the back-end `torch` supports this.",
    )
    offload_activations: bool = option(
        False,
        "Whether saved activations are offloaded to host memory. With activation_checkpointing, only the inputs of "
        "layers are transferred. Only the back-end `torch` supports this.",
    )
    malloc_trim: bool | None = option(
        None,
        "Whether to call malloc_trim when free heap memory exceeds an eighth of the size of the live tensors (only "
        "on a CPU). Without it, fragmentation can use as much memory as the activations. It can take a seventh of a "
        "step's time. By default, it is on if there are several ranks or another memory-saving setting is on "
        "(activation_checkpointing, tiled_mlp_tokens, adamw_8bit, nf4).",
    )
    router_replay: Literal["none", "old", "engine"] = option(
        "none",
        "Router replay: which experts an MoE model uses during updates, for every token and layer. `none`: the experts "
        "that the current router chooses. `old`: the experts that the policy before the update chose, so that ratios "
        "compare the same function; this makes a difference if a batch has several updates. `engine`: the experts "
        "that the inference engine chose for prompt and answer, so that trainer and engine also compute the same "
        "function. Recording them takes num_layers × top_k bytes per token, or twice that with more than 128 "
        "experts. The routing weights always come from the current router.",
    )
    router_aux_loss: float = option(
        0.0,
        "Coefficient of the load-balancing loss of MoE routers (Switch, arXiv 2101.03961), which is computed over "
        "all tokens of a batch. In a model's configuration, this coefficient is called `router_aux_loss_coef`. The "
        "default is 0, because pretrained models are balanced and the auxiliary loss competes with the reward. A "
        "value above 0 needs one more forward pass.",
        ge=0,
    )
    router_bias_rate: float = option(
        0.0,
        "Amount by which each expert's bias (`e_score_correction_bias` in DeepSeek-V3 and GLM-MoE) changes after an "
        "update: it increases if the expert was chosen less often than the mean, and decreases if it was chosen more "
        "often (arXiv 2408.15664, which uses 0.001 in pretraining).",
        ge=0,
    )
    num_threads: int | None = option(
        None, "Number of CPU threads per rank; by default all cores, divided among the ranks.", ge=1
    )
    max_nonfinite_steps: int = option(
        3, "Maximum number of consecutive steps with non-finite gradients; then the run stops.", ge=1
    )

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, name: str, info: ValidationInfo) -> str:
        if name in ("deepspeed", "megatron") and info.data.get("optimizer") != "adamw":
            raise ValueError(f"the {name} back-end supports only 32-bit AdamW: set training.optimizer to adamw")
        return TRAINERS.validate_name(name)

    @field_validator("parallel")
    @classmethod
    def _check_parallel(cls, parallel: ParallelConfig, info: ValidationInfo) -> ParallelConfig:
        if parallel.num_ranks > 1 and info.data.get("backend") == "deepspeed":
            raise ValueError(
                "the deepspeed back-end does not support training.parallel: remove it (training.deepspeed configures "
                "the sharding), or use the torch back-end"
            )
        if info.data.get("backend") == "megatron" and (parallel.dp_replicate, parallel.vpp) != (1, 1):
            raise ValueError(
                "the megatron back-end does not support dp_replicate and vpp of training.parallel: remove them, or use "
                "the torch back-end"
            )
        return parallel

    @field_validator("router_aux_loss", "router_bias_rate")
    @classmethod
    def _check_router_settings(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("backend") == "deepspeed":
            raise ValueError(
                "the deepspeed back-end does not support load balancing of experts: set this key to 0, or "
                "training.backend to torch"
            )
        return value

    @field_validator("offload_optimizer", "offload_activations", "fp8")
    @classmethod
    def _check_backend_support(cls, value: bool | Fp8Recipe, info: ValidationInfo) -> bool | Fp8Recipe:
        backend = info.data.get("backend")
        if value not in (False, "none") and backend in ("deepspeed", "megatron"):
            has_own = backend == "deepspeed" and info.field_name != "fp8"
            own = " (DeepSpeed's own is training.deepspeed.offload_optimizer)" if has_own else ""
            raise ValueError(
                f"the back-end {backend} does not support this key: set training.backend to torch, or remove the "
                f"key{own}"
            )
        return value

    @field_validator("tiled_mlp_tokens")
    @classmethod
    def _check_tiled_mlp(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("backend") == "megatron":
            raise ValueError(
                "the back-end megatron does not support tiled MLPs: remove this key and set "
                "training.activation_checkpointing, or set training.backend to torch"
            )
        return value

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, deepspeed: DeepSpeedConfig, info: ValidationInfo) -> DeepSpeedConfig:
        if deepspeed != DeepSpeedConfig() and info.data.get("backend") == "torch":
            raise ValueError(
                "this section is supported only with the deepspeed back-end: set training.backend, or remove the "
                "section"
            )
        return deepspeed

    @field_validator("warmup_steps")
    @classmethod
    def _check_warmup_steps(cls, value: int, info: ValidationInfo) -> int:
        num_steps = info.data.get("num_steps", value)
        if 0 < num_steps < value:  # 0: the data determines the number of steps
            raise ValueError(f"must be <= training.num_steps {num_steps}, got {value}: lower it, or raise num_steps")
        return value


def should_trim_heap(model: ModelConfig, training: TrainingConfig, num_ranks: int) -> bool:
    """Return whether a trainer with `num_ranks` ranks on a CPU returns free heap memory to the system."""
    if training.malloc_trim is not None or training.backend != "torch":
        return bool(training.malloc_trim) and training.backend == "torch"
    in_4_bits = model.lora is not None and model.lora.base == "nf4"
    smaller = training.activation_checkpointing or training.tiled_mlp_tokens is not None
    return smaller or in_4_bits or training.optimizer == "adamw_8bit" or num_ranks > 1
