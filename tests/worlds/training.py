"""A whole run under virtual time, everything random from one seed, with the invariants checked after every event."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from roll.config.operations import WeightSyncConfig
from roll.config.scheduling import SchedulingConfig
from roll.config.sharing import SharingRule
from roll.errors import EngineDiedError, RewardInfraError, WeightSyncError, WorkerDiedError
from roll.pipelines.run import LAST_SAVE_TIMEOUT_S
from roll.rollout import AsyncController, Batch, BatchSpec, DataLedger, LLMProxy, RolloutScheduler, Router
from roll.rollout.attempts import SamplingPlan
from roll.rollout.elastic_engines import ElasticEngines
from roll.rollout.lifecycle import RolloutState, Transition
from roll.rollout.loops import generate_single_answer
from roll.rollout.streaming import collect_batch
from roll.simulation.clock import run
from roll.types import (
    DrawOutcome,
    GenerationRequest,
    Group,
    IntArray,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutId,
    RolloutStatus,
    SamplingParams,
)
from roll.weights import WeightSync
from worlds.engines import CALLS, Fault, TickingEngine, TickingEngines, Transfer
from worlds.nodes import MovingNodes
from worlds.shared_devices import SharedTrainers, build_devices, build_policy, choose_rule

MAX_TOKENS = 12
DOMAINS = ("a", "b")
MAX_ATTEMPTS = 3
"""Of a rollout."""
MAX_FAULTS = 5
"""Of the engines of one name; the fleet would give up the next one."""
LAGS: tuple[tuple[float, ...], ...] = ((0.0,), (0.0, 0.01, 0.3), (0.0, 0.3, 2.0), (0.5, 4.0))
"""How long a call may be on its way, from which each schedule takes one choice."""
MAX_SLOW_SYNC_S = 250.0
"""Longest time that a weight update may take before the weight sync gives the engine up."""
FORGOTTEN_S = 10.0
"""Time after which an engine on a node that left must be gone."""
FIRST_EVALUATION = 1_000_000
"""Id of the first draw of an evaluation."""


class Numbers:
    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return str(len(token_ids))

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.zeros(1, np.int32)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One schedule."""

    seed: int
    scheduling: SchedulingConfig
    batch_size: int = 2
    group_size: int = 2
    num_steps: int = 4
    num_engines: int = 2
    capacity: int = 2
    refill: bool = False
    passing: float = 1.0
    """Probability that a group passes the filter."""
    reward_failures: float = 0.0
    reward_hangs: float = 0.0
    """Probability that a verdict stays out until its time limit, and then fails."""
    retry_wait_s: float = 0.0
    start_failures: float = 0.0
    """Probability that a rollout fails before an engine gets its request."""
    deaths: int = 0
    """Engines that die or hang at some moment of the run, also while they are started or synced."""
    hangs: float = 0.0
    """The share of them that hang."""
    frailty: float = 0.0
    """Probability that a fresh engine fails at one of its first calls."""
    lags: tuple[float, ...] = (0.0,)
    impatience: float = 0.0
    """Probability that whoever waits for a batch is cancelled, and asks again."""
    ends_early: bool = False
    """The run is cancelled at some moment."""
    transport: str = "shared_memory"
    greedy: bool = False
    sharing: SharingRule = "disaggregated"
    """When engines release devices to trainers."""
    num_shared: int = 0
    """Number of engines on shared devices."""
    streams: bool = False
    """Whether the trainer computes with finished groups before the batch is complete."""
    switch_faults: float = 0.0
    """Probability that an engine on shared devices dies or hangs while they are switched."""
    slow_syncs: float = 0.0
    """Probability that a weight update takes minutes, or longer than anybody waits."""
    damage: float = 0.0
    """Probability that a weight update arrives damaged, which ends the run."""
    checkpoints: float = 0.0
    """Probability that a checkpoint follows a step, for which trainers get the shared devices."""
    evaluations: float = 0.0
    """Probability that an evaluation begins after a step of an asynchronous run."""
    num_moves: int = 0
    """Times that an engine joins, leaves, or is away for a while, by itself."""
    num_node_changes: int = 0
    """Times that a node joins, is announced to leave, or vanishes."""


def random_settings(seed: int) -> Settings:
    """A schedule that the configuration allows."""
    chance = random.Random(seed)
    kind = chance.choice(["queue"] * 6 + ["batch", "tail_batching"])
    fields: dict[str, Any] = {"type": kind, "leftovers": "defer", "max_kv_used": chance.choice([0.4, 0.95])}
    if kind == "queue":
        fields["async_ratio"] = chance.choice([0.0, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
        if fields["async_ratio"]:
            fields["stale_policy"] = chance.choice(["wait", "wait", "drop"])
            fields["pause_mode"] = chance.choice(["keep", "abort", "drain"])
        else:
            fields["prompt_redundancy"] = chance.choice([1.0, 1.5, 2.0])
            fields["leftovers"] = chance.choice(["defer", "drop"])
            fields["domain_quotas"] = chance.random() < 0.3
        fields["rollout_redundancy"] = chance.choice([1.0, 1.0, 1.5])
        fields["choose"] = chance.choice(["launch_order", "first_finished"])
        fields["replicate_prompts"] = chance.random() < 0.8
    tail = random.Random(f"tail/{seed}")
    if kind == "tail_batching" and tail.random() < 0.6:
        fields["async_ratio"] = tail.choice([0.25, 1.0, 1.0, 1.5, 2.0])
        fields["pause_mode"] = tail.choice(["keep", "abort", "drain"])
        fields["rollout_redundancy"] = tail.choice([1.0, 1.5])
    if kind != "batch":
        fields.setdefault("domain_quotas", random.Random(f"quotas/{seed}").random() < 0.3)
    rewards = random.Random(f"rewards/{seed}")
    return Settings(
        seed=seed,
        reward_hangs=rewards.choice([0.0, 0.0, 0.1]),
        retry_wait_s=rewards.choice([0.0, 1.0, 5.0]),
        scheduling=SchedulingConfig(**fields),
        batch_size=chance.randint(1, 4),
        group_size=chance.randint(1, 3),
        num_steps=chance.randint(2, 6),
        num_engines=(num_engines := chance.randint(1, 3)),
        capacity=chance.randint(1, 4),
        refill=chance.random() < 0.4,
        passing=chance.choice([1.0, 0.7, 0.4]),
        reward_failures=chance.choice([0.0, 0.0, 0.1]),
        start_failures=chance.choice([0.0, 0.0, 0.1]),
        deaths=chance.choice([0, 0, 1, 3]),
        hangs=chance.choice([0.0, 0.0, 0.5]),
        frailty=chance.choice([0.0, 0.0, 0.5]),
        lags=(lags := chance.choice(LAGS)),
        impatience=chance.choice([0.0, 0.0, 0.5]),
        ends_early=chance.random() < 0.1,
        # Where one engine fails in a broadcast, the others have seconds to let go of it.
        transport=chance.choice(["shared_memory", "broadcast"]) if max(lags) < 1 else "shared_memory",
        greedy=chance.random() < 0.2,
        **_random_sharing(seed, num_engines, async_ratio=fields.get("async_ratio", 0.0), lags=lags),
        num_moves=random.Random(f"moves/{seed}").choice([0, 0, 4, 10]),
        num_node_changes=random.Random(f"nodes/{seed}").choice([0, 0, 5, 15]),
    )


def _random_sharing(seed: int, num_engines: int, *, async_ratio: float, lags: Sequence[float]) -> dict[str, Any]:
    """Draw how engines and trainers share devices, and what goes wrong in switches and weight syncs."""
    chance = random.Random(f"shares/{seed}")
    rule = choose_rule(chance, async_ratio, num_engines)
    num_shared = {"disaggregated": 0, "colocated": num_engines}.get(rule, chance.randint(1, max(1, num_engines - 1)))
    may_stream = rule == "elastic_overlap" if async_ratio else rule == "disaggregated"
    return {
        "sharing": rule,
        "num_shared": num_shared,
        "streams": rule == "stream_training" or (may_stream and chance.random() < 0.5),
        "switch_faults": chance.choice([0.0, 0.0, 0.3]),
        "slow_syncs": chance.choice([0.0, 0.0, 0.2]) if max(lags) >= 1 else 0.0,
        "damage": chance.choice([0.0] * 7 + [0.05]),
        "checkpoints": chance.choice([0.0, 0.0, 0.5]),
        "evaluations": chance.choice([0.0, 0.0, 0.5]) if async_ratio else 0.0,
    }


@dataclass
class World:
    """Everything that one schedule needs, and what it must never do."""

    engine_type: ClassVar[type[TickingEngine]] = TickingEngine
    sampling: ClassVar[SamplingParams] = SamplingParams(max_new_tokens=MAX_TOKENS)

    settings: Settings
    ledger: DataLedger = field(default_factory=DataLedger)
    trained: Counter[str] = field(default_factory=Counter)
    events: list[tuple[RolloutId, str, float]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    """By draw id."""
    version: int = 0
    finished_at: dict[int, float] = field(default_factory=dict)
    moves: list[tuple[RolloutId, RolloutState | None, RolloutState]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """Seen where an exception would go to a rollout that nobody waits for."""
    num_certain: int = 0
    """Number of groups that were known to be in a batch before it was complete."""
    num_evaluations: int = 0
    longest_switch_s: float = 0.0
    """Longest time of a switch of shared devices, or of a weight sync."""
    is_damaged: bool = False
    """Whether the run ended because weights arrived damaged."""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.chance = random.Random(settings.seed * 7 + 1)
        self._num_bad = Counter[str]()
        self.engines = TickingEngines(
            [
                self.engine_type(
                    f"e{i}",
                    tick_s=self.chance.uniform(0.5, 1.5),
                    capacity=settings.capacity,
                    length=_length,
                    lag=lambda: self.chance.choice(settings.lags),
                    transfer=self._transfer,
                    violations=self.violations,
                )
                for i in range(settings.num_engines)
            ],
            self.chance,
            self._fault,
        )
        self.trainers = SharedTrainers(
            settings.sharing,
            [engine.engine_id for engine in self.engines.engines[-settings.num_shared :]],
            self.engines,
            random.Random(f"trainers/{settings.seed}"),
            self.violations,
        )
        devices = build_devices(settings.sharing, self.trainers)
        self.weights = WeightSync(
            self.trainers.policy,  # type: ignore[arg-type]
            self.engines,  # type: ignore[arg-type]
            WeightSyncConfig(transport=settings.transport, probe_every_num_steps=0),  # type: ignore[arg-type]
            **({"weights_on_device": devices.onload_for_sync} if devices else {}),
        )
        self.proxy = LLMProxy(
            self.engines,  # type: ignore[arg-type]
            self.weights.push_to,
            max_attempts=50,
            router=Router(settings.scheduling.routing_policy, settings.scheduling.max_kv_used),
        )
        self.nodes = MovingNodes(self.engines, self.engines.like)
        self.elastic = ElasticEngines(self.nodes, self.proxy.transitions, min_engines=1, max_engines=4)
        self.scheduler = RolloutScheduler(
            self.proxy,
            dict.fromkeys(DOMAINS, self._reward),
            Numbers(),
            seed=settings.seed,
            max_attempts=MAX_ATTEMPTS,
            retry_wait_s=settings.retry_wait_s,
            loop=self._loop,
            replicate=settings.scheduling.replicate_prompts and settings.scheduling.type != "batch",
        )
        self.scheduler.lifecycle.add_listener(self._on_event)
        plan = SamplingPlan(purpose="train", group_size=settings.group_size, sampling=self.sampling)
        greedy = SamplingPlan(purpose="greedy", group_size=1, sampling=self.sampling)
        self.controller = AsyncController(
            self.scheduler,
            self.proxy,
            settings.scheduling,
            BatchSpec(
                draw=self._draw,
                plans=(plan, greedy) if settings.greedy else (plan,),
                batch_size=settings.batch_size,
                num_steps=settings.num_steps,
                get_rejection_reason=self._left_out if settings.refill else None,
                max_refills=2,
                weights=dict.fromkeys(DOMAINS, 1.0) if settings.scheduling.domain_quotas else {},
            ),
        )
        self._next = Counter[str]()
        self._streamed: dict[int, Group] = {}
        """Groups of the step that the trainer has computed with."""
        self._switch_chance = random.Random(f"switches of/{settings.seed}")
        self._sync_chance = random.Random(f"syncs of/{settings.seed}")
        self._faults: list[asyncio.Task[None]] = []
        self.policy = build_policy(self, devices)

    def _fault(self, engine_id: str) -> Fault | None:
        """Of a fresh engine."""
        if self.chance.random() >= self.settings.frailty or not self._may_fail(engine_id):
            return None
        return Fault(call=self.chance.choice(CALLS), hangs=self.chance.random() < self.settings.hangs)

    def _transfer(self, engine_id: str) -> Transfer:
        """Draw how a weight update arrives."""
        chance, seconds = self._sync_chance, 0.0
        if chance.random() < self.settings.slow_syncs:
            too_slow = chance.random() < 0.3 and self._may_fail(engine_id)
            seconds = 2000.0 if too_slow else chance.uniform(5.0, MAX_SLOW_SYNC_S)
        return Transfer(seconds=seconds, is_damaged=chance.random() < self.settings.damage)

    def _may_fail(self, engine_id: str) -> bool:
        """Count a failure of an engine, unless the fleet would give the engine up."""
        if self._num_bad[engine_id] + self.settings.deaths >= MAX_FAULTS:
            return False
        self._num_bad[engine_id] += 1
        return True

    async def _loop(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Any, renderer: Any
    ) -> Any:
        if self.chance.random() < self.settings.start_failures:
            await asyncio.sleep(self.chance.choice([0.0, 1.0]))
            raise WorkerDiedError("the environment cannot be reset")
        return await generate_single_answer(draw, index, first_request, generate, renderer)

    def _draw(self, count: int, domain: str | None) -> Sequence[PromptDraw]:
        draws = []
        for _ in range(count):
            draw_id = len(self.ledger)
            own = domain or DOMAINS[draw_id % 2]
            self.domains.append(own)
            prompt = Prompt(uid=f"{own}/{draw_id}", domain=own, messages=())
            draws.append(PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.array([1, 2], np.int32)))
            self.ledger.record_draws(draws[-1:], self.version)
        return draws

    def _left_out(self, group: Group) -> str:
        value = random.Random(f"{self.settings.seed}/{group.draw.draw_id}").random()
        return "" if value < self.settings.passing else "a filter"

    async def _reward(self, rollout: Rollout) -> RewardResult:
        if self.chance.random() < self.settings.reward_hangs:
            await asyncio.sleep(60.0)
            raise RewardInfraError("no answer in time")
        await asyncio.sleep(self.chance.choice([0.0, 0.1, 3.0]))
        if self.chance.random() < self.settings.reward_failures:
            raise RewardInfraError("unreachable")
        return RewardResult(value=float(rollout.index))

    def _on_event(self, event: Transition) -> None:
        self.events.append((event.rollout_id, event.after, event.time))
        self.moves.append((event.rollout_id, event.before, event.after))
        if event.after is RolloutState.TRAINED:
            self.trained[event.rollout_id] += 1
            assert self.trained[event.rollout_id] == 1, f"{event.rollout_id} is trained twice"
        scheduling, size = self.settings.scheduling, self.settings.batch_size
        buffer = self.controller.buffer
        live = size + math.ceil(scheduling.async_ratio * size)
        redundant = scheduling.compute_num_prompts(size) + len(DOMAINS)
        taken = sum(entry.is_taken for entry in buffer)
        if scheduling.async_ratio and taken:
            live = min(live, scheduling.max_staleness * size)
        limit = live if scheduling.async_ratio else max(live, redundant)
        assert len(buffer) - taken <= limit, "too many groups are live"
        for entry in buffer:
            if entry.finish_order is not None:
                self.finished_at.setdefault(entry.draw_id, event.time)
        draw_id = event.rollout_id.draw_id
        moves = event.after in (RolloutState.REWARDING, RolloutState.ACCEPTED)
        if moves and self.finished_at.get(draw_id, event.time) != event.time:
            self.violations.append(f"{event.rollout_id} runs on although its group has ended")
        if event.after is RolloutState.QUEUED and event.before is None:
            self.finished_at.pop(draw_id, None)
        if scheduling.async_ratio:
            assert buffer.num_ready <= (1 + scheduling.max_staleness) * size, "the buffer is too full"

    # ---- the run

    @property
    def policy_version(self) -> int:
        """The version, under the name that `ServedPolicy` knows."""
        return self.version

    async def train(self) -> None:
        """All steps, with engines dying beside them; some runs are cancelled in their midst."""
        havoc = asyncio.create_task(self._havoc())
        moves = asyncio.create_task(self._moves())
        nodes = asyncio.create_task(self._change_nodes())
        steps = asyncio.create_task(self._steps())
        if self.settings.ends_early:
            await asyncio.wait([steps], timeout=self.chance.uniform(0, 60))
            steps.cancel()
        try:
            await asyncio.gather(steps, return_exceptions=self.settings.ends_early)
        finally:
            havoc.cancel()
            moves.cancel()
            nodes.cancel()
            for fault in self._faults:
                fault.cancel()
            await asyncio.gather(moves, nodes, return_exceptions=True)
        if self._switch_chance.random() < 0.5:
            await self._save_last_checkpoint()
        if forgotten := self.nodes.list_forgotten(FORGOTTEN_S):
            self.violations.append(f"{forgotten} are still there although their nodes left")
        await self.elastic.close()
        await self.policy.close()
        await self.proxy.close()
        self.nodes.close()
        self.check_idle()
        self.check_end()
        await self.engines.close()

    async def _save_last_checkpoint(self) -> None:
        """Get the shared devices for the trainers once more, also after an error, but not at any price."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SAVE_TIMEOUT_S):
                await self.policy.release_devices()
                with self.trainers.policy.computing():
                    await asyncio.sleep(self.chance.uniform(0, 2))

    async def _steps(self) -> None:
        try:
            await self._run_steps()
        except asyncio.CancelledError:
            raise
        except WeightSyncError:
            self.is_damaged = True
            if not self.settings.damage:
                raise
        except BaseException as error:  # a run that is to be cancelled fails by it all the same
            self.violations.append(f"{type(error).__name__}: {error}")
            raise

    async def _run_steps(self) -> None:
        await self.policy.sync()
        if self.settings.num_node_changes:
            self.elastic.start()
        for step in range(1, self.settings.num_steps + 1):
            await self._switch(self.policy.wake())
            batch = await self._next_batch()
            self.check_batch(batch)
            if self.settings.scheduling.async_ratio == 0:
                self.check_idle()
            await self._release_devices()
            async with self.policy.enter_training():
                await self.trainers.compute(self.chance.uniform(0, 8), changes=True)
                self.version += 1
                await self._switch(self.policy.push())
            await self._settle(batch, step)
            if self.violations:
                return
            self._evaluate_sometimes()
            if self._switch_chance.random() < self.settings.checkpoints:
                await self._release_devices()
                with self.trainers.policy.computing():
                    await asyncio.sleep(self.chance.uniform(0, 2))

    async def _next_batch(self) -> Batch:
        if self.settings.streams:
            return await self._collect_streamed()  # a run that cancels it ends
        if self.settings.scheduling.async_ratio > 0:
            return await self._collect(self.controller.next_batch)
        certain: dict[int, Group] = {}
        watch = asyncio.create_task(self._watch_certain_groups(certain))
        try:
            batch = await self._collect(self.controller.next_batch)
        finally:
            watch.cancel()
        self._check_certain(batch, certain)
        return batch

    async def _collect_streamed(self) -> Batch:
        """Collect a batch while the trainer computes with its finished groups."""
        self._streamed.clear()
        batch = await collect_batch(self.controller, self.policy, self.settings.batch_size, self._stream)
        self._check_certain(batch, self._streamed)
        return batch

    async def _stream(self, groups: list[Group]) -> None:
        for group in groups:
            if group.draw.draw_id in self._streamed:
                self.violations.append(f"group {group.draw.draw_id} is passed to the trainer twice")
            self._streamed[group.draw.draw_id] = group
        await self.trainers.compute(self._switch_chance.uniform(0, 3))

    def _check_certain(self, batch: Batch, certain: dict[int, Group]) -> None:
        chosen = {group.draw.draw_id: group for group in batch.groups}
        for draw_id, group in certain.items():
            if chosen.get(draw_id) != group:
                self.violations.append(f"group {draw_id} was certain to be in the batch, and is not in it as it was")
        self.num_certain += len(certain)

    async def _watch_certain_groups(self, found: dict[int, Group]) -> None:
        while True:
            found |= {group.draw.draw_id: group for group in await self.controller.wait_for_guaranteed_groups(found, 1)}

    async def _collect(self, collect: Callable[[], Awaitable[Batch]]) -> Batch:
        while self.chance.random() < self.settings.impatience:
            try:
                async with asyncio.timeout(self.chance.uniform(0, 20)):
                    return await collect()
            except TimeoutError:
                pass
        return await collect()

    async def _release_devices(self) -> None:
        """Release the shared devices to the trainers; some callers are canceled, and ask again."""
        while self._switch_chance.random() < self.settings.impatience:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._switch_chance.uniform(0, 5)):
                    await self._switch(self.policy.release_devices())
        await self._switch(self.policy.release_devices())

    async def _switch(self, switch: Awaitable[object]) -> None:
        """Wait for a switch of the shared devices, during which an engine on them may die or hang."""
        if self._switch_chance.random() < self.settings.switch_faults:
            self._faults.append(asyncio.create_task(self._fail_in_switch()))
        began_s = asyncio.get_running_loop().time()
        await switch
        self.longest_switch_s = max(self.longest_switch_s, asyncio.get_running_loop().time() - began_s)

    async def _fail_in_switch(self) -> None:
        chance = self._switch_chance
        hangs = chance.random() < 0.5
        await asyncio.sleep(chance.choice([0.0, chance.uniform(0, 3)]))
        shared = [each for each in self.engines.all if each.engine_id in self.trainers.engine_ids and not each.dead]
        if shared and self._may_fail((engine := chance.choice(shared)).engine_id):
            engine.hang() if hangs else engine.die()

    def _evaluate_sometimes(self) -> None:
        """Begin an evaluation beside the next step, if none is under way."""
        evaluation = self.policy.evaluation
        if (evaluation is None or evaluation.done()) and self._switch_chance.random() < self.settings.evaluations:
            self.policy.evaluation = asyncio.create_task(self._evaluate(), name="evaluation")

    async def _evaluate(self) -> None:
        prompt = Prompt(uid="eval", domain="a", messages=())
        number = FIRST_EVALUATION + 10 * self.version
        draws = [PromptDraw(draw_id=number + i, prompt=prompt, token_ids=np.array([1, 2], np.int32)) for i in range(2)]
        try:
            groups = await self.scheduler.collect(draws, self.policy.plan)
        except WeightSyncError:
            return  # the run ends
        except Exception as error:
            self.violations.append(f"an evaluation failed: {type(error).__name__}: {error}")
            return
        rollouts = [each for group in groups for each in group.rollouts if each.status is RolloutStatus.COMPLETED]
        versions = {int(version) for rollout in rollouts for version in rollout.policy_versions if version >= 0}
        if len(versions) > 1:
            self.violations.append(f"an evaluation mixes the policy versions {sorted(versions)}")
        self.num_evaluations += 1

    async def _settle(self, batch: Batch, step: int) -> None:
        used = set()
        for group in batch.groups:
            draw_id = group.draw.draw_id
            if draw_id in batch.rejection_reasons or not group.scored_rollouts:
                self.ledger.record_outcome(draw_id, DrawOutcome.FILTERED, step)
            else:
                self.ledger.record_outcome(draw_id, DrawOutcome.TRAINED, step)
                used |= {rollout.rollout_id for rollout in group.scored_rollouts}
        for draw_id in batch.expired:
            self.ledger.record_outcome(draw_id, DrawOutcome.EXPIRED, step)
        await self.controller.complete_step(self.version, used)
        in_flight = [draw.draw_id for draw in self.controller.list_in_flight()]
        assert in_flight == self.ledger.list_in_flight(), "draws in flight are not those that have no outcome"

    async def _moves(self) -> None:
        """Engines that join, leave, or are away for a while; at least one stays."""
        chance, move = random.Random(f"moves of/{self.settings.seed}"), self.proxy.transitions
        try:
            for number in range(self.settings.num_moves):
                await asyncio.sleep(chance.uniform(0, 20))
                names = [each.engine_id for each in self.engines.engines if each.engine_id not in self.nodes.homes]
                kind, name = chance.choice(["add", "retire", "sleep", "suspend"]), chance.choice(names)
                leaving: Any = chance.choice(["abort", "drain"])
                if kind == "add":
                    await move.add(f"added-{number}", partial(self.engines.like, f"added-{number}"))
                elif len(names) == 1:
                    continue
                elif kind == "retire":
                    if {*names} - {name, *self.trainers.engine_ids}:  # one stays while trainers use the others' devices
                        await move.retire(name, leaving)
                elif kind == "sleep":
                    await move.sleep(name, leaving)
                    await self._leave_alone(name, chance.uniform(0, 20))
                    await move.wake(name)
                else:
                    await move.suspend(name, chance.choice(["keep", "abort"]))
                    await self._leave_alone(name, chance.uniform(0, 20))
                    await move.wake(name)
        except EngineDiedError:
            return  # one that joined died at once
        except WeightSyncError:
            return  # the run ends, or goes on without this engine
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.violations.append(f"a move failed: {type(error).__name__}: {error}")

    async def _change_nodes(self) -> None:
        """Nodes that join, are announced to leave, or vanish; sometimes nobody hears of the end of their engines."""
        chance = random.Random(f"nodes of/{self.settings.seed}")
        for number in range(self.settings.num_node_changes):
            await asyncio.sleep(chance.uniform(0, 10))
            staying = [name for name, node in self.nodes.live.items() if not node.is_draining]
            kind = chance.choice(["join", "join", "notice", "notice", "kill", "hang"])
            if kind == "join" or not staying:
                self.nodes.join(f"node-{number}", chance.randint(1, 2))
            elif kind == "notice":
                self.nodes.notice(chance.choice(staying), chance.choice([3.0, 30.0]))
            else:
                self.nodes.kill(chance.choice(staying), hangs=kind == "hang")

    async def _leave_alone(self, engine_id: str, seconds: float) -> None:
        """Let time pass in which nothing may be started in place of this engine."""
        self.engines.away.add(engine_id)
        await asyncio.sleep(seconds)
        self.engines.away.discard(engine_id)

    async def _havoc(self) -> None:
        """Also of engines that start or are being replaced."""
        for _ in range(self.settings.deaths):
            await asyncio.sleep(self.chance.uniform(0, 40))
            hangs = self.chance.random() < self.settings.hangs
            engine = self.chance.choice([engine for engine in self.engines.all if not engine.dead] or self.engines.all)
            engine.hang() if hangs else engine.die()

    # ---- what must hold

    def check_batch(self, batch: Batch) -> None:
        """Of every batch that training gets."""
        self.batches.append(batch)
        settings, scheduling = self.settings, self.settings.scheduling
        kept = [group for group in batch.groups if group.draw.draw_id not in batch.rejection_reasons]
        assert len(kept) <= settings.batch_size, "a batch is too large"
        assert len(kept) == settings.batch_size, "a batch is too small"
        assert batch.num_refills <= 2 * settings.batch_size
        for group in batch.groups:
            assert len(group.rollouts) == settings.group_size, "a group is not whole"
            assert len({rollout.index for rollout in group.rollouts}) == settings.group_size
            for rollout in group.rollouts:
                if rollout.status is RolloutStatus.COMPLETED:
                    assert rollout.reward is not None
                    self._check_tokens(rollout, group in kept)
                else:
                    tries = self._num_tries(rollout.rollout_id)
                    assert tries == MAX_ATTEMPTS, f"{rollout.rollout_id} was given up after {tries} tries"
        if settings.greedy:
            assert [g.draw.draw_id for g in batch.companions["greedy"]] == [g.draw.draw_id for g in batch.groups]
            assert all(len(group.rollouts) == 1 for group in batch.companions["greedy"])
        if scheduling.domain_quotas and len(kept) == settings.batch_size and not scheduling.async_ratio:
            counts = Counter(group.draw.prompt.domain for group in kept)
            assert max(counts.values()) - min(counts.get(d, 0) for d in DOMAINS) <= 1, "the mix of domains is off"
        if scheduling.domain_quotas and scheduling.async_ratio:
            self._check_places()
        if scheduling.stale_policy == "wait":
            assert not (batch.expired and scheduling.async_ratio), "a group expired although updates wait"

    def _check_places(self) -> None:
        """What was launched, without what was replaced or given up, has the proportion of the weights."""
        gone = {draw_id for batch in self.batches for draw_id in (*batch.rejection_reasons, *batch.expired)}
        gone |= self.controller._left_out.keys()  # since the batch was complete, while the trainer computed
        places = Counter(DOMAINS.index(self.domains[i]) for i in range(len(self.ledger)) if i not in gone)
        assert abs(places[0] - places[1]) <= 1, f"the mix of what is launched is off: {places}"

    def _check_tokens(self, rollout: Rollout, is_trained: bool) -> None:
        versions = rollout.policy_versions
        assert len(versions) == len(rollout.token_ids) == _length_of(rollout), "tokens were lost or made twice"
        assert (np.diff(versions) >= 0).all(), "a token is older than the one before it"
        age, bound = self.version - int(versions.min()), self.settings.scheduling.max_staleness
        assert not is_trained or age <= bound, f"a token is {age} versions old"

    def _num_tries(self, rollout_id: RolloutId) -> int:
        """Since it began for the last time."""
        tries = 0
        for name, before, after in self.moves:
            if name == rollout_id and after is RolloutState.QUEUED:
                tries = 1 if before is None else tries + 1
        return tries

    def check_idle(self) -> None:
        """No engine that serves works on anything."""
        for engine in self.engines.engines:
            assert engine.dead or engine.hung or not engine.live, f"{engine.engine_id} works on {list(engine.live)}"

    def check_end(self) -> None:
        """After the last step."""
        assert len(self.scheduler.lifecycle) == 0, (
            f"rollouts without an end: {[r.rollout_id for r in self.scheduler.lifecycle]}"
        )
        violations = self.violations + self.nodes.violations
        assert not violations, violations[0]
        refused = [engine.num_refused for engine in self.engines.all]
        assert max(refused) <= self.settings.capacity, "a dead engine gets requests again and again"
        assert self.proxy.num_running == self.proxy.num_waiting == 0
        if not (self.settings.ends_early or self.is_damaged):
            assert len(self.batches) == self.settings.num_steps
            assert not self.ledger.list_in_flight(), "draws were launched that no step trained"
            self._check_shares()
        totals = self.scheduler.lifecycle.totals
        ends = sum(totals[s] for s in RolloutState if s not in ("queued", "generating", "rewarding", "accepted"))
        begun = sum(1 for _, after, _ in self.events if after == "queued") - self._num_again()
        assert ends == begun, "a rollout was lost"

    def _check_shares(self) -> None:
        """Over the whole run, quotas hold exactly: both domains have the same weight."""
        if not self.settings.scheduling.domain_quotas:
            return
        trained = Counter(
            group.draw.prompt.domain
            for batch in self.batches
            for group in batch.groups
            if group.draw.draw_id not in batch.rejection_reasons
        )
        assert max(trained.values()) - min(trained[domain] for domain in DOMAINS) <= 1, f"the mix is off: {trained}"

    def _num_again(self) -> int:
        seen: dict[RolloutId, str] = {}
        again = 0
        for rollout_id, after, _ in self.events:
            if after == "queued" and seen.get(rollout_id) in ("queued", "generating", "rewarding"):
                again += 1
            seen[rollout_id] = after
        return again


def _length(request: GenerationRequest) -> int:
    """Tokens still to come: the answer's length is the request's own, also where it is continued."""
    written = len(request.token_ids) - 2
    return _length_by_name(request.request_id) - written


def _length_by_name(name: str) -> int:
    value = random.Random(name).random()
    return MAX_TOKENS if value > 0.9 else 1 + int(4 * value)


def _length_of(rollout: Rollout) -> int:
    return _length_by_name(str(rollout.rollout_id))


def play(settings: Settings, build: Callable[[Settings], World] = World) -> World:
    """Run one schedule; the seed also decides the order of events that happen at the same moment."""
    world: list[World] = []

    async def main() -> None:
        world.append(build(settings))
        try:
            await world[0].train()
        finally:
            await world[0].engines.close()

    try:
        run(main(), seed=settings.seed, shuffle=True, limit_s=100_000)
    except BaseException as error:
        error.add_note(f"replay it with: play(random_settings({settings.seed})), which is {settings}")
        raise
    return world[0]
