"""Policy gradients on denoising steps: Flow-GRPO, TurningPoint-GRPO and DDPO.

Each SDE step is an action with a Gaussian policy. With log-density l (a mean over entries) and advantage A of the step:

    r    = exp(l_theta(x' | x) - l_old(x' | x))
    loss = max(-A r, -A clip(r, 1 - c, 1 + c)) + beta KL                                        arXiv 2505.05470

    KL, `exact`:       mean over entries of (mean - mean_ref)^2 / (2 std^2 (-d)): the divergence of the two Gaussians
    KL, `published`:   without (-d), as in the code of Flow-GRPO (its issue 78): the coefficients of its paper are for
                       this form

DDPO (arXiv 2305.13301) is the same without KL, with advantages that its pipeline normalizes per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll.diffusion.losses.base import CopyName, Term, Terms
from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.diffusion.steps import compute_entry_mean, compute_logprob, compute_sde_step

__all__ = ["PolicyGradientLoss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradientLoss:
    """The clipped policy gradient of SDE steps."""

    clip_range: float = 1e-4
    """Clipping c of the ratio. Log-densities are means over entries, so ratios are close to 1."""
    max_advantage: float = 5.0
    """Absolute value at which advantages are clipped."""
    kl_coefficient: float = 0.0
    """Coefficient beta of the KL divergence from the initial policy."""
    kl_variant: Literal["exact", "published"] = "exact"
    """Form of the KL divergence."""
    noise_level: float = 0.7
    """Noise level of the SDE that generated the samples."""

    compares_pairs = False

    @property
    def needs(self) -> frozenset[CopyName]:
        """Names of the weight copies that must predict velocities: `reference` with a KL penalty, otherwise none."""
        return frozenset[CopyName](("reference",) if self.kl_coefficient else ())

    def build_terms(self, sample: DiffusionSample, clean: Tensor, settings: DenoisingSettings) -> list[Term]:
        """Return one term per SDE step of the sample's path.

        Raises:
            ValueError: The sample has no path, or no advantages.
        """
        path, advantages = sample.path, sample.advantages
        if path is None or advantages is None:
            raise ValueError(f"sample {sample.sample_id} has no path or no advantages, which this loss requires")
        latents = torch.from_numpy(path.latents)
        return [
            Term(
                latents=latents[step],
                sigma=float(path.sigmas[step]),
                prompt=sample.prompt,
                data={
                    "next_latents": latents[step + 1],
                    "next_sigma": torch.tensor(path.sigmas[step + 1]),
                    "second_sigma": torch.tensor(path.sigmas[1]),
                    "advantage": torch.tensor(advantages[step]),
                    "old_logprob": torch.tensor(path.logprobs[step]),
                },
                first_frame=sample.first_frame,
            )
            for step in range(settings.stochastic_steps)
        ]

    def compute(self, velocity: Tensor, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the clipped loss [N] of the steps, and metrics of the ratio and the KL divergence."""
        data = terms.data
        now, then, second = terms.sigma, data["next_sigma"], data["second_sigma"]
        step = compute_sde_step(terms.latents, velocity, now, then, second, self.noise_level)
        logprob = compute_logprob(step, data["next_latents"], terms.mask)
        ratio = torch.exp(logprob - data["old_logprob"])
        advantage = data["advantage"].clamp(-self.max_advantage, self.max_advantage)
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        with torch.no_grad():
            metrics = {
                "ratio/mean": ratio,
                "ratio/clipped_share": ((ratio - 1).abs() > self.clip_range).float(),
                "ratio/approx_kl": 0.5 * (logprob - data["old_logprob"]) ** 2,
            }
        if self.kl_coefficient:
            other = compute_sde_step(
                terms.latents, terms.other_velocities["reference"], now, then, second, self.noise_level
            )
            scale = step.deviation if self.kl_variant == "exact" else step.diffusion
            kl = compute_entry_mean((step.mean - other.mean) ** 2 / (2 * scale**2), terms.mask)
            loss = loss + self.kl_coefficient * kl
            metrics["kl/mean"] = kl.detach()
        return loss, metrics
