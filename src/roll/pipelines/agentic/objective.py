"""RL objective on episodes. Results also update the curriculum of environments and the anchors where groups begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.algorithms.selection import Selection
from roll.config.pipelines.agentic import AgenticConfig
from roll.pipelines.episodes.anchors import compute_anchor_metrics, update_anchors
from roll.pipelines.episodes.curriculum import update_success_rates
from roll.pipelines.episodes.state import AgenticState
from roll.pipelines.online.protocols import CollectedBatch
from roll.pipelines.reinforcement.objective import ReinforcementObjective
from roll.rollout import Batch

__all__ = ["AgenticObjective"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgenticObjective(ReinforcementObjective[AgenticConfig]):
    """The objective of agentic runs: reinforcement learning, with updates of the curriculum and the anchors."""

    async def collect(self, batch: Batch) -> CollectedBatch[Selection]:
        """Select the rollouts to train on, and add metrics of the groups that began at anchors."""
        collected = await ReinforcementObjective.collect(self, batch)
        if self.online.config.anchors is None:
            return collected
        return replace(collected, metrics=compute_anchor_metrics(self._state.episodes, batch.groups))

    def update_state(self, collected: CollectedBatch[Selection]) -> None:
        """Store reward moments, success rates of environments, and results of anchors in the run's state."""
        ReinforcementObjective.update_state(self, collected)
        config, state, groups = self.online.config, self._state, collected.batch.groups
        if config.curriculum is not None:
            update_success_rates(config.curriculum, state, groups)
        if config.anchors is not None:
            update_anchors(config.anchors, state, groups, self.online.batches.list_in_flight())

    @property
    def _state(self) -> AgenticState:
        state = self.online.run.state
        assert isinstance(state, AgenticState), "the state of an agentic run is an AgenticState"
        return state
