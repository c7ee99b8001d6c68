"""Backpropagation of a differentiable reward through the last denoising steps (Reward-FL, IPRO, arXiv 2510.14255).

    noise ─ ODE steps without gradients ─► x ─ last K steps with gradients ─► x_0 ─ decode ─► images ─► R
    loss = -scale (R - mean) / std + kl mean over the K steps of mean (v - v_ref)^2 / (2 sigma^2)

The reward is a torch function of a batch of images. The noise is seeded by the draw, because with constant noise the
policy would overfit to this noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.diffusion.losses.base import CopyName
from roll.diffusion.steps import compute_entry_mean, expand
from roll.errors import LossError, find_raise_location, one_line_error
from roll.user_code import load_function

__all__ = ["RewardGradientLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardGradientLoss:
    """The loss of Reward-FL. The trainer generates the samples, because the loss needs gradients through them."""

    reward: str
    """Import path of the reward, `function(images, prompts, **options)`, which returns [B] values. Images are
    [B, C, H, W], videos [B, F, C, H, W], in [0, 1]."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the reward."""
    num_gradient_steps: int = 4
    """Number K of last steps with gradients."""
    scale: float = 0.1
    """Factor on the normalized reward."""
    mean: float = 0.0
    """Value that is subtracted from the reward."""
    std: float = 1.0
    """Value by which the reward is divided."""
    kl_coefficient: float = 1.0
    """Coefficient of the divergence from the initial policy."""

    compares_pairs = False

    @property
    def needs(self) -> frozenset[CopyName]:
        """Names of the weight copies that must predict velocities: `reference` with a KL penalty, otherwise none."""
        return frozenset[CopyName](("reference",) if self.kl_coefficient else ())

    def compute_rewards(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Return the rewards [B] of decoded images, with gradients.

        Raises:
            LossError: The reward function failed, or returned a tensor with the wrong shape or without a gradient.
        """
        function = load_function(self.reward, "reward function")
        try:
            found = function(images, prompts, **self.options)
        except Exception as error:
            raise LossError(
                f"reward '{self.reward}' failed ({find_raise_location(error)}): {one_line_error(error)}"
            ) from error
        if not isinstance(found, Tensor) or found.shape != (len(prompts),):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise LossError(
                f"reward '{self.reward}' returned {shape}, but must return a tensor of shape ({len(prompts)},)"
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise LossError(
                f"reward '{self.reward}' returned a value that does not depend on the images: compute it with torch, "
                "without detach and numpy"
            )
        return found.float()

    def compute_loss(self, rewards: Tensor, divergences: Tensor) -> Tensor:
        """Return the loss [B] from rewards [B] and divergences [B]."""
        return -self.scale * (rewards - self.mean) / self.std + self.kl_coefficient * divergences

    def compute_divergence(self, velocity: Tensor, reference: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
        """Return the divergence [B] of one step."""
        return compute_entry_mean((velocity - reference) ** 2 / (2 * expand(sigma, velocity) ** 2), mask)
