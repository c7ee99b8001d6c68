"""Several weighted verifiers as one reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from roll.config.rewards import RewardConfig
from roll.rewards.base import Judgement, Verifier
from roll.types import RewardResult, Rollout

__all__ = ["Component", "WeightedReward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One verifier with its name and its settings."""

    name: str
    config: RewardConfig
    verifier: Verifier

    async def judge(self, rollout: Rollout) -> Judgement:
        """Ask the verifier. A cut-off answer and one that takes too long to verify are the model's failure: value 0."""
        failed = False if self.verifier.decides else None
        if self.config.require_finished and not rollout.finished:
            return Judgement(value=0.0, verdict="unfinished", correct=failed)
        try:
            return await self.verifier.judge(rollout)
        except TimeoutError:
            return Judgement(value=0.0, verdict="timeout", correct=failed)


class WeightedReward:
    """The weighted sum of its components; implements `Reward`.

    A task is solved where every component that decides it says so. The verdict is that of the first of these, or of the
    first component where none decides.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = list(components)
        self._speaker = next((i for i, c in enumerate(self._components) if c.verifier.decides), 0)

    async def __call__(self, rollout: Rollout) -> RewardResult:
        """Ask all components at once.

        Raises:
            RewardInfraError: one of them crashed, or its process died.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        found = await asyncio.gather(*(component.judge(rollout) for component in self._components))
        parts = list(zip(self._components, found, strict=True))
        decided = [judgement.correct for judgement in found if judgement.correct is not None]
        return RewardResult(
            value=sum(component.config.weight * judgement.value for component, judgement in parts),
            components={component.name: judgement.value for component, judgement in parts},
            verdict=found[self._speaker].verdict,
            correct=all(decided) if decided else None,
            duration_s=loop.time() - started,
        )
