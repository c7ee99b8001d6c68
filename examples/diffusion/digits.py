"""A small flow model of handwritten digits, its data, and a classifier as reward: everything runs on a laptop.

    python examples/diffusion/digits.py data                       # writes data/digits from scikit-learn
    roll train examples/diffusion/digits-base.yaml                 # learns to draw digits
    roll train examples/diffusion/digits-grpo.yaml                 # learns to draw threes, from a reward
    roll train examples/diffusion/digits-reward-gradient.yaml      # the same, from the gradient of a reward

The model is a subclass of `DiffusionModel`: 8 x 8 pixels as latents, a digit or nothing as the prompt.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roll.diffusion.models import Conditions, DiffusionModel
from roll.errors import DataError

SIZE = 8
WORDS = ("", *map(str, range(10)))
"""The prompts that the model knows; the empty one draws any digit."""


class Block(nn.Module):
    """A residual block of two linear layers, modulated by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the block's output [B, width]."""
        hidden = self.norm(x) * (1 + self.scale(condition))
        return x + self.down(nn.functional.silu(self.up(hidden)))


class Denoiser(nn.Module):
    """Predicts the velocity of 8 x 8 pixels."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.pixels = nn.Linear(SIZE * SIZE, width)
        self.times = nn.Linear(2 * 16, width)
        self.words = nn.Embedding(len(WORDS), width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.velocity = nn.Linear(width, SIZE * SIZE)

    def forward(self, latents: Tensor, sigma: Tensor, word: Tensor) -> Tensor:
        """Return the velocity [B, 1, 8, 8] at noise levels sigma [B], with the indices of prompts [B]."""
        frequencies = math.pi * 2.0 ** torch.arange(16, device=sigma.device) / 16
        angles = sigma[:, None] * frequencies
        condition = self.times(torch.cat([angles.sin(), angles.cos()], dim=1).to(latents.dtype)) + self.words(word)
        x = self.pixels(latents.flatten(1)) + condition
        for block in self.blocks:
            x = block(x, condition)
        return self.velocity(x).reshape(latents.shape)


class DigitFlow(DiffusionModel):
    """A flow model of digits.

    Args:
        width: Width of the hidden layers.
        depth: Number of blocks.
    """

    latent_shape = (1, SIZE, SIZE)

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        self.denoiser = Denoiser(width, depth)

    def encode_prompts(self, prompts: Sequence[str]) -> Conditions:
        """Return the index of every prompt; an unknown prompt is an error."""
        for prompt in prompts:
            if prompt not in WORDS:
                raise DataError(f"the prompt {prompt!r} is not one that this model knows: use a digit, or ''.")
        return {"word": torch.tensor([WORDS.index(prompt) for prompt in prompts], device=self.device)}

    def predict(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Return the velocity."""
        return self.denoiser(latents, sigma, conditions["word"])

    def encode_images(self, images: Any) -> Tensor:
        """Return pixels in [-1, 1] of gray images [B, 8, 8, 3]."""
        pixels = torch.from_numpy(np.array(images))[..., :1].movedim(-1, 1).to(self.device)
        return pixels.float() / 127.5 - 1


def write_data(directory: Path) -> None:
    """Write scikit-learn's digits as images, with `digits.jsonl`; every fifth image is left out, for classifiers."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    (directory / "images").mkdir(parents=True, exist_ok=True)
    with (directory / "digits.jsonl").open("w") as rows:
        for place, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            if place % 5:
                path = f"images/{place:04}.png"
                Image.fromarray(to_bytes(pixels)).save(directory / path)
                rows.write(json.dumps({"prompt": str(label), "image": path}) + "\n")


def to_bytes(pixels: Any) -> Any:
    """Return scikit-learn's pixels, from 0 to 16, as bytes."""
    return (pixels * 255 / 16).round().clip(0, 255).astype(np.uint8)


@functools.cache
def train_classifier(half: int) -> Any:
    """Train a classifier on one half of the images: 0 for the reward, 1 (another kind) to judge independently."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import SVC

    digits = load_digits()
    images, labels = to_bytes(digits.images).reshape(len(digits.images), -1) / 255, digits.target
    own = np.arange(len(images)) % 2 == half
    model = LogisticRegression(max_iter=2000) if half == 0 else SVC(gamma=0.05, C=10)
    return model.fit(images[own], labels[own])


def read_pixels(image: Any) -> Any:
    """Return the gray pixels [1, 64] of a `PIL.Image`, in [0, 1]."""
    return np.asarray(image.convert("L")).reshape(1, -1) / 255


def is_three(image: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Return the probability of a 3, by the classifier of the reward."""
    return float(train_classifier(0).predict_proba(read_pixels(image))[0, 3])


def looks_like_three(image: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Return whether an independent classifier, which training never sees, reads a 3."""
    return float(train_classifier(1).predict(read_pixels(image))[0] == 3)


@functools.cache
def train_network() -> nn.Module:
    """Train a convolutional network on the images of the reward, with noise, which makes its gradients smooth."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(to_bytes(digits.images[::2]))[:, None].float() / 255
    labels = torch.from_numpy(digits.target[::2])
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(64 * (SIZE // 2) ** 2, 10),
        )
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.002)
        for _ in range(300):
            rows = torch.randint(len(images), (128,))
            noisy = images[rows] + 0.2 * torch.randn(128, 1, SIZE, SIZE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(noisy), labels[rows]).backward()
            optimizer.step()
    return network.requires_grad_(False)


def compute_log_probs_of_three(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Return the log-probabilities of a 3 [B], for images [B, 1, 8, 8] in [0, 1]; differentiable."""
    network = train_network().to(images.device)
    return network(images).log_softmax(dim=1)[:, 3]


def looks_like_prompt(image: Any, prompt: str, metadata: dict[str, Any]) -> float:
    """Return whether an independent classifier reads the digit of the prompt."""
    return float(str(train_classifier(1).predict(read_pixels(image))[0]) == prompt)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]) / "digits")
    print(f"wrote {sys.argv[1]}/digits/digits.jsonl and {sys.argv[1]}/digits/images")
