"""RolloutScheduler: turns sampled prompts into scored groups.

    draws ──► group_size rollouts each ──► LLMProxy ──► tokens ──► reward, as soon as a rollout ends ──► Group

Each rollout is a separate task, so a slow answer or a hanging verifier does not block other rollouts.

Invariants:
    - every draw passed to `collect` is returned as one `Group` with `group_size` rollouts, in order;
    - when `collect` or `stop` returns, no engine works on a stopped rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from roll.rollout.attempts import RolloutRunner, SamplingPlan
from roll.rollout.group_run import GroupRun
from roll.rollout.lifecycle import RolloutState
from roll.types import Group, PromptDraw

__all__ = ["RolloutScheduler"]


class RolloutScheduler(RolloutRunner):
    """Generates and scores single rollouts (see `RolloutRunner`) and whole groups."""

    async def stop(self, runs: Collection[GroupRun]) -> None:
        """Stop groups, including complete ones, and abort their requests at the engines."""
        for run in runs:
            run.stop()
        tasks = [task for run in runs for task in run.tasks]
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.proxy.wait_for_orphaned_requests()

    async def collect(self, draws: Sequence[PromptDraw], plan: SamplingPlan) -> list[Group]:
        """Generate and score `plan.group_size` rollouts of every draw.

        If the call is canceled, the requests in progress are aborted at the engines before it returns.
        """
        ended = asyncio.Event()
        missing = len(draws)

        def on_end(run: GroupRun) -> None:
            nonlocal missing
            missing -= 1
            if not missing or run.error is not None:
                ended.set()

        runs = [GroupRun(draw, [plan], self, on_end=on_end) for draw in draws]
        state = RolloutState.ABORTED
        try:
            if runs:
                await ended.wait()
            if failed := next((run for run in runs if run.error is not None), None):
                assert failed.error is not None
                raise failed.error
            state = RolloutState.MEASURED
            return [run.group for run in runs]
        finally:
            try:
                await self.stop(runs)
            finally:
                for run in runs:
                    self.finalize(run, state)

    def finalize(self, run: GroupRun, state: RolloutState, detail: str = "") -> None:
        """Set the final state `state` for all scored rollouts of a group that have no final state yet."""
        for name in (rollout.rollout_id for rollout in run.all_scored_rollouts):
            if self.lifecycle.get_state(name) is RolloutState.ACCEPTED:
                self.lifecycle.move(name, state, detail)
