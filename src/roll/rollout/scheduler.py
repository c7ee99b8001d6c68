"""RolloutScheduler: from drawn prompts to scored groups.

    draws ──► group_size loops each ──► LLMProxy ──► tokens ──► reward, the moment a rollout ends ──► Group

Each rollout is its own task, so a slow answer or a hanging verifier holds nothing else back.

Invariants:
    - every draw given to `collect` comes back as one `Group` with `group_size` rollouts, in order;
    - a rollout that the infrastructure failed is issued again within its budget, then marked `infra_error`: it never
      gets a reward of 0 and never enters a baseline;
    - a request's seed depends on the run's seed, the draw, and the index alone: not on time, engines, or attempts.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roll.errors import InfraError
from roll.protocols import Reward
from roll.rollout.loops import Renderer, play, single_answer
from roll.rollout.proxy import LLMProxy
from roll.types import (
    Generation,
    GenerationRequest,
    Group,
    PromptDraw,
    Rollout,
    RolloutStatus,
    SamplingParams,
)

__all__ = ["RolloutScheduler", "SamplingPlan", "request_seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """How many rollouts each prompt gets, and how they are sampled."""

    purpose: str
    """`train` or `eval`; part of every request's id and seed."""
    group_size: int
    sampling: SamplingParams
    """Its seed is replaced by each request's own."""


def request_seed(run_seed: int, purpose: str, draw_id: int, index: int) -> int:
    """A request's seed: 31 bits of a hash, so it is the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{purpose}/{draw_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class RolloutScheduler:
    """Generates and scores.

    Args:
        proxy: where requests go.
        rewards: by domain.
        renderer: tokens to text, and what comes between two turns.
        seed: of the run.
        max_attempts: how often a rollout that infrastructure failed is issued before its fate is `infra_error`.
        on_rollout: told of every rollout as it ends (for a display); must return at once.
    """

    def __init__(
        self,
        proxy: LLMProxy,
        rewards: Mapping[str, Reward],
        renderer: Renderer,
        *,
        seed: int,
        max_attempts: int = 3,
        on_rollout: Callable[[Rollout], None] = lambda rollout: None,
    ) -> None:
        self._proxy = proxy
        self._rewards = rewards
        self._renderer = renderer
        self._seed = seed
        self._max_attempts = max_attempts
        self._on_rollout = on_rollout

    async def collect(self, draws: Sequence[PromptDraw], plan: SamplingPlan) -> list[Group]:
        """Attempt every drawn prompt `plan.group_size` times and score each attempt.

        When cancelled, requests under way are aborted at the engines before it returns.
        """
        running: set[str] = set()
        tasks = [
            asyncio.create_task(
                self._attempt(draw, index, plan, running), name=f"{plan.purpose}-{draw.draw_id}.{index}"
            )
            for draw in draws
            for index in range(plan.group_size)
        ]
        try:
            rollouts = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._proxy.abort_all(sorted(running))
            raise
        size = plan.group_size
        return [Group(draw=draw, rollouts=tuple(rollouts[i * size : (i + 1) * size])) for i, draw in enumerate(draws)]

    async def _attempt(self, draw: PromptDraw, index: int, plan: SamplingPlan, running: set[str]) -> Rollout:
        """One rollout and its reward; `running` holds the ids of requests that are at the engines."""
        request = GenerationRequest(
            request_id=f"{plan.purpose}-{draw.draw_id}.{index}",
            token_ids=draw.token_ids,
            sampling=replace(plan.sampling, seed=request_seed(self._seed, plan.purpose, draw.draw_id, index)),
        )

        async def generate(request: GenerationRequest) -> Generation:
            running.add(request.request_id)
            try:
                generation = await self._proxy.generate(request)
            except asyncio.CancelledError:
                raise  # the request stays in `running`, to be aborted at the engines
            except BaseException:
                running.discard(request.request_id)
                raise
            running.discard(request.request_id)
            return generation

        loop = play if "env" in draw.prompt.metadata else single_answer
        rollout: Rollout | None = None
        cause = ""
        for attempt in range(1, self._max_attempts + 1):
            try:
                if rollout is None:
                    rollout = await loop(draw, index, request, generate, self._renderer)
                scored = replace(rollout, reward=await self._rewards[draw.prompt.domain](rollout))
                break
            except InfraError as error:
                cause = f"{type(error).__name__}: {error}"
                logger.warning(
                    "rollout %s, attempt %d of %d: %s", request.request_id, attempt, self._max_attempts, cause
                )
        else:
            scored = replace(rollout or _nothing(draw, index), status=RolloutStatus.INFRA_ERROR, cause=cause)
        self._on_rollout(scored)
        return scored


def _nothing(draw: PromptDraw, index: int) -> Rollout:
    """An attempt that never got an answer."""
    import numpy as np

    return Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        policy_versions=np.zeros(0, np.int32),
        finish_reason="abort",
        text="",
    )
