"""Bugs that `mutation_scheduler` plants in the scheduler, the engines' transitions and weight syncs, one at a time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUGS", "Bug"]


@dataclass(frozen=True)
class Bug:
    """One edit of one file."""

    what: str
    file: str
    """Path in `package`."""
    old: str
    new: str
    package: str = "rollout"


GIVE_BACK = "    def _release_slot(self, engine_id: str) -> None:\n        self._router.release_slot(engine_id)\n"

BUGS = (
    Bug(
        "a node that was announced to leave gets engines",
        "elastic.py",
        "0 if node.is_draining else",
        "0 if False else",
    ),
    Bug(
        "an id of an engine on a node that left is used again",
        "elastic_engines.py",
        "            self._next_number += 1\n",
        "            self._next_number = len(self._members)\n",
    ),
    Bug(
        "an engine that starts on a node that leaves is forgotten, and starts all the same",
        "elastic_engines.py",
        "member.task.cancel()  # removes the member",
        "self._members.pop(engine_id)",
    ),
    Bug(
        "with an async ratio above 0, tail batching defers a prompt again and again",
        "long_rounds.py",
        "if live.draw_id not in self._mandatory]",
        "]",
    ),
    Bug(
        "at the end of a run, tail batching launches new prompts instead of deferred ones",
        "long_rounds.py",
        "new = min(new, num_slots - num_deferred)",
        "new = min(new, num_slots)",
    ),
    Bug(
        "streamed training uses finished groups that another group can still displace",
        "rounds.py",
        "[live for live in _take_within_quotas(order, num_wanted, quota) if live.finish_order is not None]",
        "list(buffer.ready_groups)",
    ),
    Bug(
        "a lost wake-up: the controller does not hear that a group ended",
        "controller.py",
        "        self._changed.set()\n        if run.error",
        "        if run.error",
    ),
    Bug(
        "a lost wake-up: a place that became free is not given on",
        "proxy.py",
        f"{GIVE_BACK}        self._dispatch()\n",
        GIVE_BACK,
    ),
    Bug(
        "a lost wake-up: the queue does not move after an update",
        "proxy.py",
        "        self._suspended = None\n        self._dispatch()",
        "        self._suspended = None",
    ),
    Bug(
        "a double release of a place",
        "proxy.py",
        GIVE_BACK,
        f"{GIVE_BACK}        self._router.release_slot(engine_id)\n",
    ),
    Bug(
        "a place is never given back when an engine dies",
        "engine_connection.py",
        "just have been canceled\n            self._release_call(call)\n",
        "just have been canceled\n",
    ),
    Bug(
        "off by one in the limit of live groups",
        "controller.py",
        "        limit = min(self._limit, self._config.max_staleness * size) if training else self._limit\n",
        "        limit = (min(self._limit, self._config.max_staleness * size) if training else self._limit) + 1\n",
    ),
    Bug(
        "off by one in the staleness bound",
        "buffer.py",
        "            updates_left = max(0, version + self._max_staleness - self.version)",
        "            updates_left = max(0, version + self._max_staleness + 1 - self.version)",
    ),
    Bug(
        "the age of a group counts from its end",
        "controller.py",
        "                on_start=lambda run: self.buffer.record_start(run.draw.draw_id),",
        "                on_start=lambda run: None,",
    ),
    Bug(
        "the update does not wait for groups about to be too old",
        "buffer.py",
        "            if excess > 0:",
        "            if False:",
    ),
    Bug(
        "the youngest groups are taken first",
        "buffer.py",
        "return (self._get_age_key(live), live.launch_order)",
        "return (-self._get_age_key(live), live.launch_order)",
    ),
    Bug(
        "what is too old is not dropped",
        "controller.py",
        'await self._expire(self.buffer.list_overdue(), "too old")',
        "pass",
    ),
    Bug(
        "a dropped group is not reported",
        "controller.py",
        "            self._expired[live.draw_id] = (live.run, reason)",
        "            pass",
    ),
    Bug(
        "leftovers are forgotten",
        "controller.py",
        "        self._deferred.extend(live.run.draw for live in groups)",
        "        pass",
    ),
    Bug(
        "leftovers go on running",
        "controller.py",
        "            await self._release_leftovers("
        "[live for live in self.buffer if not live.is_taken and live not in chosen])",
        "            pass",
    ),
    Bug(
        "deferred prompts are launched and stay deferred",
        "rounds.py",
        "            taken[domain].append(draw)",
        "            taken[domain].append(draw)\n            deferred.append(draw)",
    ),
    Bug(
        "a filtered group is not replaced",
        "controller.py",
        "                self._refills_due.append(run.draw.prompt.domain)",
        "                pass",
    ),
    Bug(
        "a filtered group is forgotten",
        "controller.py",
        "            self._left_out[run.draw.draw_id] = (run, reason)",
        "            pass",
    ),
    Bug(
        "refills have no bound",
        "controller.py",
        "        if reason and (redundant or may_refill):",
        "        if reason:",
    ),
    Bug(
        "what was trained stays in the buffer",
        "buffer.py",
        "        for live in done:\n            del self._live[live.draw_id]\n",
        "",
    ),
    Bug(
        "a group is complete one rollout too early",
        "group_run.py",
        "        if len(good) < size:\n            return False",
        "        if len(good) < size - 1:\n            return False\n        return True",
    ),
    Bug(
        "the greedy answer is not waited for",
        "group_run.py",
        "        if self.stopped_early or (self._is_complete() and self._are_companions_complete()):",
        "        if self.stopped_early or self._is_complete():",
    ),
    Bug(
        "redundant rollouts go on running",
        "group_run.py",
        "        for task in self._running:\n            task.cancel()",
        "        pass",
    ),
    Bug(
        "cancelled requests go on at the engines",
        "scheduler.py",
        "        await self.proxy.wait_for_orphaned_requests()",
        "        pass",
    ),
    Bug(
        "a rollout that ended as it was stopped has no outcome",
        "group_run.py",
        "            self._runner.discard(task.result())\n",
        "",
    ),
    Bug(
        "tokens made before a pause are thrown away",
        "proxy.py",
        "            pieces.append(generation)\n",
        "            pieces[:] = [generation]\n",
    ),
    Bug(
        "a request that a pause took off is taken for finished",
        "proxy.py",
        '            if generation.finish_reason != "abort" or unwanted:',
        "            if True:",
    ),
    Bug(
        "requests go out while engines get new weights",
        "proxy.py",
        "        if self._suspended is not None:\n            return\n",
        "",
    ),
    Bug(
        "a dead engine still gets requests",
        "fleet.py",
        "        self._router.disable(engine_id)\n",
        "",
    ),
    Bug(
        "a fresh engine serves before it has the weights",
        "engine_starts.py",
        "                    await self._prepare(fresh)\n",
        "",
    ),
    Bug(
        "a rollout whose reward failed is not tried again",
        "attempts.py",
        "            if attempt > 1:\n                lifecycle.move(rollout_id, RolloutState.QUEUED, cause)",
        "            if attempt > 1:\n                break",
    ),
    Bug(
        "scoring begins before a batch is generated, and never again",
        "scoring_gate.py",
        "            if self._num_generating == 0:\n                self.opened.set()",
        "            if self._num_generating == 1:\n                self.opened.set()",
    ),
    Bug(
        "spare groups of another domain count as spare",
        "controller.py",
        "return sum(not self._quota or live.run.draw.prompt.domain == domain for live in self.buffer) > num_wanted",
        "return sum(1 for live in self.buffer) > self._spec.batch_size",
    ),
    Bug(
        "all finished groups go into one batch",
        "buffer.py",
        "oldest = sorted(self._ready.values(), key=self._get_take_order)[: self.batch_size]",
        "oldest = sorted(self._ready.values(), key=self._get_take_order)",
    ),
    Bug(
        "the wait for orphaned requests ends before their aborts do",
        "engine_connection.py",
        "        await self._wait_for_release(list(self._orphans))",
        "        pass",
    ),
    Bug(
        "who is cancelled while orphans end takes the others' wait along",
        "engine_connection.py",
        "            await asyncio.wait(waiting)",
        "            await asyncio.gather(*waiting)",
    ),
    Bug(
        "calls end with their callers, whatever the engine does",
        "engine_connection.py",
        "                self._mark_orphan(call)\n",
        "                call.task.cancel()\n",
    ),
    Bug(
        "a cancelled wait for a batch loses what it deferred",
        "controller.py",
        "        self._deferred.extend(live.run.draw for live in groups)\n"
        '        await self._stop(groups, RolloutState.ABORTED, "deferred")\n',
        '        await self._stop(groups, RolloutState.ABORTED, "deferred")\n'
        "        self._deferred.extend(live.run.draw for live in groups)\n",
    ),
    Bug(
        "an engine that died is not replaced",
        "fleet.py",
        "            self._start(engine_id)\n        self._on_change",
        "            pass\n        self._on_change",
    ),
    Bug(
        "an engine that dies while it is brought up is not brought up again",
        "fleet.py",
        "                if self._failures[engine_id] >= MAX_FAILURES:\n"
        "                    self._give_up(engine_id, error)\n"
        "                    break\n",
        "                break\n",
    ),
    Bug(
        "an engine that starts for ever is waited for",
        "engine_starts.py",
        "asyncio.wait({start, postponed}, timeout=START_TIMEOUT_S, ",
        "asyncio.wait({start, postponed}, ",
    ),
    Bug(
        "a hung engine is ignored",
        "hang_detector.py",
        "        return now - self.last_progress > self.timeout_s",
        "        return False",
    ),
    Bug(
        "a paused engine counts as hung",
        "engine_connection.py",
        "bool(self._num_requests and not self._paused)",
        "bool(self._num_requests)",
    ),
    Bug(
        "weights change before engines have confirmed that they stand still",
        "proxy.py",
        "await asyncio.gather(*(_await_unless_lost(connection.pause(mode)) for connection in connections))",
        "asyncio.gather(*(_await_unless_lost(connection.pause(mode)) for connection in connections))",
    ),
    Bug(
        "a rollout that fails before an engine has it cannot be queued again",
        "lifecycle.py",
        "frozenset({_S.GENERATING, _S.QUEUED}) | _DISCARDED_STATES",
        "frozenset({_S.GENERATING}) | _DISCARDED_STATES",
    ),
    Bug(
        "calls to a lost engine wait forever",
        "engine_connection.py",
        "                call.answer.set_exception(self._build_death_error())\n"
        "                call.answer.exception()  # marks",
        "                pass  # marks",
    ),
    Bug(
        "an engine that was woken serves before it has the current weights",
        "transitions.py",
        "                await self._prepare(connection.engine)\n",
        "                pass\n",
    ),
    Bug(
        "an engine is retired with its requests",
        "transitions.py",
        "        await self._drain(engine_id, request_handling)\n        await self._fleet.remove(engine_id)",
        "        await self._fleet.remove(engine_id)",
    ),
    Bug(
        "an engine falls asleep while weights are on their way to it",
        "transitions.py",
        "async with self.between_syncs(), self._pause_lock:",
        "async with self._pause_lock:",
    ),
    Bug(
        "an engine that is about to leave is not suspended with the others",
        "fleet.py",
        "return self.list_connections(excluded_ids=self.inactive)",
        "return self.list_connections(excluded_ids=self._detached_ids)",
    ),
    Bug(
        "a fresh engine is started in the place of one that sleeps",
        "engine_starts.py",
        "while engine_id in self._detached:",
        "while False:",
    ),
    Bug(
        "an engine whose devices are released still has requests",
        "transitions.py",
        '        await self._drain(engine_id, "abort")  # an engine',
        "        # an engine",
    ),
    Bug(
        "an engine that wakes while its devices are to be released keeps its requests",
        "transitions.py",
        "                if begun:\n                    await asyncio.wait(begun)",
        "                pass",
    ),
    Bug(
        "an engine wakes while the trainer uses its devices",
        "transitions.py",
        "            while engine_id in self._released:",
        "            while False:",
    ),
    Bug(
        "a released engine that missed the weight sync serves with old weights",
        "transitions.py",
        "        if not synced:\n            self._unsynced.add(engine_id)",
        "        pass",
    ),
    Bug(
        "a released engine never serves again",
        "transitions.py",
        "        if was_serving:\n            await self._sync_and_reattach(self._fleet.get_connection(engine_id))",
        "        pass",
    ),
    Bug(
        "trainers get the devices before the engines have released them",
        "colocation.py",
        "        await self.proxy.transitions.release(self.engine_ids, until_batch=may_stream)\n",
        "        self._early = asyncio.create_task(self.proxy.transitions.release(self.engine_ids))\n",
        "pipelines",
    ),
    Bug(
        "engines wake before the trainers have left the devices",
        "colocation.py",
        "        await asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))\n",
        "        self._early = asyncio.gather(*(trainer.offload(states) for trainer, states in offloaded))\n",
        "pipelines",
    ),
    Bug(
        "trainers get the devices while weights are sent to a single engine",
        "colocation.py",
        "        async with self._pause_pushes():  # the sync",
        "        async with nullcontext():  # the sync",
        "pipelines",
    ),
    Bug(
        "the policy is offloaded after a weight sync although the trainers have the devices",
        "colocation.py",
        'if self._policy not in self._trainers or self.phase == "training":',
        "if self._policy not in self._trainers:",
        "pipelines",
    ),
    Bug(
        "devices are switched under an evaluation that no other engine can answer",
        "served_policy.py",
        "        await self._finish_evaluation()\n        devices = ",
        "        devices = ",
        "pipelines",
    ),
    Bug(
        "the trainer computes with finished groups before the engines have released the devices",
        "streaming.py",
        "                await engines.release_devices()\n",
        "",
    ),
    Bug(
        "finished groups are passed to the trainer again",
        "streaming.py",
        "                passed.update(group.draw.draw_id for group in groups)\n",
        "",
    ),
    Bug(
        "the requests of an engine that leaves are aborted while it still gets others",
        "transitions.py",
        "        await self._fleet.abandon(engine_id)\n        connection = self._fleet.get_connection(engine_id)\n"
        "        await self._drain(engine_id, request_handling)\n",
        "        connection = self._fleet.get_connection(engine_id)\n"
        "        await self._drain(engine_id, request_handling)\n        await self._fleet.abandon(engine_id)\n",
    ),
    Bug(
        "an engine that returns while all are paused decodes",
        "transitions.py",
        "        if connection.is_paused != (mode is not None):\n",
        "        if connection.is_paused:\n",
    ),
    Bug(
        "requests of an engine whose node vanished wait for its answer",
        "elastic_engines.py",
        '            self._transitions.mark_lost(engine_id, f"its node {member.node_id[:8]} left the cluster")\n',
        "",
    ),
    Bug(
        "a lost engine on a node that left is replaced there",
        "fleet.py",
        "            self._abandoned_ids.add(engine_id)\n            connection.mark_lost",
        "            connection.mark_lost",
    ),
    Bug(
        "weights are sent to engines that sleep",
        "engine_group.py",
        "if not _contains(self._sleeping_engines, engine) and not",
        "if not",
    ),
    Bug(
        "weight syncs wait for a fresh engine that did not get the weights",
        "engine_starts.py",
        "                    self._engines.exclude(fresh)\n",
        "                    pass\n",
    ),
    Bug(
        "a lost engine keeps the devices that trainers get",
        "transitions.py",
        "self._engines.exclude(connection.engine)\n        await self._fleet.stop_if_lost(engine_id)\n",
        "self._engines.exclude(connection.engine)\n",
    ),
    Bug(
        "a group that finishes while a batch is closed is promised to the batch",
        "rounds.py",
        "    if current.chosen is not None:",
        "    if False:",
    ),
    Bug(
        "an engine that joins gets weights while an update changes them",
        "sync.py",
        "                if self._unchanged.is_set():  # an update",
        "                if True:  # an update",
        "weights",
    ),
    Bug(
        "an engine whose weights are late serves with those that it has",
        "sync.py",
        "            report_dead(reported)\n        alive",
        "            pass\n        alive",
        "weights",
    ),
    Bug(
        "weights that arrived damaged are used",
        "sync.py",
        "            for engine_id, receipt in delivery.receipts.items():\n",
        "            for engine_id, receipt in ():\n",
        "weights",
    ),
    Bug(
        "engines decode on after a weight sync that failed",
        "controller.py",
        "        yield  # not in a `try … finally`, because engines must not resume after an error\n"
        "        await self._proxy.resume()\n",
        "        try:\n            yield\n        finally:\n            await self._proxy.resume()\n",
    ),
)
