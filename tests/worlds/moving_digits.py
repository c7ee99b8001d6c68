"""Clips of a digit that moves to the left or to the right, and a small flow model of such clips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from roll.diffusion.models import Conditions, DiffusionModel

GLYPHS = {"1": ".#. ##. .#. .#. ###", "3": "##. ..# .#. ..# ##.", "7": "### ..# .#. .#. .#."}
NUM_FRAMES, HEIGHT, WIDTH = 4, 5, 10
STARTS = (3, 4)


def draw_clip(digit: str, start: int, direction: int) -> NDArray[np.uint8]:
    """Return the frames [F, H, W, 3] of a digit that moves by one pixel per frame."""
    glyph = np.array([[255 * (cell == "#") for cell in row] for row in GLYPHS[digit].split()], np.uint8)
    clip = np.zeros((NUM_FRAMES, HEIGHT, WIDTH), np.uint8)
    for place, frame in enumerate(clip):
        left = start + direction * place
        frame[:, left : left + 3] = glyph
    return np.repeat(clip[..., None], 3, axis=-1)


def list_clips() -> dict[tuple[str, int, int], NDArray[np.uint8]]:
    """Return all clips by digit, start and direction."""
    return {(d, s, way): draw_clip(d, s, way) for d in GLYPHS for s in STARTS for way in (-1, 1)}


class ClipDenoiser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        size = NUM_FRAMES * HEIGHT * WIDTH
        self.blocks = nn.ModuleList(
            [nn.Linear(size + 8, width), nn.Linear(width, width), nn.Linear(width + size + 8, size)]
        )

    def forward(self, latents: Tensor, sigma: Tensor) -> Tensor:
        angles = sigma[:, None].to(latents) * 3.14 * 2.0 ** torch.arange(4)
        given = torch.cat([latents.flatten(1), angles.sin(), angles.cos()], dim=1)
        hidden = nn.functional.silu(self.blocks[0](given))
        hidden = hidden + nn.functional.silu(self.blocks[1](hidden))
        return self.blocks[2](torch.cat([hidden, given], dim=1)).reshape(latents.shape)


class MovingDigits(DiffusionModel):
    """Gray clips [1, F, H, W]; latents are pixels in [-1, 1], and prompts have no effect."""

    latent_shape = (1, NUM_FRAMES, HEIGHT, WIDTH)

    def __init__(self, width: int = 192) -> None:
        self.denoiser = ClipDenoiser(width)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        return {"nothing": torch.zeros(len(prompts), 1)}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        return self.denoiser(latents, sigma)

    def encode_images(self, images: NDArray[np.uint8]) -> Tensor:
        return encode(images[..., :1]).unsqueeze(2)

    def decode(self, latents: Tensor) -> Tensor:
        return (latents.movedim(2, 1) / 2 + 0.5).clamp(0, 1)


def encode(images: NDArray[np.uint8]) -> Tensor:
    """Return images [..., H, W, C] as pixels [..., C, H, W] in [-1, 1]."""
    return torch.from_numpy(np.array(images)).movedim(-1, -3).float() / 127.5 - 1


def reward_of_moving_right(videos: Tensor, prompts: list[str]) -> Tensor:
    """Return by how many columns the brightness of clips [B, F, 1, H, W] moves to the right; differentiable."""
    columns = torch.arange(WIDTH, dtype=videos.dtype)
    mass = videos.sum(dim=(2, 3))
    centers = (mass * columns).sum(dim=2) / (mass.sum(dim=2) + 1e-3)
    return centers[:, -1] - centers[:, 0]
