"""The interface of losses: a loss consists of terms, and the denoiser predicts one velocity per term.

    sample ─ build_terms ─► terms ─ collated ─► denoiser ─► velocities ─ compute ─► one loss per term

The batch's loss is the mean over samples (over pairs, if the loss compares them) of the mean over a sample's terms, so
it does not depend on micro-batches or ranks. Random noise levels and noise of a term depend only on the sample's seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roll.diffusion.records import DenoisingSettings, DiffusionSample
from roll.models.transfers import move_to_device

__all__ = ["CopyName", "DiffusionLoss", "Term", "Terms", "collate", "interpolate"]

CopyName: TypeAlias = Literal["reference", "old"]
"""Other weights of the same denoiser: the initial ones, or the average of the policy that generated the samples."""


@dataclass(kw_only=True, slots=True)
class Term:
    """One input of the denoiser, and the tensors to which the loss compares the output; all are in host memory."""

    latents: Tensor
    """[*shape]"""
    sigma: float
    prompt: str
    data: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that the loss needs, by name; the shapes are identical in all terms of a batch."""
    loss_weight: float = 0.0
    """Weight of the term's loss in the loss of the batch; the trainer sets it."""
    first_frame: NDArray[np.uint8] | None = None
    """[H, W, C] first frame that was given for a video; its latents are not in the loss."""
    other_velocities: dict[str, Tensor] = field(default_factory=dict)
    """Velocities [*shape] predicted with other weights, by the name of the weights; the trainer sets them."""


@dataclass(kw_only=True, slots=True)
class Terms:
    """The stacked terms of a micro-batch, on the device."""

    latents: Tensor
    """[N, *shape]"""
    sigma: Tensor
    """[N]"""
    loss_weights: Tensor
    """[N] weights of the terms' losses in the loss of the batch."""
    data: Mapping[str, Tensor]
    """[N, …] tensors by name."""
    other_velocities: Mapping[str, Tensor]
    """[N, *shape] velocities predicted with other weights, by the name of the weights."""
    mask: Tensor | None = None
    """Loss mask that broadcasts to the latents: 0 at given latents; `None` if no latents are given."""


class DiffusionLoss(Protocol):
    """A loss; it must be picklable, since it is sent to the trainer's ranks."""

    @property
    def needs(self) -> frozenset[CopyName]:
        """Names of the weight copies that must predict velocities for the loss, in addition to the current weights."""
        ...

    @property
    def compares_pairs(self) -> bool:
        """True if the loss compares pairs of samples; the terms of a pair alternate, the preferred sample first."""
        ...

    def build_terms(self, sample: DiffusionSample, clean: Tensor, settings: DenoisingSettings) -> list[Term]:
        """Return the terms of a sample.

        Args:
            sample: The sample.
            clean: [*shape] latents x_0 of the sample.
            settings: The settings with which the sample was generated.
        """
        ...

    def compute(self, velocity: Tensor, terms: Terms) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [N] of every term, and metrics [N] without gradients.

        Args:
            velocity: [N, *shape] predicted velocities, with gradients.
            terms: The terms.
        """
        ...


def collate(terms: Sequence[Term], device: torch.device, mask: Tensor | None = None) -> Terms:
    """Stack terms, and move them to a device, in one copy."""
    stacked = Terms(
        latents=torch.stack([term.latents for term in terms]),
        sigma=torch.tensor([term.sigma for term in terms]),
        loss_weights=torch.tensor([term.loss_weight for term in terms]),
        data={name: torch.stack([term.data[name] for term in terms]) for name in terms[0].data},
        other_velocities={
            name: torch.stack([term.other_velocities[name] for term in terms]) for name in terms[0].other_velocities
        },
    )
    return replace(move_to_device(stacked, device), mask=mask)


def interpolate(clean: Tensor, noise: Tensor, sigma: float, *, keeps_first_frame: bool) -> Tensor:
    """Return x_sigma = (1 - sigma) x_0 + sigma eps; if `keeps_first_frame` is true, frame 0 remains x_0."""
    mixed = (1 - sigma) * clean + sigma * noise
    if keeps_first_frame:
        mixed[:, 0] = clean[:, 0]
    return mixed
