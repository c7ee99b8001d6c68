"""RolloutScheduler: from drawn prompts to scored groups.

    draws ──► group_size attempts each ──► LLMProxy ──► tokens ──► reward, the moment a rollout ends ──► Group

Each rollout is its own task, so a slow answer or a hanging verifier holds nothing else back.

Invariants:
    - every draw given to `collect` comes back as one `Group` with `group_size` rollouts, in order;
    - when `collect` or `stop` returns, engines work on none of the rollouts that were stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from roll.protocols import Reward
from roll.rollout.attempts import Attempts, SamplingPlan, request_seed
from roll.rollout.group_run import Doom, GroupRun
from roll.rollout.lifecycle import LifeCycle, RolloutState
from roll.rollout.loops import Renderer, RolloutLoop
from roll.rollout.proxy import LLMProxy
from roll.types import Group, PromptDraw, Rollout

__all__ = ["RolloutScheduler", "SamplingPlan", "request_seed"]


class RolloutScheduler:
    """Generates and scores.

    Args:
        proxy: where requests go.
        rewards: by domain.
        renderer: tokens to text, and what comes between two turns.
        seed: of the run.
        max_attempts: how often a rollout that infrastructure failed is issued before its fate is `infra_error`.
        retry_wait_s: wait before the second attempt; twice as long before each later one.
        replicate: whether a prompt's rollouts may run on different engines.
        loop: makes a rollout, in place of ROLL's own.
        on_rollout: told of every rollout as it ends (for a display); must return at once.
    """

    def __init__(
        self,
        proxy: LLMProxy,
        rewards: Mapping[str, Reward],
        renderer: Renderer,
        *,
        seed: int,
        max_attempts: int = 3,
        retry_wait_s: float = 0.0,
        replicate: bool = True,
        loop: RolloutLoop | None = None,
        on_rollout: Callable[[Rollout], None] = lambda rollout: None,
    ) -> None:
        self.life = LifeCycle()
        """Where every rollout stands."""
        self._proxy = proxy
        self._attempts = Attempts(
            proxy,
            rewards,
            renderer,
            self.life,
            seed=seed,
            max_attempts=max_attempts,
            retry_wait_s=retry_wait_s,
            replicate=replicate,
            loop=loop,
            on_rollout=on_rollout,
        )

    def launch(
        self,
        draw: PromptDraw,
        plans: Sequence[SamplingPlan],
        *,
        num_launched: int | None = None,
        first_finished: bool = False,
        doomed: Doom | None = None,
        on_start: Callable[[GroupRun], None] = lambda run: None,
        on_end: Callable[[GroupRun], None] = lambda run: None,
        before_reward: asyncio.Event | None = None,
    ) -> GroupRun:
        """Start all attempts at one draw; see `GroupRun`."""
        return GroupRun(
            draw,
            plans,
            self._attempts,
            num_launched=num_launched,
            first_finished=first_finished,
            doomed=doomed,
            on_start=on_start,
            on_end=on_end,
            before_reward=before_reward,
        )

    async def stop(self, runs: Collection[GroupRun]) -> None:
        """End these groups, and what engines do for them; also for groups that have ended by themselves."""
        for run in runs:
            run.stop()
        tasks = [task for run in runs for task in run.tasks]
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._proxy.end_orphans()

    async def collect(self, draws: Sequence[PromptDraw], plan: SamplingPlan) -> list[Group]:
        """Attempt every drawn prompt `plan.group_size` times and score each attempt.

        When cancelled, requests under way are aborted at the engines before it returns.
        """
        ended = asyncio.Event()
        missing = len(draws)

        def on_end(run: GroupRun) -> None:
            nonlocal missing
            missing -= 1
            if not missing or run.error is not None:
                ended.set()

        runs = [self.launch(draw, [plan], on_end=on_end) for draw in draws]
        fate = RolloutState.ABORTED
        try:
            if runs:
                await ended.wait()
            if failed := next((run for run in runs if run.error is not None), None):
                assert failed.error is not None
                raise failed.error
            fate = RolloutState.MEASURED
            return [run.group for run in runs]
        finally:
            await self.stop(runs)
            for run in runs:
                self.release(run, fate)

    def release(self, run: GroupRun, to: RolloutState, detail: str = "") -> None:
        """End the life of every scored rollout of a group that has no fate yet."""
        for name in (rollout.rollout_id for rollout in run.all_scored):
            if self.life.state(name) is RolloutState.ACCEPTED:
                self.life.move(name, to, detail)
