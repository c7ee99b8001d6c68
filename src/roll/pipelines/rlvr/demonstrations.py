"""Demonstrations as rollouts: what an expert answered, in the model's own tokens, played and scored like any other.

    prompt.expert ─ the chat template's tokens ─► the same loop that plays the policy's rollouts ─► reward ─► Rollout

No engine is asked, and nothing is drawn at random: the same draw gives the same rollout. Log-probs are 0, the policy
version is -1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.config.reinforcing import ReinforcingConfig
from roll.data import ChatRenderer
from roll.errors import InfraError
from roll.pipelines.live_policy import LivePolicy
from roll.rollout.episode import loop_for
from roll.types import EXPERT, Generation, GenerationRequest, PromptDraw, Rollout, RolloutId

__all__ = ["demonstrations"]

logger = logging.getLogger(__name__)


async def demonstrations(config: ReinforcingConfig, live: LivePolicy, draws: Sequence[PromptDraw]) -> list[Rollout]:
    """A scored expert rollout for every draw whose prompt has a demonstration; none where imitation weighs nothing.

    One that infrastructure failed to score, after `rollout.max_attempts`, is left out: the policy's own rollouts do
    not depend on it.
    """
    if config.algorithm.imitation.weight == 0:
        return []
    shown = [draw for draw in draws if draw.prompt.expert]
    found = await asyncio.gather(*(_scored(config, live, draw) for draw in shown))
    return [rollout for rollout in found if rollout is not None]


async def _scored(config: ReinforcingConfig, live: LivePolicy, draw: PromptDraw) -> Rollout | None:
    plan, renderer, reward = live.plan, live.generation.renderer, live.generation.rewards[draw.prompt.domain]
    script = _Script(renderer=renderer, answers=iter(draw.prompt.expert))
    name = RolloutId(purpose=EXPERT, draw_id=draw.draw_id, index=plan.group_size)
    request = GenerationRequest(
        request_id=name.request_id(), token_ids=draw.token_ids, sampling=replace(plan.sampling, seed=0)
    )
    scheduler = live.generation.scheduler
    loop = loop_for(draw.prompt, scheduler.hosts, scheduler.episodes)
    rollout = await loop(draw, name.index, request, script.generate, renderer)
    rollout = replace(rollout, purpose=name.purpose, expert=True)
    attempts = config.rollout.max_attempts
    for attempt in range(1, attempts + 1):
        try:
            return replace(rollout, reward=await reward(rollout))
        except InfraError as error:
            logger.warning("demonstration of %s, attempt %d of %d: %s", draw.prompt.uid, attempt, attempts, error)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Script:
    """In place of an engine: says the expert's answers one after the other, and then nothing more."""

    renderer: ChatRenderer
    answers: Iterator[str]

    async def generate(self, request: GenerationRequest) -> Generation:
        """The next answer; an empty one that was cut off where the expert has none left, which ends an episode."""
        text = next(self.answers, None)
        tokens = np.zeros(0, np.int32) if text is None else self.renderer.answer(text)
        return Generation(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            policy_versions=np.full(len(tokens), -1, np.int32),
            finish_reason="length" if text is None else "stop",
            engine_id="expert",
        )
