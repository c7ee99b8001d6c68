"""Denoising steps of flow models: noise levels, the ODE step, the SDE step and its log-density.

The SDE has the same marginals as the ODE at every noise level a (Flow-GRPO, arXiv 2505.05470, Eq. 9 and 12). With
sigma' the next noise level and d = sigma' - sigma < 0:

    std   = a sqrt(sigma / (1 - sigma))                                        diffusion coefficient
    mean  = x (1 + std^2 d / (2 sigma)) + v (1 + std^2 (1 - sigma) / (2 sigma)) d
    x'    = mean + std sqrt(-d) eps

At a = 0, mean = x + v d: the Euler step of the ODE. At sigma = 1, the coefficient would be infinite, so it is computed
at the second noise level, as in the published code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["SDEStep", "compute_entry_mean", "compute_logprob", "compute_sde_step", "compute_sigmas", "expand"]


def compute_sigmas(num_steps: int, shift: float = 1.0) -> NDArray[np.float32]:
    """Return the noise levels [num_steps + 1] from 1 to 0: equally spaced, then shifted towards noise.

    The shift follows Stable Diffusion 3 (arXiv 2403.03206, Eq. 23).
    """
    even = np.linspace(1.0, 0.0, num_steps + 1)
    return (shift * even / (1.0 + (shift - 1.0) * even)).astype(np.float32)


class SDEStep(NamedTuple):
    """The Gaussian distribution of a step's next latents."""

    mean: Tensor
    """[B, *shape]"""
    diffusion: Tensor
    """[B, 1, …] diffusion coefficient std; the next latents have standard deviation std sqrt(-d)."""
    deviation: Tensor
    """[B, 1, …] standard deviation of the next latents."""


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Return values [B] in the shape [B, 1, …], so that they broadcast to a tensor `like` [B, *shape]."""
    return values.to(like).reshape(-1, *[1] * (like.ndim - 1))


def compute_sde_step(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    next_sigma: Tensor,
    second_sigma: float | Tensor,
    noise_level: float,
) -> SDEStep:
    """Return the distribution of the next latents.

    Args:
        latents: [B, *shape] latents x.
        velocity: [B, *shape] predicted velocity.
        sigma: [B] current noise levels.
        next_sigma: [B] next noise levels.
        second_sigma: The second noise level of the schedule, at which the coefficient of sigma = 1 is computed; a
            number or [B].
        noise_level: The noise level a.
    """
    sigma, next_sigma = expand(sigma, latents), expand(next_sigma, latents)
    d = next_sigma - sigma
    second = expand(second_sigma, latents) if isinstance(second_sigma, Tensor) else second_sigma
    safe = torch.where(sigma == 1, second, sigma)
    diffusion = noise_level * torch.sqrt(sigma / (1 - safe))
    mean = (
        latents * (1 + diffusion**2 / (2 * sigma) * d) + velocity * (1 + diffusion**2 * (1 - sigma) / (2 * sigma)) * d
    )
    return SDEStep(mean, diffusion, diffusion * torch.sqrt(-d))


def compute_entry_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean [B] over the entries of each sample; with a mask, over the entries where it is 1.

    Args:
        values: [B, *shape]
        mask: [B, *shape] or a shape that broadcasts to it; 0 at entries that are given, such as a first frame.
    """
    dims = tuple(range(1, values.ndim))
    if mask is None:
        return values.mean(dim=dims)
    mask = mask.expand_as(values)
    return (values * mask).sum(dim=dims) / mask.sum(dim=dims)


def compute_logprob(step: SDEStep, next_latents: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the log-density [B] of the next latents, as the mean over their entries (as in Flow-GRPO's code)."""
    squares = (next_latents - step.mean) ** 2 / (2 * step.deviation**2)
    return compute_entry_mean(-squares - torch.log(step.deviation) - 0.5 * math.log(2 * math.pi), mask)
