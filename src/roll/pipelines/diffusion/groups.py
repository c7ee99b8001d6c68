"""Groups of scored samples: their advantages as training samples, and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from roll.config.diffusion import OnlineAlgorithmConfig, RewardWeightedConfig
from roll.diffusion.advantages import compute_advantages, compute_reward_weights
from roll.diffusion.records import DenoisingPath, DiffusionSample
from roll.pipelines.diffusion.batches import compute_seed
from roll.pipelines.diffusion.rows import RowDraw
from roll.pipelines.diffusion.scoring import ImageScore

__all__ = ["Group", "build_samples", "compute_pixel_distance", "compute_reward_metrics", "split_samples"]

MAX_COMPARED_SAMPLES = 64
"""Maximum number of samples of a prompt that are compared with each other."""


@dataclass(kw_only=True, slots=True)
class Group:
    """The samples generated for one drawn row."""

    draw: RowDraw
    paths: list[DenoisingPath]
    scores: list[ImageScore] = field(default_factory=list)
    step_rewards: NDArray[np.float64] | None = None
    """[G, T] rewards of single steps, with turning points."""

    @property
    def values(self) -> NDArray[np.float64]:
        """Rewards [G]; NaN for samples that could not be scored."""
        return np.array([score.value for score in self.scores])


def build_samples(algorithm: OnlineAlgorithmConfig, groups: Sequence[Group], seed: int) -> list[DiffusionSample]:
    """Return the samples of all groups, each with an advantage or a weight.

    Args:
        algorithm: The algorithm.
        groups: Groups of equal size whose samples are all scored.
        seed: The run's seed.
    """
    if not groups:
        return []
    values = np.stack([group.values for group in groups])
    steps = [group.step_rewards for group in groups if group.step_rewards is not None]
    weights = np.ones_like(values)
    if isinstance(algorithm, RewardWeightedConfig):
        weights = compute_reward_weights(values, algorithm.temperature)
    advantages = compute_advantages(np.stack(steps) if steps else values, algorithm.advantage_std)
    if advantages.ndim == 2:  # one reward for all steps
        advantages = np.repeat(advantages[..., None], len(groups[0].paths[0].sigmas) - 1, axis=2)
    most = algorithm.max_advantage
    return [
        DiffusionSample(
            sample_id=path.request.sample_id,
            prompt=path.request.prompt,
            # Another seed than that of the path: noise of the loss must not repeat the sample's own.
            seed=compute_seed(seed, "loss", group.draw.draw_id, i),
            unit=group.draw.draw_id,
            path=replace(path, images=None),
            first_frame=path.request.first_frame,
            advantages=advantages[g, i].clip(-most, most).astype(np.float32),
            weight=float(weights[g, i]),
        )
        for g, group in enumerate(groups)
        for i, path in enumerate(group.paths)
    ]


def split_samples(
    samples: Sequence[DiffusionSample], num_minibatches: int, seed: tuple[int, ...]
) -> list[list[DiffusionSample]]:
    """Shuffle samples with `seed`, and split them into `num_minibatches` mini-batches of nearly equal size."""
    if num_minibatches == 1:
        return [list(samples)]
    order = np.random.default_rng(seed).permutation(len(samples))
    return [[samples[i] for i in sorted(part)] for part in np.array_split(order, num_minibatches) if len(part)]


def compute_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean, standard deviation and components of a step's rewards. Unscored samples are ignored."""
    scores = [score for group in groups for score in group.scores]
    values = np.array([score.value for score in scores if not score.problem])
    metrics = {"reward/errors": float(sum(bool(score.problem) for score in scores))}
    if len(values):
        spreads = [float(np.nanstd(group.values)) for group in groups if np.isfinite(group.values).any()]
        metrics |= {"reward/mean": float(values.mean()), "reward/group_std": float(np.mean(spreads))}
    for name in sorted({name for score in scores for name in score.parts}):
        metrics[f"reward/{name}"] = float(np.mean([score.parts[name] for score in scores if name in score.parts]))
    images = [path.images for group in groups for path in group.paths if path.images is not None]
    prompts = [path.request.prompt for group in groups for path in group.paths if path.images is not None]
    metrics["rollout/pixel_distance"] = compute_pixel_distance(images, prompts)
    return metrics


def compute_pixel_distance(images: Sequence[NDArray[np.uint8]], prompts: Sequence[str]) -> float:
    """Return the mean distance between two samples of a prompt: the root mean square over pixels, in [0, 1].

    The distance falls to 0 if the policy collapses to one image per prompt.
    """
    distances: list[float] = []
    by_prompt: dict[str, list[NDArray[np.float32]]] = {prompt: [] for prompt in prompts}
    for image, prompt in zip(images, prompts, strict=True):
        by_prompt[prompt].append(image.astype(np.float32).ravel() / np.float32(255))
    for own in by_prompt.values():
        flat = np.stack(own[:MAX_COMPARED_SAMPLES])
        squares = (flat**2).mean(axis=1)
        mixed = squares[:, None] + squares[None] - 2 * flat @ flat.T / flat.shape[1]
        upper = mixed[np.triu_indices(len(flat), 1)]
        distances += np.sqrt(upper.clip(min=0)).tolist()
    return float(np.mean(distances)) if distances else 0.0
