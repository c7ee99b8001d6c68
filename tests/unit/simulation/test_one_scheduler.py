"""One scheduler object drives a real engine and a simulated one; given recorded durations, all happens in one order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from roll.config.scheduling import SchedulingConfig
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.protocols import InferenceEngine
from roll.rollout import AsyncController, Batch, BatchSpec, LLMProxy, RolloutScheduler, Router, SamplingPlan
from roll.rollout.lifecycle import Transition
from roll.simulation import clock
from roll.simulation.batch import BatchLimits
from roll.simulation.costs import EngineCosts
from roll.simulation.engine import EngineSettings, SimulatedEngine
from roll.types import (
    EngineLoad,
    Generation,
    GenerationRequest,
    Group,
    IntArray,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
)

T = TypeVar("T")
NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, CAPACITY = 3, 3, 3, 2
TICK_S = 1e-6
SPACING_S = 0.002
QUIET_TURNS = 40
SECOND = 1000
"""Added to the draw ids of the simulated run, so that the router remembers none of the first one's sessions."""
UNKNOWN = 10**9
"""Ticks of an answer that was cut short: longer than anything else."""
COSTS = EngineCosts(overhead_s=TICK_S, weights_s=0, token_s=0, communication_s=0, request_s=0, context_s=0, pair_s=0)
LIMITS = BatchLimits(max_num_seqs=CAPACITY, max_batched_tokens=4096, kv_capacity=10**15)
POLICIES = {
    "queue": {},
    "redundant prompts": {"prompt_redundancy": 2.0, "choose": "first_finished"},
    "redundant rollouts": {"rollout_redundancy": 1.5, "choose": "first_finished"},
    "tail batching": {"type": "tail_batching", "prompt_redundancy": 1.4},
}
FAST = "tail batching"
"""Has everything that the others have."""


class Record:
    """Lets results of real work pass one at a time, when all that followed from the last one has been done.

    So everything between two results belongs to one moment, as in virtual time, and a duration is the time between two
    such moments.
    """

    def __init__(self) -> None:
        self.durations: dict[str, float] = {}
        self.values: dict[str, float] = {}
        self._moment = 0.0
        self._attempts: Counter[str] = Counter()
        self._due: asyncio.Queue[tuple[str, float, asyncio.Future[None]]] = asyncio.Queue()

    def attempt(self, key: str) -> str:
        """A name for this attempt at it: what was cut short and deferred is tried again."""
        self._attempts[key] += 1
        return f"{key}~{self._attempts[key]}"

    def begin_again(self) -> None:
        self._attempts.clear()

    async def passes(self, key: str, work: Coroutine[Any, Any, T]) -> T:
        began = self._moment
        result = await work
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._due.put_nowait((key, began, future))
        await future
        return result

    async def pump(self) -> None:
        loop = asyncio.get_running_loop()
        self._moment = start = loop.time()
        while True:
            key, began, future = await self._due.get()
            turns = 0
            while turns < QUIET_TURNS or loop.time() < self._moment + SPACING_S:
                turns += 1
                await asyncio.sleep(0)
            if future.cancelled():
                continue
            self._moment = loop.time()
            self.durations[key] = self._moment - max(began, start)
            future.set_result(None)


class Switch:
    """An engine that stands for a real one first, and for a simulated one afterwards."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.target: Any = None
        self.record: Record
        self.is_real = True
        self.orphans: set[asyncio.Task[Any]] = set()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=CAPACITY)

    async def generate(self, request: GenerationRequest) -> Generation:
        key = self.record.attempt(_without(request.request_id))
        request = replace(request, request_id=key)
        if not self.is_real:
            endless = replace(request.sampling, max_new_tokens=10 * UNKNOWN)
            return await self.target.generate(replace(request, sampling=endless))
        real = asyncio.create_task(self.target.generate(request))
        self.orphans.add(real)  # a real engine takes time to let go of a request; its caller need not wait for that
        return await self.record.passes(key, _shielded(real))

    async def abort(self, request_ids: Collection[str]) -> None:
        """The simulated engine lets go of a request when its caller does; a real one may finish it in vain."""


async def _shielded(task: asyncio.Task[T]) -> T:
    return await asyncio.shield(task)


class Switches:
    def __init__(self) -> None:
        self.engines: Sequence[Switch] = [Switch("e0"), Switch("e1")]

    async def replace(self, engine_id: str) -> InferenceEngine:
        raise AssertionError("no engine dies here")

    async def close(self) -> None:
        return None


class Judge:
    """Half of the answers are right, by their tokens; the simulated run repeats the verdicts."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.repeats = False

    async def __call__(self, rollout: Rollout) -> RewardResult:
        key = self.record.attempt(f"reward-{rollout.draw_id % SECOND}.{rollout.index}")
        if self.repeats:
            await asyncio.sleep(self.record.durations.get(key, 10.0))
            return RewardResult(value=self.record.values.get(key, 0.0))

        async def judged() -> float:
            return float(np.sum(rollout.token_ids) % 2)

        value = self.record.values[key] = await self.record.passes(key, judged())
        return RewardResult(value=value)


class Silent:
    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return ""

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.zeros(1, np.int32)


def same_verdicts(group: Group) -> str:
    return "all alike" if len({r.reward.value for r in group.scored_rollouts if r.reward}) < 2 else ""


def prompts(first: int) -> Any:
    """Draws of prompts that differ, from an id on."""
    next_id = first

    def draw(count: int, domain: str | None) -> list[PromptDraw]:
        nonlocal next_id
        ids, next_id = range(next_id, next_id + count), next_id + count
        return [
            PromptDraw(
                draw_id=i,
                prompt=Prompt(uid=str(i % SECOND), domain="d", messages=()),
                token_ids=np.random.default_rng(i % SECOND).integers(4, 260, 6).astype(np.int32),
            )
            for i in ids
        ]

    return draw


async def run_steps(scheduler: RolloutScheduler, proxy: LLMProxy, policy: dict[str, Any], first: int) -> list[list]:
    """Some steps; returns the rollouts of each."""
    sampling = SamplingParams(max_new_tokens=24, temperature=1.5, stop_token_ids=tuple(range(4, 24)))
    plan = SamplingPlan(purpose="train", group_size=GROUP_SIZE, sampling=sampling)
    spec = BatchSpec(
        draw=prompts(first),
        plans=(plan,),
        batch_size=NUM_PROMPTS,
        num_steps=NUM_STEPS,
        get_rejection_reason=same_verdicts,
        max_refills=2,
    )
    controller = AsyncController(scheduler, proxy, SchedulingConfig(**policy), spec)
    taken = []
    for step in range(NUM_STEPS):
        batch: Batch = await controller.next_batch()
        ids = [(r.draw_id % SECOND, r.index) for group in batch.groups for r in group.rollouts]
        taken.append([ids, sorted(draw_id % SECOND for draw_id in batch.rejection_reasons)])
        await controller.complete_step(step + 1, set())
    await controller.close()
    return taken


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in POLICIES]
)
def test_simulation_one_scheduler_real_and_simulated_engines_see_the_same_events_in_the_same_order(
    name: str, tiny_model: Path
) -> None:
    async def main() -> tuple[Any, ...]:
        record, engines = Record(), Switches()
        judge = Judge(record)
        router = Router("least_loaded")  # not by measured times, which would differ
        proxy = LLMProxy(engines, prepare=lambda engine: asyncio.sleep(0), router=router)  # type: ignore[arg-type]
        scheduler = RolloutScheduler(proxy, {"d": judge}, Silent(), seed=3)
        events: list[Transition] = []
        scheduler.lifecycle.add_listener(events.append)
        async with AsyncExitStack() as stack:
            for switch in engines.engines:
                spec = EngineSpec(
                    engine_id=switch.engine_id, kind="hf", model_path=str(tiny_model), dtype="float32",
                    max_context=64, max_num_seqs=CAPACITY, num_threads=1, options={"admission": "continuous"},
                )  # fmt: skip
                switch.target, switch.record = HFEngine(spec), record
                await switch.target.start()
                stack.push_async_callback(switch.target.close)
            pump = asyncio.create_task(record.pump())
            await asyncio.sleep(0)
            taken = await run_steps(scheduler, proxy, POLICIES[name], 0)
            pump.cancel()
            for switch in engines.engines:
                for orphan in switch.orphans:
                    orphan.cancel()
                await asyncio.gather(*switch.orphans, return_exceptions=True)
        return scheduler, proxy, engines, judge, record, events, taken

    scheduler, proxy, engines, judge, record, events, taken = asyncio.run(main())
    real_events = [(str(e.rollout_id), e.before, e.after, e.detail) for e in events]
    events.clear()

    async def again() -> Any:
        judge.repeats = True
        record.begin_again()
        for switch in engines.engines:
            switch.is_real = False
            switch.target = SimulatedEngine(
                switch.engine_id,
                EngineSettings(costs=COSTS, limits=LIMITS),
                lambda request: _ticks(record, request.request_id),
            )
        return await run_steps(scheduler, proxy, POLICIES[name], SECOND)

    assert clock.run(again()) == taken
    simulated = [(_without(str(e.rollout_id)), e.before, e.after, e.detail) for e in events]
    assert simulated == real_events
    used = {engine for _, _, after, engine in real_events if after == "generating"}
    assert used == {"e0", "e1"}


def _ticks(record: Record, request_id: str) -> int:
    duration = record.durations.get(request_id)
    return UNKNOWN if duration is None else round(duration / TICK_S)


def _without(rollout_id: str) -> str:
    """An id of the simulated run as the real one's."""
    purpose, _, rest = rollout_id.partition("-")
    draw_id, _, index = rest.partition(".")
    return f"{purpose}-{int(draw_id) % SECOND}.{index}"
