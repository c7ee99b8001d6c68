"""The interface of a diffusion model, which users implement for custom models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roll.errors import DataError

__all__ = ["Conditions", "DiffusionModel", "to_float_images", "to_uint8_images"]

Conditions: TypeAlias = Mapping[str, Tensor]
"""Inputs of the denoiser that depend on the prompt, by name; the first dimension is the batch."""


class DiffusionModel(ABC):
    """A denoiser, and the frozen parts that turn prompts into conditions and latents into images.

    Only `denoiser` is trained, sharded and saved. To add a custom model, subclass this class and name the subclass in
    the configuration: `model: path/to/file.py:Class`.
    """

    denoiser: nn.Module
    """The trained network."""
    latent_shape: tuple[int, ...]
    """Shape of one sample's latents, such as [C, H, W] or [C, F, H, W]."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        """Return the prompts' conditions on the denoiser's device. Classifier-free guidance uses the empty prompt."""

    @abstractmethod
    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Return the velocity v = eps - x_0 [B, *latent_shape] at latents x_sigma and noise levels sigma [B]."""

    def decode(self, latents: Tensor) -> Tensor:
        """Return images [B, C, H, W] or videos [B, F, C, H, W] in [0, 1], with gradients.

        By default, the latents are pixels in [-1, 1]."""
        return (latents / 2 + 0.5).clamp(0, 1)

    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        """Return the latents [B, *latent_shape] of images [B, H, W, C]; by default pixels in [-1, 1].

        A video model encodes first frames and returns latents [B, C, 1, H, W].

        Raises:
            DataError: The size of the images is not the model's image size.
        """
        pixels = to_float_images(images).to(self.device)
        if pixels.shape[1:] != torch.Size(self.latent_shape):
            raise DataError(
                f"images must have the shape {self.latent_shape} (channels, height, width), got "
                f"{tuple(pixels.shape[1:])}: resize or convert them"
            )
        return pixels * 2 - 1

    def impose_first_frame(self, latents: Tensor, first: Tensor) -> Tensor:
        """Return video latents [B, C, F, H, W] with the first frame replaced by `first` [B, C, H, W]."""
        return torch.cat([first.unsqueeze(2), latents[:, :, 1:]], dim=2)

    def mask_first_frame(self, latents: Tensor) -> Tensor:
        """Return a mask that broadcasts to video latents: 0 at the first frame, 1 at all other frames."""
        mask = torch.ones(1, 1, latents.shape[2], 1, 1, dtype=latents.dtype, device=latents.device)
        mask[:, :, 0] = 0
        return mask

    def list_blocks(self) -> list[nn.Module]:
        """Return the denoiser's modules that are sharded separately; by default the entries of each `ModuleList`."""
        return [
            block
            for child in self.denoiser.children()
            if isinstance(child, nn.ModuleList)
            for block in child.children()
        ]

    def build_config(self) -> dict[str, Any]:
        """Return the configuration of the denoiser for an export, as plain data."""
        return {}

    def list_frozen_parts(self) -> list[nn.Module]:
        """Return the modules, other than the denoiser, that the trainer moves to its device; by default none."""
        return []

    @property
    def device(self) -> torch.device:
        """The device of the denoiser."""
        return next(self.denoiser.parameters()).device


def to_float_images(images: NDArray[np.uint8]) -> Tensor:
    """Return images [B, H, W, C] as floats [B, C, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(images)).movedim(-1, 1).float() / 255


def to_uint8_images(images: Tensor) -> NDArray[np.uint8]:
    """Return images [B, C, H, W], or videos [B, F, C, H, W], in [0, 1] as uint8 with channels last."""
    return (images.detach().float() * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).cpu().numpy()
