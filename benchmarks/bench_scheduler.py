"""CPU time of the scheduling itself, per rollout event: all from draw to settled group, engines and rewards free.

    make bench NAME=scheduler

Virtual time; an engine that answers in the next turn of the loop, so its own cost and the loop's are in the figure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

import numpy as np
from _report import report

from roll.config.scheduling import SchedulingConfig
from roll.rollout import AsyncController, BatchSpec, DataLedger, LLMProxy, RolloutScheduler, SamplingPlan, Transition
from roll.simulation.clock import run
from roll.types import (
    EngineLoad,
    Generation,
    GenerationRequest,
    IntArray,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    SamplingParams,
)

GOAL_US = 50.0
NUM_ENGINES, BATCH_SIZE, GROUP_SIZE, NUM_STEPS = 16, 128, 16, 6


class FreeEngine:
    """Answers at once."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id

    async def generate(self, request: GenerationRequest) -> Generation:
        await asyncio.sleep(1.0)
        return Generation(
            request_id=request.request_id,
            token_ids=TOKENS,
            logprobs=LOGPROBS,
            policy_versions=TOKENS,
            finish_reason="stop",
            engine_id=self.engine_id,
        )

    async def abort(self, request_ids: Collection[str]) -> None:
        return None

    async def pause(self, mode: str) -> None:
        return None

    async def resume(self) -> None:
        return None

    def load(self) -> EngineLoad:
        return LOAD


TOKENS = np.zeros(8, np.int32)
LOGPROBS = np.zeros(8, np.float32)
LOAD = EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=64)


class Engines:
    """A fixed group."""

    def __init__(self) -> None:
        self.engines = [FreeEngine(f"e{i}") for i in range(NUM_ENGINES)]


class Renderer:
    """Text costs nothing here."""

    def decode(self, token_ids: IntArray) -> str:
        return ""

    def decode_final_text(self, token_ids: IntArray, prompt: object) -> str:
        return ""


async def nothing(engine: object) -> None:
    """A fresh engine needs nothing."""


async def reward(rollout: Rollout) -> RewardResult:
    """Free."""
    return RewardResult(value=float(rollout.index))


async def train(async_ratio: float) -> tuple[int, float]:
    """Some steps; returns the number of transitions and the seconds of CPU."""
    ledger = DataLedger()
    proxy = LLMProxy(Engines(), nothing)  # type: ignore[arg-type]
    scheduler = RolloutScheduler(proxy, {"d": reward}, Renderer(), seed=0)  # type: ignore[arg-type]
    events = 0

    def count(event: Transition) -> None:
        nonlocal events
        events += 1

    scheduler.lifecycle.add_listener(count)

    def draw(number: int, domain: str | None) -> Sequence[PromptDraw]:
        first = len(ledger)
        drawn = [
            PromptDraw(draw_id=i, prompt=Prompt(uid=f"d/{i}", domain="d", messages=()), token_ids=TOKENS)
            for i in range(first, first + number)
        ]
        ledger.record_draws(drawn, 1)
        return drawn

    plan = SamplingPlan(purpose="train", group_size=GROUP_SIZE, sampling=SamplingParams(max_new_tokens=8))
    spec = BatchSpec(draw=draw, plans=(plan,), batch_size=BATCH_SIZE, num_steps=NUM_STEPS)
    controller = AsyncController(scheduler, proxy, SchedulingConfig(async_ratio=async_ratio), spec)
    started = time.process_time()
    for step in range(NUM_STEPS):
        batch = await controller.next_batch()
        async with controller.pause_for_update():
            await asyncio.sleep(1.0)
        await controller.complete_step(step + 1, {r.rollout_id for group in batch.groups for r in group.rollouts})
    used = time.process_time() - started
    await controller.close()
    return events, used


def main() -> None:
    """Measure synchronous and asynchronous scheduling, the best of three runs each."""
    figures: dict[str, float] = {}
    for ratio in (0.0, 2.0):
        costs = []
        for _ in range(3):
            events, seconds = run(train(ratio))
            costs.append(seconds / events * 1e6)
        figures[f"us_per_event_ratio_{ratio:g}"] = min(costs)
        print(f"async_ratio {ratio:g}: {min(costs):.1f} us of CPU per event ({events} events; goal {GOAL_US:g})")
    report("scheduler", figures)
    if max(figures.values()) > GOAL_US:
        raise SystemExit(f"more than {GOAL_US:g} us per event")


if __name__ == "__main__":
    main()
