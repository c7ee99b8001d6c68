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

__all__ = ["AgenticState", "AnchorEpisode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorEpisode:
    """A successful episode, and the results of rollouts that began at its anchors."""

    domain: str
    position: int
    """Position of the domain's stream when the episode was drawn."""
    trajectory: Trajectory
    is_demonstration: bool = False
    """True for a user's demonstration, which is never replaced by another episode."""
    recent_results: Mapping[int, tuple[bool, ...]] = field(default_factory=dict)
    """Success of the latest rollouts from each anchor, by the number of replayed turns."""
    passed_anchors: frozenset[int] = frozenset()
    """Anchors from which the policy succeeds."""

    def to_json(self) -> dict[str, Any]:
        """Return the episode as JSON-serializable data."""
        trajectory = self.trajectory
        return {
            "domain": self.domain,
            "position": self.position,
            "shown": self.is_demonstration,
            "recent": [[anchor, *map(int, found)] for anchor, found in sorted(self.recent_results.items())],
            "passed": sorted(self.passed_anchors),
            "uid": trajectory.uid,
            "reward": trajectory.reward,
            "prompt": _encode_tokens(trajectory.prompt_token_ids),
            "tokens": _encode_tokens(trajectory.token_ids),
            "turns": [[turn.start, turn.end, turn.reward, turn.state] for turn in trajectory.turns],
            "branches": [[branch.start, _encode_tokens(branch.context)] for branch in trajectory.branches],
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
            is_demonstration=written.shown,
            recent_results={anchor: tuple(map(bool, found)) for anchor, *found in written.recent},
            passed_anchors=frozenset(written.passed),
        )


class _EpisodeRecord(NamedTuple):
    """The fields of an episode in the format of `AnchorEpisode.to_json`."""

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
            prompt_token_ids=_decode_tokens(self.prompt),
            token_ids=_decode_tokens(self.tokens),
            turns=tuple(Turn(start=s, end=e, reward=r, state=state) for s, e, r, state in self.turns),
            branches=tuple(
                Branch(start=start, context=_decode_tokens(context), media=spans)
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


def _encode_tokens(token_ids: IntArray) -> str:
    return base64.b64encode(zlib.compress(np.asarray(token_ids, "<i4").tobytes())).decode()


def _decode_tokens(text: str) -> IntArray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4").astype(np.int32)


_JSON_KEYS = {
    "episodes": "kept",
    "anchors_in_flight": "begun",
    "replay_failures": "unrepeated",
    "demonstrations_played": "shown",
}
"""Keys of fields of `AgenticState` in checkpoints, where they differ from the names of the fields."""


@dataclass(kw_only=True, slots=True)
class AgenticState(LearningState):
    """State of an agentic run at a step's boundary."""

    success_rates: dict[str, float] = field(default_factory=dict)
    """Success rate of each environment, averaged over its last episodes."""
    episodes: tuple[AnchorEpisode, ...] = ()
    """Successful episodes with anchors; at most one per prompt, the oldest first."""
    anchors_in_flight: dict[str, list[Any]] = field(default_factory=dict)
    """Anchors of draws in flight, by draw ID, as [UID of the episode, number of replayed turns]."""
    replay_failures: dict[str, int] = field(default_factory=dict)
    """Number of episodes per environment that could not be replayed."""
    demonstrations_played: bool = False
    """True if the user's demonstrations were executed."""

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON-serializable data, including the episodes."""
        episodes, self.episodes = self.episodes, ()  # not to be copied
        try:
            value = super(AgenticState, self).to_json()
        finally:
            self.episodes = episodes
        value["episodes"] = [episode.to_json() for episode in episodes]
        return {_JSON_KEYS.get(name, name): part for name, part in value.items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Build the state from the data that `to_json` returned.

        Raises:
            CheckpointVersionError: Another version of ROLL wrote the data, and this version cannot read it.
        """
        names = {key: name for name, key in _JSON_KEYS.items()}
        state = super(AgenticState, cls).from_json({names.get(key, key): part for key, part in value.items()})
        state.episodes = tuple(AnchorEpisode.from_json(found) for found in value["kept"])
        return state
