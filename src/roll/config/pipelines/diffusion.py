"""The configuration of diffusion and flow models: fine-tuning on images, and reinforcement learning from rewards."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from roll.config.base import option
from roll.config.diffusion import (
    DiffusionAlgorithm,
    DiffusionDataConfig,
    DiffusionEvaluationConfig,
    DiffusionModelConfig,
    DiffusionTrainingConfig,
    DPOConfig,
    FlowGRPOConfig,
    FlowMatchingConfig,
    ImageRewardConfig,
    OnlineAlgorithmConfig,
    RewardGradientConfig,
    SamplingConfig,
)
from roll.config.run import RunConfig

__all__ = ["DiffusionConfig"]


class DiffusionConfig(RunConfig):
    """Training of diffusion and flow models."""

    pipeline: Literal["diffusion"] = option("diffusion", "Name of the pipeline.")
    model: DiffusionModelConfig = option(..., "The model to train.", examples=["models/stable-diffusion-3.5-medium"])
    data: list[DiffusionDataConfig] = option(
        ..., "Sources of prompts and images.", min_length=1, examples=[[{"path": "data/prompts.jsonl"}]]
    )
    algorithm: DiffusionAlgorithm = option(..., "The method.", examples=[{"type": "flow_grpo"}])
    rewards: list[ImageRewardConfig] = option(
        [],
        "Rewards of images; their weighted sum is the reward of a sample.",
        examples=[[{"function": "rewards.py:score"}]],
    )
    sampling: SamplingConfig = option(SamplingConfig(), "How samples are generated.")
    training: DiffusionTrainingConfig = option(..., "Training of the denoiser.", examples=[{"num_steps": 100}])
    evaluation: DiffusionEvaluationConfig = option(DiffusionEvaluationConfig(), "Evaluation of samples.")
    reward_workers: int = option(1, "Number of worker processes for rewards.", ge=1)

    @field_validator("model", mode="before")
    @classmethod
    def _expand_model(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        algorithm = self.algorithm
        if isinstance(algorithm, OnlineAlgorithmConfig) and not any(reward.weight for reward in self.rewards):
            raise ValueError(f"algorithm.type {algorithm.type} requires `rewards` with a nonzero weight")
        if isinstance(algorithm, FlowMatchingConfig | DPOConfig | RewardGradientConfig) and self.rewards:
            raise ValueError(
                f"algorithm.type {algorithm.type} does not use `rewards`: move them to evaluation.rewards, which only "
                "measures"
            )
        domains = [entry.domain for entry in self.data]
        if twice := sorted({domain for domain in domains if domains.count(domain) > 1}):
            raise ValueError(f"duplicate source name '{twice[0]}': set a different `domain` for each source")
        labels = [reward.label for reward in (*self.rewards, *self.evaluation.rewards)]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"duplicate reward name '{twice[0]}': set a different `name` for each reward")
        if self.uses_log_probs and self.sampling.noise_level == 0:
            raise ValueError(f"algorithm.type {algorithm.type} requires SDE steps: set sampling.noise_level above 0")
        return self

    @property
    def uses_log_probs(self) -> bool:
        """True if the method needs the log-probs of SDE steps."""
        return self.algorithm.type in ("flow_grpo", "ddpo")

    @property
    def uses_reference(self) -> bool:
        """True if the method compares with the initial policy."""
        return isinstance(self.algorithm, DPOConfig) or getattr(self.algorithm, "kl_coefficient", 0.0) > 0

    @property
    def uses_turning_points(self) -> bool:
        """True if rewards of single steps are measured."""
        return isinstance(self.algorithm, FlowGRPOConfig) and self.algorithm.turning_points != "none"

    @property
    def samples_per_prompt(self) -> int:
        """The number of samples that a training step generates for each prompt."""
        return getattr(self.algorithm, "samples_per_prompt", 1)

    def with_model(self, path: str) -> Self:
        """Return the configuration with the weights in `path`, for `roll eval` of a trained model."""
        return self.model_copy(update={"model": self.model.model_copy(update={"weights": path})})
