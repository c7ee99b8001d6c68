"""How one rollout comes about: a single answer, or a conversation with an environment.

    prompt ─► model ─► tokens of turn 1 ─► env.step ─► observation, as the chat template writes it ─► model ─► turn 2 …

All turns stay one flat token sequence: what the model wrote is never rendered or tokenised again, so the trainer sees
exactly what the engine did.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from roll.envs.hosting import EnvHosts, HostedEnv
from roll.types import Generation, GenerationRequest, IntArray, Prompt, PromptDraw, Rollout, Turn

__all__ = ["Generate", "Renderer", "RolloutLoop", "joined", "loop_for", "next_turn", "play", "single_answer"]

Generate: TypeAlias = Callable[[GenerationRequest], Awaitable[Generation]]


class Renderer(Protocol):
    """What a loop needs of `ChatRenderer`."""

    def follow_up(self, observation: str) -> IntArray:
        """Ids from the end of the assistant's message to where its next one begins."""
        ...

    def decode(self, token_ids: IntArray) -> str:
        """The text of tokens, without special ones."""
        ...


class RolloutLoop(Protocol):
    """Makes one rollout, without its reward."""

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """`first` is the request for the first turn; its sampling holds for all turns."""
        ...


def loop_for(prompt: Prompt, hosts: EnvHosts | None = None) -> RolloutLoop:
    """The loop that makes a prompt's rollouts, unless the user gives another one; environments run in `hosts`."""
    return single_answer if prompt.environment is None else partial(play, hosts=hosts) if hosts else play


async def single_answer(
    draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
) -> Rollout:
    """One answer to the prompt."""
    generation = await generate(first)
    return joined(draw, index, [generation], [], (), renderer)


async def play(
    draw: PromptDraw,
    index: int,
    first: GenerationRequest,
    generate: Generate,
    renderer: Renderer,
    *,
    hosts: EnvHosts | None = None,
) -> Rollout:
    """A conversation with the prompt's environment, until one of the two ends it or the prompt's turns are over.

    An answer that was cut off ends the episode: the model did not finish its turn.
    """
    settings = draw.prompt.environment
    assert settings is not None, "`loop_for` plays only prompts with an environment"
    async with (hosts or EnvHosts()).open(settings) as env:
        return await _conversation(draw, index, first, generate, renderer, env)


async def _conversation(
    draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer, env: HostedEnv
) -> Rollout:
    assert draw.prompt.environment is not None
    _, info = await env.reset(draw.prompt.environment.seed)
    generations: list[Generation] = []
    between: list[IntArray] = []
    turns: list[Turn] = []
    context, position = draw.token_ids, 0
    while True:
        request = next_turn(first, context, len(turns))
        generation = await generate(request)
        generations.append(generation)
        end = position + len(generation.token_ids)
        over, reward, observation, state = True, 0.0, "", str(info.get("state", ""))
        if generation.finish_reason == "stop":
            action = renderer.decode(generation.token_ids)
            observation, reward, ended, cut_off, info = await env.step(action)
            over = ended or cut_off or len(turns) + 1 >= draw.prompt.turns
        turns.append(Turn(start=position, end=end, reward=reward, state=state))
        if over:
            return joined(draw, index, generations, between, tuple(turns), renderer)
        follow_up = renderer.follow_up(observation)
        between.append(follow_up)
        context = np.concatenate([context, generation.token_ids, follow_up]).astype(np.int32)
        position = end + len(follow_up)


def next_turn(first: GenerationRequest, context: IntArray, turn: int) -> GenerationRequest:
    """The request of a later turn: its own id, and its own seed, which depends on the first one's alone."""
    if turn == 0:
        return first
    seed = first.sampling.seed
    sampling = replace(first.sampling, seed=None if seed is None else (seed + 0x9E3779B1 * turn) % 2**31)
    return replace(first, request_id=f"{first.request_id}.t{turn}", token_ids=context, sampling=sampling)


def joined(
    draw: PromptDraw,
    index: int,
    generations: list[Generation],
    between: list[IntArray],
    turns: tuple[Turn, ...],
    renderer: Renderer,
) -> Rollout:
    """All turns as one sequence; the environment's tokens have log-prob 0 and policy version -1.

    A single generation's arrays are used as they are.
    """
    tokens: list[IntArray] = []
    logprobs: list[np.ndarray] = []
    versions: list[np.ndarray] = []
    for position, generation in enumerate(generations):
        tokens.append(generation.token_ids)
        logprobs.append(generation.logprobs)
        versions.append(generation.policy_versions)
        if position < len(between):
            tokens.append(between[position])
            logprobs.append(np.zeros(len(between[position]), np.float32))
            versions.append(np.full(len(between[position]), -1, np.int32))
    token_ids = _joined_array(tokens, np.int32)
    return Rollout(
        draw_id=draw.draw_id,
        index=index,
        prompt=draw.prompt,
        prompt_token_ids=draw.token_ids,
        token_ids=token_ids,
        logprobs=_joined_array(logprobs, np.float32),
        policy_versions=_joined_array(versions, np.int32),
        finish_reason=generations[-1].finish_reason,
        text=renderer.decode(token_ids),
        engine_id=generations[-1].engine_id,
        turns=turns,
    )


def _joined_array(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return whole.astype(dtype, copy=False)
