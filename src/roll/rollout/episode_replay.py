"""Episode replay: rollouts that begin at an anchor in a recorded episode (IPA's resampling, arXiv 2512.24873).

    reset(seed) ─► recorded answer ─► env.step ─► … ─► recorded answer ─► env.step ─► as recorded? ─► the model's turn

The environment runs again, but the model's answers are the recorded tokens. Observations are processed by the usual
code, so identical observations give identical tokens. The context at the anchor, and the earlier turns with their
rewards and states, must equal the record; otherwise the environment is not reproducible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.errors import ReplayError
from roll.rollout.loops import Generate
from roll.types import (
    Anchor,
    Branch,
    Generation,
    GenerationRequest,
    IntArray,
    MediaSpan,
    Prompt,
    Rollout,
    Trajectory,
    Turn,
)

__all__ = ["ReplayedTurns", "build_replay_error", "build_replay_generate", "build_trajectory", "check_replay"]


def build_trajectory(rollout: Rollout) -> Trajectory:
    """Return the trajectory of a scored rollout, from which other episodes can begin."""
    assert rollout.reward is not None, "the rollout was scored"
    return Trajectory(
        uid=rollout.prompt.uid,
        prompt_token_ids=rollout.prompt_token_ids,
        token_ids=rollout.token_ids,
        turns=rollout.spans,
        branches=rollout.branches,
        prompt_media=rollout.prompt_media,
        media=rollout.media,
        reward=rollout.reward.value,
    )


def build_replay_generate(anchor: Anchor, generate: Generate) -> Generate:
    """Return a `Generate` function that replays the recorded answers before the anchor, and then calls the engine."""
    trajectory = anchor.trajectory
    remaining = iter(trajectory.turns[: anchor.num_turns])

    async def answer(request: GenerationRequest) -> Generation:
        turn = next(remaining, None)
        if turn is None:
            return await generate(request)
        token_ids = trajectory.token_ids[turn.start : turn.end]
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            policy_versions=np.full(len(token_ids), -1, np.int32),
            finish_reason="stop",
            engine_id="replay",
        )

    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedTurns:
    """The replayed part of an episode, up to the anchor. The fields are those of `Trajectory`."""

    prompt_token_ids: IntArray
    tokens: Sequence[IntArray]
    """Tokens after the prompt, as consecutive arrays."""
    turns: Sequence[Turn]
    branches: Sequence[Branch]
    state: str
    """State of the environment before the next turn."""
    prompt_media: tuple[MediaSpan, ...] = ()
    media: tuple[MediaSpan, ...] = ()


def check_replay(prompt: Prompt, anchor: Anchor, replay: ReplayedTurns) -> None:
    """Check that a replay equals the record up to the anchor.

    Raises:
        ReplayError: The replay differs; the message names the first difference.
    """
    record, num_turns = anchor.trajectory, anchor.num_turns
    same_prompt = np.array_equal(replay.prompt_token_ids, record.prompt_token_ids)
    if not same_prompt or replay.prompt_media != record.prompt_media:
        raise build_replay_error(prompt, anchor, "the first observation differs")
    for number, (turn, before) in enumerate(zip(replay.turns, record.turns, strict=False), start=1):
        if turn.state != before.state or turn.start != before.start:
            raise build_replay_error(prompt, anchor, f"the observation before turn {number} differs")
        if turn.reward != before.reward:
            raise build_replay_error(
                prompt, anchor, f"the reward of turn {number} is {turn.reward:g}, not {before.reward:g} as recorded"
            )
    tokens = np.concatenate([np.zeros(0, np.int32), *replay.tokens])
    end = record.turns[num_turns].start
    if replay.state != record.turns[num_turns].state:
        raise build_replay_error(prompt, anchor, f"the state before turn {num_turns + 1} differs")
    branches = [branch for branch in record.branches if branch.start <= end]
    same_branches = len(replay.branches) == len(branches) and all(
        one.start == other.start and np.array_equal(one.context, other.context) and one.media == other.media
        for one, other in zip(replay.branches, branches, strict=True)
    )
    media = tuple(span for span in record.media if span.start < end)
    if not same_branches or not np.array_equal(tokens, record.token_ids[:end]) or replay.media != media:
        raise build_replay_error(prompt, anchor, f"an observation up to turn {num_turns + 1} differs")


def build_replay_error(prompt: Prompt, anchor: Anchor, difference: str) -> ReplayError:
    """Build the error for an environment that does not reproduce a recorded episode."""
    name = prompt.environment.name if prompt.environment else prompt.domain
    return ReplayError(
        f"environment '{name}' does not repeat its episode '{anchor.trajectory.uid}' under the same seed and actions: "
        f"{difference}. Rollouts cannot begin inside this episode."
    )
