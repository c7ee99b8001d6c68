"""The user's own successful episodes, as seeds and actions: played once, before the first step, and kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll.config.data import EnvironmentData
from roll.config.pipelines.agentic import AgenticConfig
from roll.data import PromptStream
from roll.data.files import open_table
from roll.errors import DataError, InfraError
from roll.pipelines.agentic.anchors import succeeded
from roll.pipelines.agentic.state import AgenticState, KeptEpisode
from roll.pipelines.online.online_loop import OnlineLoop
from roll.pipelines.rlvr.demonstrations import demonstration
from roll.rollout.replaying import recorded

__all__ = ["Demonstration", "play_demonstrations", "read_demonstrations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """An episode that succeeds."""

    domain: str
    seed: int
    actions: tuple[str, ...]
    where: str
    """In the user's file."""


def read_demonstrations(config: AgenticConfig) -> list[Demonstration]:
    """What the configuration's file says; nothing where there is none.

    Raises:
        DataError: it cannot be read, or a line is no demonstration of one of the environments.
    """
    if config.anchors is None or config.anchors.demonstrations is None:
        return []
    entries = {entry.domain or entry.environment: entry for entry in config.environments}
    table, found = open_table(Path(config.anchors.demonstrations)), {}
    for index, row in enumerate(table.scan(None)):
        if isinstance(row, DataError):
            raise row
        one = _read(row, entries, table.where(index))
        before = found.setdefault((one.domain, one.seed), one)
        if before is not one:
            raise DataError(
                f"{one.where}: '{one.domain}' with seed {one.seed} was shown in {before.where}: remove one."
            )
    if not found:
        raise DataError(f"{table.name} has no demonstration: remove anchors.demonstrations, or write one in each line.")
    return list(found.values())


def _read(row: Mapping[str, Any], entries: dict[str, EnvironmentData], where: str) -> Demonstration:
    if unknown := set(row) - {"environment", "seed", "actions"}:
        raise DataError(f"{where}: {sorted(unknown)} mean nothing: a demonstration has environment, seed and actions.")
    name, seed, actions = row.get("environment"), row.get("seed"), row.get("actions")
    if name is None and len(entries) == 1:
        (name,) = entries
    if not isinstance(name, str) or name not in entries:
        raise DataError(f"{where}: environment is {name!r}, and must be one of {', '.join(map(repr, entries))}.")
    most, turns = entries[name].num_episodes, entries[name].num_turns
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < most:
        raise DataError(
            f"{where}: seed is {seed!r}, but episodes of '{name}' to train on have the seeds 0 to {most - 1}: choose "
            "one of these, or raise num_episodes."
        )
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise DataError(f"{where}: actions must be a list of texts.")
    if not 2 <= len(actions) <= turns:
        raise DataError(
            f"{where}: {len(actions)} actions, but an episode to begin in the midst of has between 2 and num_turns "
            f"{turns}."
        )
    return Demonstration(domain=name, seed=seed, actions=tuple(actions), where=where)


async def play_demonstrations(
    opened: OnlineLoop[AgenticConfig], stream: PromptStream, shown: Sequence[Demonstration]
) -> None:
    """Play what was read, and keep it; a resumed run has it already.

    Raises:
        DataError: a demonstration does not succeed.
    """
    state = opened.run.state
    assert isinstance(state, AgenticState)
    if state.shown or not shown:
        return
    opened.run.tracker.note("playing demonstrations")
    state.kept = (*state.kept, *await asyncio.gather(*(_played(opened, stream, one) for one in shown)))
    state.shown = True


async def _played(opened: OnlineLoop[AgenticConfig], stream: PromptStream, shown: Demonstration) -> KeptEpisode:
    """Played twice, to see that the environment repeats it."""
    draw = stream.again(-1, shown.domain, stream.position_of(shown.domain, shown.seed))
    draw = replace(draw, prompt=replace(draw.prompt, expert=shown.actions))
    name = f"'{shown.domain}' with seed {shown.seed}"
    try:
        found = [await demonstration(opened.config, opened.live, draw) for _ in range(2)]
    except InfraError as error:
        raise DataError(f"{shown.where}: the demonstration cannot be played: {error}") from error
    kept = []
    for rollout in found:
        if rollout is None or not succeeded(rollout) or len(rollout.turns) != len(shown.actions):
            played = f"{len(rollout.turns) if rollout else 0} of {len(shown.actions)} actions were played"
            reward = f"{rollout.reward.value:g}" if rollout and rollout.reward else "none"
            raise DataError(
                f"{shown.where}: the demonstration is no success in {name}: {played}, and its reward is {reward}. "
                "Check its seed and actions, and the environment's options."
            )
        trajectory = recorded(rollout)
        kept.append(KeptEpisode(domain=shown.domain, position=draw.position, trajectory=trajectory, shown=True))
    if kept[0].to_json() != kept[1].to_json():
        raise DataError(
            f"{shown.where}: {name} went another way when the demonstration was played again, so nothing can begin in "
            "its midst: let its reset(seed) decide all that happens, or remove anchors."
        )
    return kept[0]
