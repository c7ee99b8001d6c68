"""RL objective on episodes, whose results also decide which environments are drawn next and where groups begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.selection import Selection
from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.anchors import anchor_metrics, note_anchors
from roll.pipelines.episodes.curriculum import note_successes
from roll.pipelines.episodes.state import AgenticState
from roll.pipelines.online.protocols import Collected
from roll.pipelines.reinforcement.objective import Reinforcement
from roll.rollout import Batch

__all__ = ["Episodes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes(Reinforcement[AgenticConfig]):
    """Implements `Objective`."""

    async def collect(self, batch: Batch) -> Collected[Selection]:
        """See `Reinforcement.collect`; adds metrics of the groups that began at anchors."""
        collected = await Reinforcement.collect(self, batch)
        if self.online.config.anchors is None:
            return collected
        return replace(collected, metrics=anchor_metrics(self._state.kept, batch.groups))

    def note(self, collected: Collected[Selection]) -> None:
        """Store reward moments, success rates of environments, and results of anchors in the run's state."""
        Reinforcement.note(self, collected)
        config, state, groups = self.online.config, self._state, collected.batch.groups
        if config.curriculum is not None:
            note_successes(config.curriculum, state, groups)
        if config.anchors is not None:
            note_anchors(config.anchors, state, groups, self.online.batches.in_flight())

    @property
    def _state(self) -> AgenticState:
        state = self.online.run.state
        assert isinstance(state, AgenticState), "the pipeline says so"
        return state
