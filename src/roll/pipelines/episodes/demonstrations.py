"""The user's demonstrations: successful episodes that are executed before the first step and stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from roll.config.pipelines.agentic import AgenticConfig
from roll.data import PromptStream
from roll.errors import DataError, InfraError
from roll.pipelines.episodes.anchors import has_succeeded
from roll.pipelines.episodes.demonstration_file import Demonstration
from roll.pipelines.episodes.state import AgenticState, AnchorEpisode
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.reinforcement.demonstrations import play_demonstration
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout.episode_replay import build_trajectory

__all__ = ["play_demonstrations"]


async def play_demonstrations(
    online: OnlineRun[AgenticConfig, ServedPolicy], stream: PromptStream, demonstrations: Sequence[Demonstration]
) -> None:
    """Execute the user's demonstrations, and store the episodes in the run's state. Do nothing in a resumed run.

    Raises:
        DataError: A demonstration does not succeed.
    """
    state = online.run.state
    assert isinstance(state, AgenticState)
    if state.demonstrations_played or not demonstrations:
        return
    online.run.tracker.note("playing demonstrations")
    state.episodes = (
        *state.episodes,
        *await asyncio.gather(*(_play_twice(online, stream, one) for one in demonstrations)),
    )
    state.demonstrations_played = True


async def _play_twice(
    online: OnlineRun[AgenticConfig, ServedPolicy], stream: PromptStream, demonstration: Demonstration
) -> AnchorEpisode:
    """Execute a demonstration twice, check that the environment responds identically, and return the episode."""
    draw = stream.redraw(-1, demonstration.domain, stream.find_position(demonstration.domain, demonstration.seed))
    draw = replace(draw, prompt=replace(draw.prompt, expert=demonstration.actions))
    name = f"'{demonstration.domain}' with seed {demonstration.seed}"
    try:
        found = [await play_demonstration(online.config, online.policy_engines, draw) for _ in range(2)]
    except InfraError as error:
        raise DataError(f"{demonstration.location}: the demonstration cannot be played: {error}") from error
    episodes = []
    for rollout in found:
        if rollout is None or not has_succeeded(rollout) or len(rollout.turns) != len(demonstration.actions):
            played = f"{len(rollout.turns) if rollout else 0} of {len(demonstration.actions)} actions were played"
            reward = f"{rollout.reward.value:g}" if rollout and rollout.reward else "none"
            raise DataError(
                f"{demonstration.location}: the demonstration does not succeed in {name}: {played}, and the reward is "
                f"{reward}. Check its seed and actions, and the environment's options."
            )
        trajectory = build_trajectory(rollout)
        episodes.append(
            AnchorEpisode(
                domain=demonstration.domain, position=draw.position, trajectory=trajectory, is_demonstration=True
            )
        )
    if episodes[0].to_json() != episodes[1].to_json():
        raise DataError(
            f"{demonstration.location}: {name} responded differently when the demonstration was played again, so "
            "episodes cannot start from its turns: make the environment depend only on reset(seed), or remove anchors."
        )
    return episodes[0]
