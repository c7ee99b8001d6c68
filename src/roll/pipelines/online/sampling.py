"""Where a run's batches of rollouts come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roll.config.generating import GeneratingConfig
from roll.data import Data
from roll.pipelines.generation import Generation
from roll.pipelines.learning.state import LearningState
from roll.rollout import AsyncController, BatchSpec, DataLedger, SamplingPlan
from roll.types import PromptDraw

__all__ = ["build_controller"]


def build_controller(
    config: GeneratingConfig,
    state: LearningState,
    data: Data,
    ledger: DataLedger,
    generation: Generation,
    plan: SamplingPlan,
    *companions: SamplingPlan,
    domain_of: Callable[[int], str] | None = None,
    **asked: Any,
) -> AsyncController:
    """The controller of a run, with what an earlier process left in flight.

    Args:
        config: of the run.
        state: at a boundary.
        data: the prompts.
        ledger: is told of every draw.
        generation: what answers and scores.
        plan: how groups are sampled.
        companions: how further answers to their prompts are.
        domain_of: of which domain a draw is, by its number, where that is not left to the sources' weights.
        asked: of finished groups, as in `BatchSpec`.
    """

    def draw(count: int, domain: str | None) -> Sequence[PromptDraw]:
        stream = data.train
        if domain is None and domain_of is not None:
            drawn = [stream.draw(1, domain_of(stream.num_drawn))[0] for _ in range(count)]
        else:
            drawn = stream.draw(count, domain)
        ledger.open(drawn, state.step + 1)
        return drawn

    rollout = config.rollout
    pending = [data.train.again(*entry) for entry in state.pending]
    ahead = rollout.scheduling.async_ratio > 0
    quotas = {entry.domain or entry.source: entry.weight for entry in config.data}
    return AsyncController(
        generation.scheduler,
        generation.proxy,
        rollout.scheduling,
        BatchSpec(
            draw=draw,
            plans=(plan, *companions),
            batch_size=rollout.prompts_per_step,
            num_steps=config.training.num_steps - state.step,
            weights=quotas if rollout.scheduling.domain_quotas else {},
            num_dealt=state.step * rollout.prompts_per_step + (len(pending) if ahead else 0),
            **asked,
        ),
        version=state.policy_version,
        pending=pending,
    )
