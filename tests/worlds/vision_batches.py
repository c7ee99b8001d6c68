"""Batches of training samples with images."""

from __future__ import annotations

import numpy as np

from roll.types import TrainingBatch, TrainingSample
from worlds.vision_models import VisionWorld

__all__ = ["TEXTS", "media_batch"]

TEXTS = (
    ("{} and {}, what", (0, 1)),
    ("{} and {}, what", (1, 0)),
    ("look: {}", (2,)),
    ("no image here", ()),
    ("{} ab {} cd {}", (3, 2, 3)),
)
"""Prompts and the numbers of their images. The first two have equal texts."""


def media_batch(world: VisionWorld, *, group_size: int = 2, num_prompts: int = 5) -> TrainingBatch:
    """Groups of samples with images, each with a random answer; the first two prompts are one group."""
    rng = np.random.default_rng(0)
    samples = []
    for number, (text, images) in enumerate(TEXTS[:num_prompts]):
        prompt, media = world.prompt(text, *images)
        for index in range(group_size):
            tokens = np.concatenate([prompt, rng.integers(3, 250, 5)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                TrainingSample(
                    sample_id=f"{number}.{index}",
                    unit=max(number - 1, 0),
                    prefix_length=len(prompt),
                    token_ids=tokens,
                    loss_mask=mask,
                    media=media,
                    advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                    max_length=16,
                )
            )
    return TrainingBatch(samples=tuple(samples))
