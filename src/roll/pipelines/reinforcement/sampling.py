"""Sampling plans and group filters of runs with an `algorithm`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from roll.algorithms.selection import build_early_stop_predicate, find_group_filter_reason
from roll.config.reinforcement_run import ReinforcementRunConfig
from roll.data import PromptData
from roll.pipelines.generation import GenerationParts
from roll.pipelines.learning.state import LearningState
from roll.pipelines.online import sampling
from roll.rollout import AsyncController, DataLedger, SamplingPlan
from roll.rollout.group_run import EarlyStopPredicate

__all__ = ["GREEDY_PURPOSE", "build_controller"]

GREEDY_PURPOSE = "greedy"
"""Purpose of the greedy answers of the baseline `greedy`."""


def build_controller(
    config: ReinforcementRunConfig,
    state: LearningState,
    data: PromptData,
    ledger: DataLedger,
    generation: GenerationParts,
    plan: SamplingPlan,
    *,
    draws: sampling.DrawSource | None = None,
) -> AsyncController:
    """Build the controller of a run with an algorithm's filters and companions; see
    `online.sampling.build_controller`.
    """
    algorithm, longest = config.algorithm, config.rollout.max_new_tokens
    refills = (
        partial(find_group_filter_reason, algorithm=algorithm, max_new_tokens=longest)
        if algorithm.filters.refill
        else None
    )
    return sampling.build_controller(
        config,
        state,
        data,
        ledger,
        generation,
        plan,
        *_build_companion_plans(config, plan),
        get_rejection_reason=refills,
        max_refills=algorithm.filters.max_refills,
        early_stop=_build_configured_early_stop(config),
        draws=draws,
    )


def _build_companion_plans(config: ReinforcementRunConfig, plan: SamplingPlan) -> tuple[SamplingPlan, ...]:
    """Return the sampling plan of greedy answers, if the baseline is greedy."""
    if config.algorithm.advantage.mean != "greedy":
        return ()
    greedy = replace(plan.sampling, temperature=0.0, top_p=1.0, top_k=0)
    return (replace(plan, purpose=GREEDY_PURPOSE, group_size=1, sampling=greedy),)


def _build_configured_early_stop(config: ReinforcementRunConfig) -> EarlyStopPredicate | None:
    scheduling = config.rollout.scheduling
    if not scheduling.early_stop_groups or scheduling.reward_range is None:
        return None
    single_turn = all(entry.turns == 1 for entry in config.data)
    return build_early_stop_predicate(
        config.algorithm, scheduling.reward_range, config.rollout.max_new_tokens, single_turn=single_turn
    )
