"""Flow matching on given images, or on weighted samples (reward-weighted regression).

    loss = mean over entries of (v(x_sigma, sigma) - (eps - x_0))^2                 arXiv 2210.02747, 2209.03003

With weights exp(R / temperature), normalized over the batch, on the policy's own samples this is reward-weighted
regression (arXiv 2305.13301, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll.diffusion.losses.base import CopyName, Term, Terms, interpolate
from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.diffusion.steps import compute_entry_mean

__all__ = ["FlowMatchingLoss", "draw_sigma"]


def draw_sigma(random: np.random.Generator, density: Literal["uniform", "logit_normal"]) -> float:
    """Return a random noise level in (0, 1): uniform, or logit-normal as in Stable Diffusion 3 (arXiv 2403.03206)."""
    if density == "uniform":
        return float(random.uniform(1e-3, 1.0))
    return float(1 / (1 + np.exp(-random.standard_normal())))


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowMatchingLoss:
    """The loss of flow matching."""

    num_draws: int = 1
    """Number of noise levels per sample and step."""
    density: Literal["uniform", "logit_normal"] = "uniform"
    """Density of the noise levels."""
    prompt_dropout: float = 0.0
    """Probability of replacing a prompt with the empty prompt, for classifier-free guidance."""

    needs = frozenset[CopyName]()
    compares_pairs = False

    def build_terms(self, sample: DiffusionSample, clean: Tensor, settings: DenoisingSettings) -> list[Term]:
        """Return `num_draws` terms at random noise levels."""
        random = np.random.default_rng(sample.seed)
        terms = []
        for _ in range(self.num_draws):
            sigma = draw_sigma(random, self.density)
            noise = torch.from_numpy(random.standard_normal(clean.shape, dtype=np.float32))
            drops = bool(random.random() < self.prompt_dropout)
            terms.append(
                Term(
                    latents=interpolate(clean, noise, sigma, keeps_first_frame=sample.first_frame is not None),
                    sigma=sigma,
                    prompt="" if drops else sample.prompt,
                    data={"target": noise - clean},
                    first_frame=sample.first_frame,
                )
            )
        return terms

    def compute(self, velocity: Tensor, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the squared error [N] of the terms, and no metrics."""
        return compute_entry_mean((velocity - terms.data["target"]) ** 2, terms.mask), {}
