"""Sections of the pipeline `diffusion`: model, data, rewards, sampling, algorithm, training and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from roll.config.base import EXTENSION_PATTERN, FUNCTION_PATTERN, NAME_PATTERN, Section, option, path_option
from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig

__all__ = [
    "DDPOConfig",
    "DPOConfig",
    "DiffusionAlgorithm",
    "DiffusionDataConfig",
    "DiffusionEvaluationConfig",
    "DiffusionModelConfig",
    "DiffusionTrainingConfig",
    "FlowGRPOConfig",
    "FlowMatchingConfig",
    "ImageRewardConfig",
    "NFTConfig",
    "OnlineAlgorithmConfig",
    "RewardGradientConfig",
    "RewardWeightedConfig",
    "SamplingConfig",
]


class DiffusionModelConfig(ModelConfig):
    """The diffusion model. `model: NAME` is shorthand for `model: {path: NAME}`."""

    path: str = path_option(
        ...,
        "A pipeline directory of diffusers (Stable Diffusion 3, Flux, Wan), or the import path of your own subclass of "
        "`roll.diffusion.models.DiffusionModel`: `path/to/file.py:Class`.",
        examples=["models/stable-diffusion-3.5-medium", "examples/diffusion/digits.py:DigitFlow"],
        min_length=1,
    )
    dtype: Literal["bfloat16", "float32"] = option(
        "float32", "Compute dtype of the denoiser; master weights are always float32."
    )
    weights: str | None = path_option(
        None,
        "Run, checkpoint or export with the denoiser's weights; by default the weights of `path`, which for a class of "
        "your own may be random.",
        examples=["runs/digits-base"],
    )
    options: dict[str, Any] = option({}, "Keyword arguments of your own class.")
    height: int = option(512, "Height of images; for pipeline directories.", unit="pixels", ge=1)
    width: int = option(512, "Width of images; for pipeline directories.", unit="pixels", ge=1)
    num_frames: int = option(1, "Number of frames of a video; for pipeline directories.", ge=1)
    embedded_guidance: float = option(
        3.5, "Guidance scale that guidance-distilled denoisers (Flux.1 dev) get as an input.", ge=0
    )

    max_prompt_tokens: int | None = option(
        None, "Length to which prompts are padded or cut; by default that of the pipeline.", unit="tokens", ge=1
    )

    @property
    def sizes(self) -> dict[str, Any]:
        """The keyword arguments of `roll.diffusion.models.pipelines.PipelineModel`."""
        names = ("height", "width", "num_frames", "embedded_guidance", "max_prompt_tokens")
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.lora is not None and self.lora.base != "as_is":
            raise ValueError(f"lora.base {self.lora.base} is not supported for diffusion models: set it to as_is")
        if self.lora is not None and self.lora.dropout:
            raise ValueError(
                "lora.dropout is not supported for diffusion models, because samples and updates must use the same "
                "policy: set it to 0"
            )
        if self.vision.freeze or self.vision.learning_rate_factors:
            raise ValueError("`vision` is supported only for vision-language models: remove it")
        return self


class DiffusionDataConfig(Section):
    """Prompts, with images for methods that learn from given images."""

    path: str = path_option(..., "A JSONL or Parquet file.", min_length=1, examples=["data/prompts.jsonl"])
    held_out_path: str | None = path_option(None, "File for evaluation; if set, no rows of `path` are held out.")
    held_out: float = option(
        0.0,
        "Fraction of the rows that is used only for evaluation. With 0, evaluation uses prompts of training, with "
        "other noise.",
        ge=0,
        lt=1,
    )
    domain: str = option("images", "Name of the source; several sources need different names.", min_length=1)
    weight: float = option(1.0, "Fraction of each step's rows, relative to the other sources.", gt=0)
    prompt_key: str = option("prompt", "Column with the prompt.")
    image_key: str = option("image", "Column with the path of the image, relative to the file; for `flow_matching`.")
    chosen_key: str = option("chosen", "Column with the path of the preferred image; for `dpo`.")
    rejected_key: str = option("rejected", "Column with the path of the other image; for `dpo`.")
    first_frame_key: str | None = option(
        None, "Column with the path of a video's first frame, which every denoising step restores (image-to-video)."
    )


class ImageRewardConfig(Section):
    """A reward of images: your own function `def reward(image, prompt, metadata) -> float`.

    `image` is a `PIL.Image`; for a video, a list of them. The function runs in a worker process.
    """

    function: str = path_option(
        ...,
        "Import path of the function: `package.module:function`, or `path/to/file.py:function`.",
        examples=["rewards.py:is_bright"],
        pattern=FUNCTION_PATTERN,
    )
    name: str = option("", "Name in metrics; by default the function's name.", pattern=rf"^$|{NAME_PATTERN}")
    weight: float = option(1.0, "Weight in the sum of rewards; 0 only measures.")
    options: dict[str, Any] = option({}, "Additional keyword arguments of the function.")
    time_limit_s: float = option(30.0, "Timeout of one call.", unit="s", gt=0)

    @property
    def label(self) -> str:
        """The reward's name in metrics."""
        return self.name or self.function.rpartition(":")[2]


class SamplingConfig(Section):
    """Settings of denoising for training. Guidance is part of the policy, so updates use it as well."""

    num_steps: int = option(10, "Number of denoising steps.", ge=1, le=1000)
    shift: float = option(
        1.0, "Shift of noise levels towards noise, as in Stable Diffusion 3 (3.0) and Wan (5.0).", gt=0
    )
    guidance_scale: float = option(1.0, "Scale of classifier-free guidance; 1 disables it.", ge=0)
    noise_level: float = option(
        0.7, "Noise level of SDE steps, which explore; for `flow_grpo` and `ddpo`. Evaluation uses the ODE.", ge=0
    )
    num_stochastic_steps: int | None = option(
        None,
        "Number of SDE steps, which are the first steps and are used for training; later steps are ODE steps. By "
        "default, all steps are SDE steps.",
        ge=1,
    )
    batch_size: int = option(16, "Number of samples that a rank denoises at once.", ge=1)


class FlowMatchingConfig(Section):
    """Flow matching on given images (arXiv 2210.02747): pretraining and fine-tuning."""

    type: Literal["flow_matching"] = option(..., "Name of the method.")
    num_draws: int = option(1, "Number of noise levels per image and step.", ge=1)
    density: Literal["uniform", "logit_normal"] = option(
        "uniform", "Density of noise levels; `logit_normal` as in Stable Diffusion 3."
    )
    prompt_dropout: float = option(
        0.1, "Probability with which a prompt is replaced by the empty one, which guidance needs.", ge=0, le=1
    )


class DPOConfig(Section):
    """Diffusion-DPO on pairs of images (arXiv 2311.12908)."""

    type: Literal["dpo"] = option(..., "Name of the method.")
    beta: float = option(2000.0, "Strength of the KL penalty; larger values stay closer to the reference.", gt=0)
    num_draws: int = option(1, "Number of noise levels per pair and step.", ge=1)
    density: Literal["uniform", "logit_normal"] = option("uniform", "Density of noise levels.")


class OnlineAlgorithmConfig(Section):
    """Common keys of methods that learn from the rewards of the policy's samples."""

    samples_per_prompt: int = option(8, "Number of samples per prompt: the group.", ge=2)
    advantage_std: Literal["group", "batch", "none"] = option(
        "group",
        "Standard deviation by which advantages are divided: of the prompt's rewards, or of all rewards of the step.",
    )
    max_advantage: float = option(5.0, "Largest absolute advantage; larger ones are clipped.", gt=0)
    num_minibatches: int = option(1, "Number of optimizer steps into which a batch is split.", ge=1)
    num_epochs: int = option(1, "Number of passes over a batch.", ge=1)


class FlowGRPOConfig(OnlineAlgorithmConfig):
    """Flow-GRPO: GRPO on the SDE steps of a flow model (arXiv 2505.05470)."""

    type: Literal["flow_grpo"] = option(..., "Name of the method.")
    clip_range: float = option(
        1e-4, "Clipping of the ratio. Log-probs are means over the latents' entries, so ratios are close to 1.", gt=0
    )
    kl_coefficient: float = option(0.04, "Coefficient of the KL divergence from the initial policy.", ge=0)
    kl_variant: Literal["published", "exact"] = option(
        "published",
        "`exact`: divergence of the two Gaussians of a step. `published`: without the step size, as in the code of "
        "Flow-GRPO, for whose coefficients the published values hold.",
    )
    turning_points: Literal["none", "loose", "strict"] = option(
        "none",
        "TurningPoint-GRPO (arXiv 2602.06422): rewards of single steps, from ODE completions after every step, with "
        "the total effect at turning points. Costs one completion per step.",
    )


class DDPOConfig(OnlineAlgorithmConfig):
    """DDPO with importance sampling (arXiv 2305.13301), on the SDE steps of a flow model; no KL penalty.

    Rewards are normalized over the samples of a prompt in a step; the paper uses running statistics instead.
    """

    type: Literal["ddpo"] = option(..., "Name of the method.")
    clip_range: float = option(1e-4, "Clipping of the ratio.", gt=0)


class RewardWeightedConfig(OnlineAlgorithmConfig):
    """Reward-weighted regression (arXiv 2305.13301): flow matching on the policy's samples, weighted by exp(R /
    temperature)."""

    type: Literal["reward_weighted"] = option(..., "Name of the method.")
    temperature: float = option(0.2, "Temperature of the weights.", gt=0)
    num_draws: int = option(4, "Number of noise levels per sample.", ge=1)
    density: Literal["uniform", "logit_normal"] = option("uniform", "Density of noise levels.")


class NFTConfig(OnlineAlgorithmConfig):
    """DiffusionNFT (arXiv 2509.16117): good and bad samples of an old policy, without likelihoods."""

    type: Literal["nft"] = option(..., "Name of the method.")
    beta: float = option(1.0, "Strength of the guidance between old and current policy.", gt=0)
    kl_coefficient: float = option(1e-4, "Coefficient of the squared distance from the reference's velocities.", ge=0)
    loss_target: Literal["x0", "velocity"] = option(
        "x0", "Quantity whose squared error is the loss; `x0` as in the published code."
    )
    num_draws: int | None = option(
        None, "Number of noise levels per sample; by default the noise levels of the sampler.", ge=1
    )
    old_decay_start_step: int = option(0, "Step up to which the old policy equals the current policy.", ge=0)
    old_decay_rate: float = option(0.001, "Growth per step of the old policy's decay.", ge=0)
    old_max_decay: float = option(0.5, "Largest decay: weight of the old policy in its moving average.", ge=0, lt=1)

    def compute_old_decay(self, step: int) -> float:
        """Return the weight of the old policy in the moving average after a step."""
        return min(max(step - self.old_decay_start_step, 0) * self.old_decay_rate, self.old_max_decay)


class RewardGradientConfig(Section):
    """Reward-FL (IPRO, arXiv 2510.14255): backpropagation of a differentiable reward through denoising steps."""

    type: Literal["reward_gradient"] = option(..., "Name of the method.")
    reward: str = path_option(
        ...,
        "Import path of the differentiable reward: `def reward(images, prompts) -> Tensor`, with images "
        "[B, C, H, W] (videos [B, F, C, H, W]) in [0, 1] and rewards [B].",
        examples=["rewards.py:similarity"],
        pattern=FUNCTION_PATTERN,
    )
    options: dict[str, Any] = option({}, "Additional keyword arguments of the reward.")
    num_gradient_steps: int = option(4, "Number of last denoising steps with gradients.", ge=1)
    scale: float = option(0.1, "Factor on the normalized reward.", gt=0)
    mean: float = option(0.0, "Value that is subtracted from the reward.")
    std: float = option(1.0, "Value by which the reward is divided.", gt=0)
    kl_coefficient: float = option(1.0, "Coefficient of the divergence from the initial policy.", ge=0)
    samples_per_prompt: int = option(1, "Number of samples per prompt.", ge=1)


DiffusionAlgorithm: TypeAlias = Annotated[
    FlowMatchingConfig
    | DPOConfig
    | FlowGRPOConfig
    | DDPOConfig
    | RewardWeightedConfig
    | NFTConfig
    | RewardGradientConfig,
    Field(discriminator="type"),
]


_LANGUAGE_MODEL_KEYS = (
    "max_tokens_per_micro_batch",
    "share_prefix",
    "fp8",
    "tiled_mlp_tokens",
    "offload_activations",
    "router_replay",
    "router_aux_loss",
    "router_bias_rate",
)
"""Keys of `training` that only language models use."""


class DiffusionTrainingConfig(TrainingConfig):
    """Training of the denoiser."""

    learning_rate: float = option(1e-4, "Peak learning rate of AdamW.", gt=0)
    num_steps: int = option(..., "Number of steps of the run.", ge=1, examples=[100])
    prompts_per_step: int = option(8, "Number of rows of data drawn for each step: prompts, images or pairs.", ge=1)
    micro_batch_size: int = option(
        16,
        "Number of inputs of the denoiser in a forward and backward pass, on each rank; it does not change the result.",
        ge=1,
    )
    backend: str = option(
        "torch", "Training back-end; only `torch` trains diffusion models.", pattern=EXTENSION_PATTERN
    )

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.backend != "torch":
            raise ValueError(
                f"the back-end {self.backend} does not support diffusion models: set training.backend to torch"
            )
        for name in _LANGUAGE_MODEL_KEYS:
            if getattr(self, name) != TrainingConfig.model_fields[name].default:
                raise ValueError(f"training.{name} has no effect on diffusion models: remove it")
        if self.parallel.num_ranks > 1 or self.parallel.ep > 1:
            raise ValueError(
                "training.parallel: tp, cp, pp and ep are not supported for diffusion models, which are sharded with "
                "FSDP2 over all ranks: remove them"
            )
        return self


class DiffusionEvaluationConfig(Section):
    """Evaluation with ODE samples from fixed noise. Methods that learn from fixed images also report the loss."""

    every_num_steps: int = option(20, "Evaluate every N steps; 0 means only before and after training.", ge=0)
    before_training: bool = option(True, "Whether to evaluate before the first step as well.")
    num_prompts: int = option(8, "Maximum number of prompts.", ge=1)
    samples_per_prompt: int = option(4, "Number of samples per prompt.", ge=1)
    num_sampling_steps: int | None = option(None, "Number of denoising steps; by default `sampling.num_steps`.", ge=1)
    rewards: list[ImageRewardConfig] = option(
        [], "Further rewards that are only measured, such as a classifier that training does not use."
    )
