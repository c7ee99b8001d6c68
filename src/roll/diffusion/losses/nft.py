"""DiffusionNFT: a policy gradient without likelihoods, on noised samples x_sigma of the old policy (arXiv 2509.16117).

    r    = clip(A, -m, m) / (2 m) + 1/2                              probability that the sample is good
    v+   = beta v_theta + (1 - beta) v_old                           implicit policy of good samples
    v-   = (1 + beta) v_old - beta v_theta                           implicit policy of bad samples
    loss = m (r D(v+) + (1 - r) D(v-)) / beta + kl mean (v_theta - v_ref)^2

    D, `x0`:         mean (x_sigma - sigma v - x_0)^2 / mean |x_sigma - sigma v - x_0|, with a constant divisor: the
                     published code, whose weights do not depend on the noise level
    D, `velocity`:   mean (v - (eps - x_0))^2: the paper's Eq. 5

The old policy generates the samples; after every step it moves towards the current policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll.diffusion.losses.base import CopyName, Term, Terms, interpolate
from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.diffusion.steps import compute_entry_mean, compute_sigmas, expand

__all__ = ["NFTLoss"]

MIN_DIVISOR = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class NFTLoss:
    """The loss of DiffusionNFT."""

    beta: float = 1.0
    """Strength of the guidance between old and current policy."""
    max_advantage: float = 5.0
    """Advantage m at which a sample is treated as good with probability 1."""
    kl_coefficient: float = 1e-4
    """Coefficient of the squared distance between the velocities of policy and reference."""
    distance: Literal["x0", "velocity"] = "x0"
    """Form of D in the loss; `x0` is the form of the published code."""
    num_draws: int | None = None
    """Number of the sampler's noise levels to use per sample; `None` for all."""

    compares_pairs = False

    @property
    def needs(self) -> frozenset[CopyName]:
        """Names of the weight copies that must predict velocities: `old`, and `reference` with a KL penalty."""
        return frozenset[CopyName](("old", "reference") if self.kl_coefficient else ("old",))

    def build_terms(self, sample: DiffusionSample, clean: Tensor, settings: DenoisingSettings) -> list[Term]:
        """Return one term per noise level.

        Raises:
            ValueError: The sample has no advantages.
        """
        if sample.advantages is None:
            raise ValueError(f"sample {sample.sample_id} has no advantages, which this loss requires")
        random = np.random.default_rng(sample.seed)
        sigmas = compute_sigmas(settings.num_steps, settings.shift)[:-1]
        if self.num_draws is not None and self.num_draws < len(sigmas):
            sigmas = np.sort(random.choice(sigmas, self.num_draws, replace=False))[::-1]
        terms = []
        for sigma in sigmas.tolist():
            noise = torch.from_numpy(random.standard_normal(clean.shape, dtype=np.float32))
            terms.append(
                Term(
                    latents=interpolate(clean, noise, sigma, keeps_first_frame=sample.first_frame is not None),
                    sigma=sigma,
                    prompt=sample.prompt,
                    data={"clean": clean, "noise": noise, "advantage": torch.tensor(sample.advantages[0])},
                    first_frame=sample.first_frame,
                )
            )
        return terms

    def compute(self, velocity: Tensor, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [N] of the terms, and metrics: the distance from the old policy and, with a KL coefficient,
        from the reference.
        """
        old, most, beta = terms.other_velocities["old"], self.max_advantage, self.beta
        good = terms.data["advantage"].clamp(-most, most) / (2 * most) + 0.5
        positive = self._compute_distance(beta * velocity + (1 - beta) * old, terms)
        negative = self._compute_distance((1 + beta) * old - beta * velocity, terms)
        loss = most * (good * positive + (1 - good) * negative) / beta
        metrics = {"old_policy/distance": compute_entry_mean((velocity.detach() - old) ** 2, terms.mask)}
        if self.kl_coefficient:
            distance = compute_entry_mean((velocity - terms.other_velocities["reference"]) ** 2, terms.mask)
            loss = loss + self.kl_coefficient * distance
            metrics["kl/mean"] = distance.detach()
        return loss, metrics

    def _compute_distance(self, velocity: Tensor, terms: Terms) -> Tensor:
        clean, noise = terms.data["clean"], terms.data["noise"]
        if self.distance == "velocity":
            return compute_entry_mean((velocity - (noise - clean)) ** 2, terms.mask)
        error = terms.latents - expand(terms.sigma, velocity) * velocity - clean
        divisor = compute_entry_mean(error.detach().abs().double(), terms.mask).clamp(min=MIN_DIVISOR).to(error)
        return compute_entry_mean(error**2, terms.mask) / divisor
