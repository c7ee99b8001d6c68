"""The state that an agentic run keeps between steps."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from roll.pipelines.learning.state import LearningState
from roll.records import read_record
from roll.types import Branch, IntArray, MediaSpan, Trajectory, Turn

__all__ = ["AgenticState", "KeptEpisode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptEpisode:
    """A successful episode, and the results of rollouts that began at its anchors."""

    domain: str
    position: int
    """Position of its domain's stream when it was drawn."""
    trajectory: Trajectory
    shown: bool = False
    """Whether it is a demonstration of the user, which is never dropped in favor of another episode."""
    recent: Mapping[int, tuple[bool, ...]] = field(default_factory=dict)
    """Results by anchor (the number of replayed turns): whether each of the last rollouts from the anchor succeeded."""
    passed: frozenset[int] = frozenset()
    """Anchors from which the policy succeeds."""

    def to_json(self) -> dict[str, Any]:
        """Return the episode as plain data."""
        trajectory = self.trajectory
        return {
            "domain": self.domain,
            "position": self.position,
            "shown": self.shown,
            "recent": [[anchor, *map(int, found)] for anchor, found in sorted(self.recent.items())],
            "passed": sorted(self.passed),
            "uid": trajectory.uid,
            "reward": trajectory.reward,
            "prompt": _pack(trajectory.prompt_token_ids),
            "tokens": _pack(trajectory.token_ids),
            "turns": [[turn.start, turn.end, turn.reward, turn.state] for turn in trajectory.turns],
            "branches": [[branch.start, _pack(branch.context)] for branch in trajectory.branches],
            **_encode_media(trajectory),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Build the episode from the data that `to_json` returned."""
        written = read_record(_EpisodeRecord, value)
        return cls(
            domain=written.domain,
            position=written.position,
            trajectory=written.build_trajectory(),
            shown=written.shown,
            recent={anchor: tuple(map(bool, found)) for anchor, *found in written.recent},
            passed=frozenset(written.passed),
        )


class _EpisodeRecord(NamedTuple):
    """The fields of an episode in the format of `KeptEpisode.to_json`."""

    domain: str
    position: int
    shown: bool
    recent: Sequence[Sequence[int]]
    passed: Sequence[int]
    uid: str
    prompt: str
    tokens: str
    turns: Sequence[tuple[int, int, float, str]]
    branches: Sequence[tuple[int, str]]
    reward: float
    media: Sequence[Sequence[Mapping[str, Any]]] = ()

    def build_trajectory(self) -> Trajectory:
        own = [tuple(map(MediaSpan.from_dict, spans)) for spans in self.media]
        prompt_media, media, *of_branches = own or [()] * (2 + len(self.branches))
        return Trajectory(
            uid=self.uid,
            prompt_token_ids=_unpack(self.prompt),
            token_ids=_unpack(self.tokens),
            turns=tuple(Turn(start=s, end=e, reward=r, state=state) for s, e, r, state in self.turns),
            branches=tuple(
                Branch(start=start, context=_unpack(context), media=spans)
                for (start, context), spans in zip(self.branches, of_branches, strict=True)
            ),
            prompt_media=prompt_media,
            media=media,
            reward=self.reward,
        )


def _encode_media(trajectory: Trajectory) -> dict[str, Any]:
    """Return the media spans of the prompt, the tokens and every branch; empty without media."""
    parts = (trajectory.prompt_media, trajectory.media, *(branch.media for branch in trajectory.branches))
    return {"media": [[span.to_dict() for span in spans] for spans in parts]} if any(parts) else {}


def _pack(token_ids: IntArray) -> str:
    return base64.b64encode(zlib.compress(np.asarray(token_ids, "<i4").tobytes())).decode()


def _unpack(text: str) -> IntArray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").astype(np.int32)


@dataclass(kw_only=True, slots=True)
class AgenticState(LearningState):
    """State of an agentic run at a step's boundary."""

    success_rates: dict[str, float] = field(default_factory=dict)
    """Success rate of each environment that was played, averaged over its last episodes."""
    kept: tuple[KeptEpisode, ...] = ()
    """Successful episodes with anchors; at most one per prompt, the oldest first."""
    begun: dict[str, list[Any]] = field(default_factory=dict)
    """Draws in flight that begin at an anchor, by id, as [uid of the episode, replayed turns]."""
    unrepeated: dict[str, int] = field(default_factory=dict)
    """Number of episodes that each environment did not repeat."""
    shown: bool = False
    """Whether the user's demonstrations were played."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data, including the kept episodes."""
        kept, self.kept = self.kept, ()  # not to be copied
        try:
            value = super(AgenticState, self).to_json()
        finally:
            self.kept = kept
        return {**value, "kept": [episode.to_json() for episode in kept]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build the state from the data that `to_json` returned.

        Raises:
            CheckpointVersionError: Another version of ROLL wrote the data, and this version cannot read it.
        """
        state = super(AgenticState, cls).from_json(value)
        state.kept = tuple(KeptEpisode.from_json(found) for found in value["kept"])
        return state
