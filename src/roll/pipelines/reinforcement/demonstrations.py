"""Demonstrations as rollouts: an expert's answers, tokenized for the model, and executed and scored like any rollout.

    prompt.expert ─ the chat template's tokens ─► the same loop that plays the policy's rollouts ─► reward ─► Rollout

No engine is called, and the result is deterministic: the same draw gives the same rollout. Log-probs are 0, the policy
version is -1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.data import ChatRenderer
from roll.errors import InfraError
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout.episode import choose_loop
from roll.types import (
    EXPERT,
    Anchor,
    Generation,
    GenerationRequest,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutId,
)

__all__ = ["build_anchor_demonstration", "play_demonstration", "play_demonstrations"]

logger = logging.getLogger(__name__)


async def play_demonstrations(
    config: ReinforcementRunConfig, policy_engines: ServedPolicy, draws: Sequence[PromptDraw]
) -> list[Rollout]:
    """Return a scored expert rollout for every draw whose prompt has a demonstration; the result is empty if imitation
    has weight 0.

    For a draw that begins at an anchor, the rollout consists of the replayed turns (IPA, arXiv 2512.24873 eq. 10: the
    expert's chunks up to the fork). A demonstration that cannot be scored in `rollout.max_attempts` attempts is left
    out, because the policy's rollouts do not depend on it.
    """
    if config.algorithm.imitation.weight == 0:
        return []
    shown = [draw for draw in draws if draw.prompt.expert and draw.anchor is None]
    found = await asyncio.gather(*(play_demonstration(config, policy_engines, draw) for draw in shown))
    begun = [
        build_anchor_demonstration(draw, draw.anchor, policy_engines.plan.group_size)
        for draw in draws
        if draw.anchor and draw.anchor.num_turns
    ]
    return [*(rollout for rollout in found if rollout is not None), *begun]


def build_anchor_demonstration(draw: PromptDraw, anchor: Anchor, index: int) -> Rollout:
    """Return the turns before an anchor as an expert rollout.

    Turns after the anchor have rewards but no tokens, so each turn's return includes the rewards of the whole episode:
    for example, G_k = gamma^(K-1-k) R in IPA's eq. 7."""
    record, num = anchor.trajectory, anchor.num_turns
    end = record.turns[num - 1].end
    turns = [turn if i < num else replace(turn, start=end, end=end) for i, turn in enumerate(record.turns)]
    return Rollout(
        draw_id=draw.draw_id,
        index=index,
        purpose=EXPERT,
        prompt=draw.prompt,
        prompt_token_ids=record.prompt_token_ids,
        token_ids=record.token_ids[:end],
        logprobs=np.zeros(end, np.float32),
        policy_versions=np.full(end, -1, np.int32),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=record.reward, correct=True),
        engine_id="replay",
        turns=tuple(turns),
        branches=tuple(branch for branch in record.branches if branch.start < end),
        expert=True,
    )


async def play_demonstration(
    config: ReinforcementRunConfig, policy_engines: ServedPolicy, draw: PromptDraw
) -> Rollout | None:
    """Execute and score the expert's answers; return `None` if no attempt could score them.

    Raises:
        InfraError: The answers could not be executed.
    """
    plan, renderer, reward = (
        policy_engines.plan,
        policy_engines.generation.renderer,
        policy_engines.generation.rewards[draw.prompt.domain],
    )
    script = _ScriptedEngine(renderer=renderer, answers=iter(draw.prompt.expert))
    name = RolloutId(purpose=EXPERT, draw_id=draw.draw_id, index=plan.group_size)
    request = GenerationRequest(
        request_id=name.request_id(), token_ids=draw.token_ids, sampling=replace(plan.sampling, seed=0)
    )
    scheduler = policy_engines.generation.scheduler
    loop = choose_loop(draw.prompt, scheduler.hosts, scheduler.episodes)
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
class _ScriptedEngine:
    """Replaces an engine in a demonstration: returns the expert's answers in order."""

    renderer: ChatRenderer
    answers: Iterator[str]

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the next answer; after the last answer, return an empty truncated answer, which ends the episode."""
        text = next(self.answers, None)
        tokens = np.zeros(0, np.int32) if text is None else self.renderer.tokenize_answer(text)
        return Generation(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            policy_versions=np.full(len(tokens), -1, np.int32),
            finish_reason="length" if text is None else "stop",
            engine_id="expert",
        )
