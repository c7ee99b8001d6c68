"""Diffusion-DPO on pairs of images of one prompt (arXiv 2311.12908, Eq. 14, with the errors of flow matching).

    e    = mean over entries of (v - (eps - x_0))^2        at the same noise level and with the same noise for both
    loss = -log sigmoid(-beta / 2 ((e_w - e_w,ref) - (e_l - e_l,ref)))

The mean over pairs is outside of the log-sigmoid (diffusers, issue 6702).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll.diffusion.losses.base import CopyName, Term, Terms
from roll.diffusion.losses.flow_matching import FlowMatchingLoss
from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.diffusion.steps import compute_entry_mean

__all__ = ["DPOLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOLoss:
    """The loss of Diffusion-DPO."""

    beta: float = 2000.0
    """Strength of the deviation from the reference; larger values stay closer."""
    num_draws: int = 1
    """Number of noise levels per pair and step."""
    density: Literal["uniform", "logit_normal"] = "uniform"
    """Density of the noise levels."""

    needs = frozenset[CopyName](["reference"])
    compares_pairs = True

    def build_terms(self, sample: DiffusionSample, clean: Tensor, settings: DenoisingSettings) -> list[Term]:
        """Return the terms of flow matching. Both samples of a pair have the same seed and therefore the same noise."""
        return FlowMatchingLoss(num_draws=self.num_draws, density=self.density).build_terms(sample, clean, settings)

    def compute(self, velocity: Tensor, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics [N]: the term of the preferred sample has the pair's values, the other term has 0."""
        target = terms.data["target"]
        error = compute_entry_mean((velocity - target) ** 2, terms.mask)
        margin = compute_entry_mean((terms.other_velocities["reference"] - target) ** 2, terms.mask) - error
        won = 0.5 * self.beta * (margin[::2] - margin[1::2])
        zero = torch.zeros_like(won)
        loss = torch.stack([-logsigmoid(won), zero], dim=1).flatten()
        with torch.no_grad():
            metrics = {
                "preference/accuracy": torch.stack([(won > 0).float(), zero], dim=1).flatten(),
                "preference/margin": torch.stack([won, zero], dim=1).flatten(),
            }
        return loss, metrics
