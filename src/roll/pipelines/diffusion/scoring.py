"""Scores of images: the user's functions, in worker processes.

A call that fails, because the function raises, returns no finite number, or its worker dies, is repeated. If the last
attempt fails too, or the call takes too long, the sample has no reward; the reward is never set to 0. If no image of a
step can be scored, the run ends with the error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.config.diffusion import ImageRewardConfig
from roll.errors import InfraError, RewardInfraError, UnscorableError
from roll.protocols import WorkerPool
from roll.rewards.base import run_in_pool
from roll.user_code import check_call, load_function

__all__ = ["ImageScore", "ImageScorer", "check_rewards"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Maximum number of attempts of a reward call, as for rollouts of language models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageScore:
    """The scores of one image."""

    value: float
    """Weighted sum of the rewards; NaN if a call failed."""
    parts: Mapping[str, float]
    """Unweighted value of each reward, by name."""
    problem: str = ""
    """The error message if a call failed; otherwise empty."""


def check_rewards(rewards: Sequence[ImageRewardConfig]) -> None:
    """Import the reward functions before anything is started.

    Raises:
        ConfigError: A function cannot be imported, or does not accept (image, prompt, metadata).
    """
    for reward in rewards:
        function = load_function(reward.function, "reward function")
        check_call(function, f"reward function '{reward.function}'", "image", "prompt", "metadata", *reward.options)


def _call_reward(
    path: str, image: NDArray[np.uint8], prompt: str, metadata: dict[str, Any], options: dict[str, Any]
) -> float:
    """Call a reward function in a worker process."""
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in (image if image.ndim == 4 else image[None])]
    value = load_function(path, "reward function")(
        pictures if image.ndim == 4 else pictures[0], prompt, metadata, **options
    )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RewardInfraError(f"reward function '{path}' must return a number, got {type(value).__name__}.") from None
    if not math.isfinite(number):
        raise RewardInfraError(f"reward function '{path}' must return a finite number, got {number}.")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageScorer:
    """Scores images with a run's training rewards and with rewards that are used only for evaluation."""

    pool: WorkerPool
    rewards: Sequence[ImageRewardConfig]

    async def score(
        self, images: Sequence[NDArray[np.uint8]], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[ImageScore]:
        """Return the scores of images, in order.

        Raises:
            RewardInfraError: Every call failed.
        """
        calls = zip(images, prompts, metadata, strict=True)
        found = await asyncio.gather(*(self._score(image, prompt, dict(other)) for image, prompt, other in calls))
        if found and all(score.problem for score in found):
            raise RewardInfraError(f"no image of this step could be scored: {found[0].problem}")
        return list(found)

    async def _score(self, image: NDArray[np.uint8], prompt: str, metadata: dict[str, Any]) -> ImageScore:
        gray = np.ascontiguousarray(np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image)
        results = await asyncio.gather(
            *(self._call(reward, gray, prompt, metadata) for reward in self.rewards), return_exceptions=True
        )
        parts, problem = dict[str, float](), ""
        for reward, result in zip(self.rewards, results, strict=True):
            if isinstance(result, TimeoutError):
                problem = problem or f"reward '{reward.label}' exceeded its time_limit_s of {reward.time_limit_s:g} s"
            elif isinstance(result, InfraError):
                problem = problem or f"reward '{reward.label}': {result}"
            elif isinstance(result, BaseException):
                raise result
            else:
                parts[reward.label] = float(result)
        value = math.nan if problem else sum(reward.weight * parts[reward.label] for reward in self.rewards)
        return ImageScore(value=value, parts=parts, problem=problem)

    async def _call(
        self, reward: ImageRewardConfig, image: NDArray[np.uint8], prompt: str, metadata: dict[str, Any]
    ) -> float:
        """Call a reward's function in a worker, and repeat a call that fails.

        Raises:
            TimeoutError: The call took longer than its time limit.
            InfraError: Every attempt failed.
        """
        arguments = reward.function, image, prompt, metadata, reward.options
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return await run_in_pool(self.pool, _call_reward, *arguments, time_limit_s=reward.time_limit_s)
            except InfraError as error:
                if attempt == MAX_ATTEMPTS or isinstance(error, UnscorableError):
                    raise
                logger.info("reward '%s', attempt %d of %d: %s", reward.label, attempt, MAX_ATTEMPTS, error)
        raise AssertionError("the last attempt returns or raises")
