"""AsyncController: launches rollouts ahead of training, within the staleness bound, and forms batches of them.

    stream ──► deferred, fresh draws ──► admit (≤ N + ⌈αN⌉ groups) ──► RolloutScheduler ──► SampleBuffer
                      ▲                                                            │
                      └── defer ◄── leftovers of a step that closed early          ▼
    complete_step(version) ◄── sync ◄── suspend ◄── train ◄──────────────────────── next_batch()

The training loop calls `next_batch`, trains, syncs weights to the engines inside `pause_for_update()`, and calls
`complete_step`. With α > 0, `complete_step` launches the next groups immediately, so that they run during the next
step, and `next_batch` also launches as many groups as the staleness bound allows; with α = 0, only `next_batch`
launches, so that no rollout runs between two steps.

A group that begins during the update from version n to n + 1 has version n. It can be used for the updates from n + 1
to n + ⌈α⌉, so while a batch is trained, ⌈α⌉ N other groups may be live. For integer α, this equals N + ⌈αN⌉ minus the
batch, and nothing is launched before `complete_step`. For other α it is more: α = 0.5 would otherwise launch half of
the next batch only after training, without any benefit if all answers have the same length.

Invariants:
    - every launched draw is either live, deferred, or in the batch that reports its outcome (trained, rejected,
      expired): no draw is lost, and no draw is trained twice;
    - with α > 0, at most N + ⌈αN⌉ groups that no step has taken are live, and at most ⌈α⌉ N while a batch is trained,
      so the buffer has at most (1 + ⌈α⌉) N finished groups, including those that are being trained;
    - with `wait`, no token of a batch is more than ⌈α⌉ policy versions older than the trainer, and no group is dropped
      because of its age; with `drop`, older groups are stopped and expire;
    - with tail batching and α > 0, a prompt is deferred at most once (`long_rounds`);
    - in synchronous training, the selection of groups depends on timing only with `first_finished`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from roll.config.scheduling import SchedulingConfig
from roll.rollout.batch import Batch, BatchSpec
from roll.rollout.buffer import LiveGroup, SampleBuffer
from roll.rollout.group_run import GroupRun
from roll.rollout.lifecycle import RolloutState
from roll.rollout.long_rounds import LongRounds
from roll.rollout.proxy import LLMProxy
from roll.rollout.quotas import Quotas
from roll.rollout.rounds import Round, choose_groups, list_guaranteed_groups, plan_next_round, pop_first_draws
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.scoring_gate import ScoringGate
from roll.rollout.selection_bias import SelectionBias
from roll.types import Group, PromptDraw, RolloutId

__all__ = ["AsyncController", "RoundListener"]


class RoundListener(Protocol):
    """Receives the rounds of a run, or with α > 0 its steps."""

    async def before_round(self, kind: str) -> None:
        """Prepare the engines before a round of type `kind` is launched (`Batch.kind`); no weight sync runs."""
        ...

    def on_batch(self, batch: Batch) -> None:
        """Receive a complete batch."""
        ...


class _NoListener:
    """A `RoundListener` that does nothing."""

    async def before_round(self, kind: str) -> None:
        """Do nothing."""

    def on_batch(self, batch: Batch) -> None:
        """Do nothing."""


class AsyncController:
    """Decides which groups are launched, and which groups form the next batch.

    Args:
        scheduler: Scheduler that generates the rollouts.
        proxy: Proxy that is suspended while weights change.
        config: Scheduling policies.
        spec: Prompt source, size and filters of batches.
        version: The trainer's policy version.
        pending: Draws that were in flight when an earlier process ended; launched first.
    """

    def __init__(
        self,
        scheduler: RolloutScheduler,
        proxy: LLMProxy,
        config: SchedulingConfig,
        spec: BatchSpec,
        *,
        version: int = 0,
        pending: Sequence[PromptDraw] = (),
    ) -> None:
        waits = config.stale_policy == "wait"
        self.buffer = SampleBuffer(spec.batch_size, config.max_staleness, enforce_deadlines=waits)
        self.buffer.version = version
        self._scheduler = scheduler
        self._proxy = proxy
        self._config = config
        self._spec = spec
        self._deferred = deque(pending)
        self._limit = spec.batch_size + math.ceil(config.async_ratio * spec.batch_size)
        self._batches_left = spec.num_steps
        defers = config.type == "tail_batching" and config.async_ratio > 0
        self._long_rounds = LongRounds(spec.batch_size, len(pending), enabled=defers)
        self._round = Round(
            num_groups={None: spec.batch_size},
            num_rollouts=config.compute_num_rollouts(spec.plans[0].group_size),
            first_finished=config.trains_first_finished,
        )
        self._is_round_planned = False
        """True while the engines are prepared for the round in `_round`, which is not launched yet."""
        self._quotas = Quotas(spec.weights, spec.num_allocated)
        self._quota: Counter[str] = Counter()
        self._left_out: dict[int, tuple[GroupRun, str]] = {}
        self._expired: dict[int, tuple[GroupRun, str]] = {}
        self._expired_lengths: list[int] = []
        self._selection_bias = SelectionBias()
        self._num_refills = 0
        self._refills_due: list[str] = []
        """Domains of the replacement groups to launch after the current round, for the scheduling type `batch`."""
        purposes = {plan.purpose for plan in spec.plans}
        self.round_listener: RoundListener = _NoListener()
        self._gate = ScoringGate(scheduler.lifecycle, purposes) if config.type == "batch" else None
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    # ---- called by the training loop

    async def next_batch(self) -> Batch:
        """Wait for the groups of the next step, and return them as a batch.

        Raises:
            Exception: A rollout failed with an unexpected error, caused neither by the model nor by infrastructure.
        """
        if not self.buffer.running_groups and not self.buffer.num_ready:
            await self._open_round()
        while True:
            if self._error is not None:
                raise self._error
            chosen = choose_groups(self.buffer, self._round, self._spec.batch_size, self._quota)
            if chosen is not None:
                with self._round.close_with(chosen):
                    return await self._close_round(chosen)
            if late := self._long_rounds.choose_deferred(self.buffer):
                await self._release_leftovers(late)
                continue
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_guaranteed_groups(self, known_ids: Collection[int], count: int) -> list[Group]:
        """Wait until at least `count` finished groups are certain to be in the next batch, and return these groups.

        Groups in `known_ids` (draw ids) do not count. The call may never end: cancel it when `next_batch` returns.
        """
        while True:
            found = list_guaranteed_groups(self.buffer, self._round, self._spec.batch_size, self._quota)
            new = [live.run.group for live in found if live.draw_id not in known_ids]
            if len(new) >= count:
                return new
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def pause_for_update(self) -> AsyncIterator[None]:
        """Pause all engines while the caller syncs weights in the `with` block; rollouts in flight continue afterwards.

        If the block raises an error, the engines stay paused, because they may have mixed weights.
        """
        if self._config.async_ratio == 0:  # nothing is in flight between two batches
            yield
            return
        await self._proxy.suspend(self._config.pause_mode)
        yield  # not in a `try … finally`, because engines must not resume after an error
        await self._proxy.resume()

    async def complete_step(self, version: int, trained: Collection[RolloutId]) -> None:
        """Finish the step: release its groups, and launch groups that run during the next step.

        Args:
            version: The current policy version of trainer and engines.
            trained: Ids of the rollouts on which the update was computed.
        """
        lifecycle = self._scheduler.lifecycle
        for live in self.buffer.pop_taken():
            self._long_rounds.remove(live.draw_id)
            for rollout in live.run.all_scored_rollouts:
                name = rollout.rollout_id
                if lifecycle.get_state(name) is not RolloutState.ACCEPTED:
                    continue
                is_companion, used = name.purpose != self._spec.plans[0].purpose, name in trained
                unused = RolloutState.MEASURED if is_companion else RolloutState.FILTERED
                lifecycle.move(name, RolloutState.TRAINED if used else unused)
        self.buffer.version = version
        if self._batches_left is not None:
            self._batches_left -= 1
        self._num_refills = 0
        if self._config.async_ratio > 0:
            if self._config.stale_policy == "drop":
                await self._expire(self.buffer.list_overdue(), "too old")
            await self.round_listener.before_round("")
            self._fill_buffer()

    async def close(self) -> None:
        """Stop all running groups."""
        runs = [live.run for live in self.buffer]
        await self._scheduler.stop(runs)
        for run in runs:
            self._scheduler.finalize(run, RolloutState.ABORTED, "the run ends")
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def list_in_flight(self) -> list[PromptDraw]:
        """Return the launched and deferred draws whose outcome has not been reported in a batch, sorted by draw id."""
        live = [entry.run.draw for entry in self.buffer if not entry.is_taken]
        unreported = [run.draw for run, _ in [*self._left_out.values(), *self._expired.values()]]
        return sorted([*live, *self._deferred, *unreported], key=lambda draw: draw.draw_id)

    # ---- launching

    async def _open_round(self) -> None:
        """Launch the groups of the next step; must be called while no group is running."""
        if self._config.async_ratio > 0:
            self._fill_buffer()
            return
        if not self._is_round_planned:  # a canceled call may have planned it
            self._quota = self._quotas.allocate(self._spec.batch_size)
            deferred = Counter(self._quotas.get_key(draw) for draw in self._deferred)
            left = None if self._batches_left is None else self._batches_left - 1
            self._round = _plan_round(self._config, self._spec, self._quotas, self._quota, deferred, left)
            self._is_round_planned = True
        current = self._round
        await self.round_listener.before_round(current.kind)
        self._is_round_planned = False
        first = pop_first_draws(self._deferred, current.deferred, self._quotas.get_key)
        current.mandatory_draw_ids.update(draw.draw_id for draw in first)
        missing = Counter(current.num_groups)
        missing.subtract(self._quotas.get_key(draw) for draw in first)
        fresh = [draw for domain, count in missing.items() for draw in self._spec.draw(count, domain)]
        self._launch([*first, *fresh])
        self._launch(pop_first_draws(self._deferred, current.spare_deferred, self._quotas.get_key))
        for domain, count in current.spare.items():
            self._launch(self._spec.draw(count, domain))

    def _fill_buffer(self) -> None:
        """Launch groups up to the number of live groups that the staleness bound and the remaining steps allow."""
        size, training = self._spec.batch_size, self.buffer.num_taken > 0
        limit = min(self._limit, self._config.max_staleness * size) if training else self._limit
        live = len(self.buffer) - self.buffer.num_taken
        slots = None if self._batches_left is None else (self._batches_left - training) * size - live
        missing = limit - live if slots is None else min(limit - live, slots)
        if missing > 0:
            plan = self._long_rounds.plan_launch(missing, len(self._deferred), slots)
            first, count = [self._deferred.popleft() for _ in range(plan.num_deferred)], plan.num_new
            domains: Sequence[str | None] = self._quotas.allocate_in_order(count) or [None] * count
            self._launch([*first, *(draw for domain in domains for draw in self._spec.draw(1, domain))])

    def _launch(self, draws: Sequence[PromptDraw]) -> None:
        spec, current = self._spec, self._round
        for draw in draws:
            plain = self._long_rounds.is_mandatory(draw)
            run = GroupRun(
                draw,
                spec.plans,
                self._scheduler,
                num_launched=spec.plans[0].group_size if plain else current.num_rollouts,
                first_finished=current.first_finished and not plain,
                early_stop=spec.early_stop,
                on_start=lambda run: self.buffer.record_start(run.draw.draw_id),
                on_end=self._on_end,
                before_reward=self._gate.opened if self._gate is not None else None,
            )
            self.buffer.admit(run, max(self._limit, current.num_prompts))
            if self._gate is not None:
                self._gate.add(len(run.tasks))  # before any of these tasks runs

    def _on_end(self, run: GroupRun) -> None:
        """Handle the end of a group: store its error, mark it as finished, or reject it and possibly replace it."""
        self._changed.set()
        if run.error is not None:
            self._error = self._error or run.error
            return
        if run.tasks:  # redundant rollouts that were canceled
            self._stop_in_background([run])
        reason = _find_reason(run, self._spec) if self._spec.get_rejection_reason is not None else ""
        redundant = self._round.is_speculative and self._has_spare_group(run.draw.prompt.domain)
        may_refill = self._num_refills < self._spec.max_refills * self._spec.batch_size
        if reason and (redundant or may_refill):
            self.buffer.discard(run.draw.draw_id)
            self._scheduler.finalize(run, RolloutState.FILTERED, reason)
            self._left_out[run.draw.draw_id] = (run, reason)
            if not redundant:
                self._num_refills += 1
                self._refills_due.append(run.draw.prompt.domain)
        else:
            self.buffer.record_finish(run.draw.draw_id)
        if self._refills_due and (self._config.type != "batch" or not self.buffer.running_groups):
            due, self._refills_due = self._refills_due, []
            self._launch([draw for domain in due for draw in self._spec.draw(1, domain if self._quotas else None)])

    def _has_spare_group(self, domain: str) -> bool:
        """Return whether dropping one group of this domain would leave enough live groups for the step."""
        num_wanted = self._quota[domain] if self._quota else self._spec.batch_size
        return sum(not self._quota or live.run.draw.prompt.domain == domain for live in self.buffer) > num_wanted

    # ---- closing

    async def _close_round(self, chosen: Sequence[LiveGroup]) -> Batch:
        # With an async ratio of 0, `pause_for_update` pauses no engine, so canceled rollouts must have left them.
        if self._stopping:
            await asyncio.wait(self._stopping)
        if self._config.async_ratio == 0:
            await self._release_leftovers([live for live in self.buffer if not live.is_taken and live not in chosen])
        taken_groups = [self.buffer.take(live.draw_id) for live in chosen]  # from here on, no group may be stopped
        if self._config.async_ratio > 0:
            self._fill_buffer()
        pairs = [(live.run, "") for live in taken_groups] + list(self._left_out.values())
        for run, _ in pairs:
            self._selection_bias.add(run, is_counted=not run.stopped_early)
        pairs.sort(key=lambda pair: pair[0].draw.draw_id)
        batch = Batch(
            groups=[run.group for run, _ in pairs],
            rejection_reasons={run.draw.draw_id: reason for run, reason in pairs if reason}
            | {live.draw_id: _find_reason(live.run, self._spec) for live in taken_groups if live.run.stopped_early},
            expired={draw_id: reason for draw_id, (_, reason) in self._expired.items()},
            expired_lengths=self._expired_lengths,
            num_refills=self._num_refills,
            kind=self._round.kind,
            selection_bias=self._selection_bias if self._config.selects_rollouts else None,
            staleness=[self.buffer.version - (live.version or 0) for live in taken_groups if live.version is not None],
        )
        for run, _ in pairs:
            batch.add_companions(run.companions)
        self._left_out, self._expired, self._expired_lengths, self._selection_bias = {}, {}, [], SelectionBias()
        self.round_listener.on_batch(batch)
        return batch

    async def _release_leftovers(self, groups: Sequence[LiveGroup]) -> None:
        """Stop the groups that the step does not need; drop or defer their draws, according to `leftovers`."""
        if self._config.leftovers == "drop":
            await self._expire(groups, "redundant: the step had enough groups")
            return
        self._deferred.extend(live.run.draw for live in groups)
        await self._stop(groups, RolloutState.ABORTED, "deferred")

    async def _expire(self, groups: Sequence[LiveGroup], reason: str) -> None:
        for live in groups:
            self._expired[live.draw_id] = (live.run, reason)
            self._expired_lengths += [len(rollout.token_ids) for rollout in live.run.all_scored_rollouts]
            if self._config.async_ratio > 0:
                self._quotas.return_slot(live.run.draw.prompt.domain)
        await self._stop(groups, RolloutState.EXPIRED, reason)

    async def _stop(self, groups: Sequence[LiveGroup], state: RolloutState, reason: str) -> None:
        for live in groups:
            self.buffer.discard(live.draw_id)
        try:
            await self._scheduler.stop([live.run for live in groups])
        finally:
            for live in groups:
                self._selection_bias.add(live.run, is_counted=False)
                self._scheduler.finalize(live.run, state, reason)

    def _stop_in_background(self, runs: Sequence[GroupRun]) -> None:
        task = asyncio.create_task(self._scheduler.stop(runs))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


def _plan_round(
    config: SchedulingConfig,
    spec: BatchSpec,
    quotas: Quotas,
    quota: Mapping[str, int],
    deferred: Mapping[str | None, int],
    batches_left: int | None,
) -> Round:
    """Plan a round with the domains of `quota`; `batches_left` is the number of batches after it, if it is known."""
    left = None if batches_left is None else batches_left * spec.batch_size
    return plan_next_round(
        config,
        num_groups={**quota} or {None: spec.batch_size},
        deferred=deferred,
        num_later_groups=None if left is None else ({**quotas.peek(left)} if quotas else {None: left}),
        group_size=spec.plans[0].group_size,
    )


def _find_reason(run: GroupRun, spec: BatchSpec) -> str:
    """Return the reason why a finished group is rejected; an empty string if it is accepted."""
    if run.stopped_early:
        return "early stopping: no reward of the missing rollouts could make the group pass the filters"
    return spec.get_rejection_reason(run.group) if spec.get_rejection_reason is not None else ""
