"""The user's demonstrations: successful episodes that are played before the first step and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from roll.config.pipelines.agentic import AgenticConfig
from roll.data import PromptStream
from roll.errors import DataError, InfraError
from roll.pipelines.episodes.anchors import has_succeeded
from roll.pipelines.episodes.reading import Demonstration
from roll.pipelines.episodes.state import AgenticState, KeptEpisode
from roll.pipelines.online.online_run import OnlineRun
from roll.pipelines.reinforcement.demonstrations import play_demonstration
from roll.pipelines.served_policy import ServedPolicy
from roll.rollout.episode_replay import build_trajectory

__all__ = ["play_demonstrations"]


async def play_demonstrations(
    opened: OnlineRun[AgenticConfig, ServedPolicy], stream: PromptStream, shown: Sequence[Demonstration]
) -> None:
    """Play the user's demonstrations, and keep the episodes in the run's state; a resumed run has them already.

    Raises:
        DataError: A demonstration does not succeed.
    """
    state = opened.run.state
    assert isinstance(state, AgenticState)
    if state.shown or not shown:
        return
    opened.run.tracker.note("playing demonstrations")
    state.kept = (*state.kept, *await asyncio.gather(*(_play_twice(opened, stream, one) for one in shown)))
    state.shown = True


async def _play_twice(
    opened: OnlineRun[AgenticConfig, ServedPolicy], stream: PromptStream, shown: Demonstration
) -> KeptEpisode:
    """Play a demonstration twice, check that the environment responds equally both times, and return the episode."""
    draw = stream.redraw(-1, shown.domain, stream.find_position(shown.domain, shown.seed))
    draw = replace(draw, prompt=replace(draw.prompt, expert=shown.actions))
    name = f"'{shown.domain}' with seed {shown.seed}"
    try:
        found = [await play_demonstration(opened.config, opened.policy_engines, draw) for _ in range(2)]
    except InfraError as error:
        raise DataError(f"{shown.location}: the demonstration cannot be played: {error}") from error
    kept = []
    for rollout in found:
        if rollout is None or not has_succeeded(rollout) or len(rollout.turns) != len(shown.actions):
            played = f"{len(rollout.turns) if rollout else 0} of {len(shown.actions)} actions were played"
            reward = f"{rollout.reward.value:g}" if rollout and rollout.reward else "none"
            raise DataError(
                f"{shown.location}: the demonstration does not succeed in {name}: {played}, and the reward is "
                f"{reward}. Check its seed and actions, and the environment's options."
            )
        trajectory = build_trajectory(rollout)
        kept.append(KeptEpisode(domain=shown.domain, position=draw.position, trajectory=trajectory, shown=True))
    if kept[0].to_json() != kept[1].to_json():
        raise DataError(
            f"{shown.location}: {name} responded differently when the demonstration was played again, so no episode "
            "can begin at one of its turns: make the environment depend only on reset(seed), or remove anchors."
        )
    return kept[0]
