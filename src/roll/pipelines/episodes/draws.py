"""Chooses the next draw: its environment, and whether it begins at an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll.config.pipelines.agentic import AgenticConfig
from roll.data import PromptStream
from roll.pipelines.episodes.anchors import choose_anchor
from roll.pipelines.episodes.curriculum import choose_domain
from roll.pipelines.episodes.state import AgenticState
from roll.types import Anchor, PromptDraw

__all__ = ["EpisodeDraws"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeDraws:
    """Creates draws that begin at a prompt from a stream or at an anchor; implements `online.sampling.DrawSource`."""

    config: AgenticConfig
    state: AgenticState
    """State at a step's boundary; its changes affect later draws."""
    stream: PromptStream

    def draw(self, count: int, domain: str | None = None) -> Sequence[PromptDraw]:
        """Return the next draws; if `domain` is given, only draws of this environment."""
        return [self._draw_next(domain) for _ in range(count)]

    def redraw(self, draw_id: int, domain: str, position: int) -> PromptDraw:
        """Return a draw that was in flight when an earlier process ended, with the same anchor."""
        draw = self.stream.redraw(draw_id, domain, position)
        uid, num_turns = self.state.anchors_in_flight.get(str(draw_id), ("", 0))
        found = next((one.trajectory for one in self.state.episodes if one.trajectory.uid == uid), None)
        return draw if found is None else replace(draw, anchor=Anchor(trajectory=found, num_turns=num_turns))

    def _draw_next(self, domain: str | None) -> PromptDraw:
        config, state, stream = self.config, self.state, self.stream
        number = stream.num_drawn
        if domain is None:
            domain = choose_domain(config, state, number) if config.curriculum else stream.next_domain
        chosen = choose_anchor(
            config.anchors, state.episodes, state.replay_failures, domain=domain, seed=config.seed, number=number
        )
        if chosen is None:
            return stream.draw(1, domain)[0]
        episode, anchor = chosen
        return replace(stream.repeat(domain, episode.position), anchor=anchor)
