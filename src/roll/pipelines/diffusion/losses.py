"""The loss of a configured method."""

from __future__ import annotations

from roll.config.diffusion import (
    DDPOConfig,
    DPOConfig,
    FlowGRPOConfig,
    FlowMatchingConfig,
    NFTConfig,
    RewardGradientConfig,
    RewardWeightedConfig,
)
from roll.config.pipelines.diffusion import DiffusionConfig
from roll.diffusion.losses import (
    DiffusionLoss,
    DPOLoss,
    FlowMatchingLoss,
    NFTLoss,
    PolicyGradientLoss,
    RewardGradientLoss,
)
from roll.user_code import check_call, load_function

__all__ = ["build_loss"]


def build_loss(config: DiffusionConfig) -> DiffusionLoss | RewardGradientLoss:
    """Return the loss of a configured method.

    Raises:
        ConfigError: The user's differentiable reward cannot be imported, or does not accept (images, prompts).
    """
    match config.algorithm:
        case FlowMatchingConfig() as flow:
            return FlowMatchingLoss(num_draws=flow.num_draws, density=flow.density, prompt_dropout=flow.prompt_dropout)
        case RewardWeightedConfig() as weighted:
            return FlowMatchingLoss(num_draws=weighted.num_draws, density=weighted.density)
        case DPOConfig() as dpo:
            return DPOLoss(beta=dpo.beta, num_draws=dpo.num_draws, density=dpo.density)
        case FlowGRPOConfig() as grpo:
            return PolicyGradientLoss(
                clip_range=grpo.clip_range,
                max_advantage=grpo.max_advantage,
                kl_coefficient=grpo.kl_coefficient,
                kl_variant=grpo.kl_variant,
                noise_level=config.sampling.noise_level,
            )
        case DDPOConfig() as ddpo:
            return PolicyGradientLoss(
                clip_range=ddpo.clip_range,
                max_advantage=ddpo.max_advantage,
                noise_level=config.sampling.noise_level,
            )
        case NFTConfig() as nft:
            return NFTLoss(
                beta=nft.beta,
                max_advantage=nft.max_advantage,
                kl_coefficient=nft.kl_coefficient,
                distance=nft.loss_target,
                num_draws=nft.num_draws,
            )
        case RewardGradientConfig() as gradient:
            function = load_function(gradient.reward, "reward function")
            check_call(function, f"reward function '{gradient.reward}'", "images", "prompts")
            return RewardGradientLoss(
                reward=gradient.reward,
                options=gradient.options,
                num_gradient_steps=gradient.num_gradient_steps,
                scale=gradient.scale,
                mean=gradient.mean,
                std=gradient.std,
                kl_coefficient=gradient.kl_coefficient,
            )
