"""Generation of a step's groups, with refills where groups do not pass the filters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll.pipelines.learning.demonstrations import demonstrations
from roll.pipelines.learning.selection import Selection, select
from roll.pipelines.parts import Parts
from roll.rollout import Fate
from roll.types import Group, PromptDraw, Rollout

__all__ = ["Collected", "collect"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """All groups that a step generated, and what it learns from."""

    groups: list[Group]
    selection: Selection
    num_refills: int = 0


async def collect(parts: Parts) -> Collected:
    """Draw prompts, answer and score them, and choose; may be cancelled at any moment.

    With `filters.refill` (dynamic sampling, DAPO, arXiv 2503.14476 eq. 11) further prompts are drawn in place of groups
    that were left out, at most `filters.max_refills` times; every draw gets a fate.
    """
    filters = parts.config.algorithm.filters
    wanted = parts.config.rollout.prompts_per_step
    groups: list[Group] = []
    greedy: list[Group] = []
    shown: list[Rollout] = []
    missing, refills = wanted, 0
    while True:
        with parts.spans.phase("generate"):
            draws = parts.data.train.draw(missing)
            parts.ledger.open(draws, parts.state.step + 1)
            fresh, baseline = await _answers(parts, draws)
            groups += fresh
            greedy += baseline
            shown += await demonstrations(parts, draws)
        with parts.spans.phase("advantages"):
            selection = select(
                groups,
                parts.config.algorithm,
                max_length=parts.config.max_answer_tokens,
                moments=parts.state.moments,
                greedy=greedy,
                demonstrations=shown,
            )
        missing = wanted - selection.count(Fate.TRAINED)
        if not filters.refill or missing <= 0 or refills == filters.max_refills:
            return Collected(groups=groups, selection=selection, num_refills=refills)
        refills += 1


async def _answers(parts: Parts, draws: Sequence[PromptDraw]) -> tuple[list[Group], list[Group]]:
    """Sampled groups, and greedy answers where the baseline is one."""
    if parts.config.algorithm.advantage.mean != "greedy":
        return await parts.scheduler.collect(draws, parts.train_plan), []
    sampling = replace(parts.train_plan.sampling, temperature=0.0, top_p=1.0, top_k=0)
    plan = replace(parts.train_plan, purpose="greedy", group_size=1, sampling=sampling)
    async with asyncio.TaskGroup() as tasks:
        sampled = tasks.create_task(parts.scheduler.collect(draws, parts.train_plan))
        greedy = tasks.create_task(parts.scheduler.collect(draws, plan))
    return sampled.result(), greedy.result()
