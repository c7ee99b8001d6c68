"""What a choice among rollouts does to what is trained: measured, and where it can be avoided."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from roll.config.scheduling import SchedulingConfig
from roll.rollout import AsyncController, Batch, BatchSpec, LLMProxy, RolloutScheduler, SamplingPlan
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

pytestmark = pytest.mark.integration

NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 32, 8, 10
TAIL: dict[str, Any] = {"type": "tail_batching"}
WHOLE: dict[str, Any] = {"type": "tail_batching", "rollout_redundancy": 1.0}
REDUNDANT: dict[str, Any] = {"rollout_redundancy": 1.25, "choose": "first_finished"}
LAUNCH_ORDER: dict[str, Any] = {"rollout_redundancy": 1.25, "choose": "launch_order"}


def length_of(request_id: str) -> int:
    """Uniform from 1 to 200, as its request's name decides: the same answer whenever it is issued."""
    return 1 + int(200 * random.Random(request_id).random())


def reward_of(request_id: str) -> float:
    """Right with probability 0.8 above the median length, and 0.2 below."""
    return float(random.Random(f"right/{request_id}").random() < (0.8 if length_of(request_id) > 100 else 0.2))


class Engine:
    """A token a second, room for everything."""

    engine_id = "e"

    def __init__(self) -> None:
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        length, aborted = length_of(request.request_id), asyncio.Event()
        self._aborted[request.request_id] = aborted
        try:
            async with asyncio.timeout(length):
                await aborted.wait()
        except TimeoutError:
            pass
        return Generation(
            request_id=request.request_id,
            token_ids=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
            finish_reason="abort" if aborted.is_set() else "stop",
            engine_id="e",
        )

    async def abort(self, request_ids: Collection[str]) -> None:
        for name in request_ids:
            self._aborted[name].set()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=10**6)


class Engines:
    def __init__(self) -> None:
        self.engines: Sequence[Engine] = (Engine(),)


class Numbers:
    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return ""

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.zeros(1, np.int32)


async def reward(rollout: Rollout) -> RewardResult:
    return RewardResult(value=reward_of(str(rollout.rollout_id)))


def trained(policy: dict[str, Any], *, num_steps: int = NUM_STEPS) -> tuple[list[Batch], float]:
    """The batches of a whole run, and how long it took in virtual time."""
    return _trained(tuple(sorted(policy.items())), num_steps)


@functools.cache
def _trained(policy: tuple[tuple[str, Any], ...], num_steps: int) -> tuple[list[Batch], float]:
    batches: list[Batch] = []
    took: list[float] = []

    async def main() -> None:
        ids = iter(range(10**9))

        def draw(count: int, domain: str | None) -> list[PromptDraw]:
            return [
                PromptDraw(
                    draw_id=next(ids),
                    prompt=Prompt(uid="p", domain="d", messages=()),
                    token_ids=np.array([1], np.int32),
                )
                for _ in range(count)
            ]

        proxy = LLMProxy(Engines(), prepare=lambda engine: asyncio.sleep(0))  # type: ignore[arg-type]
        scheduler = RolloutScheduler(proxy, {"d": reward}, Numbers(), seed=1)
        plan = SamplingPlan(purpose="train", group_size=GROUP_SIZE, sampling=SamplingParams(max_new_tokens=300))
        spec = BatchSpec(draw=draw, plans=(plan,), batch_size=NUM_PROMPTS, num_steps=num_steps)
        controller = AsyncController(scheduler, proxy, SchedulingConfig(**dict(policy)), spec)
        for step in range(num_steps):
            batches.append(await controller.next_batch())
            await controller.complete_step(step + 1, set())
        took.append(asyncio.get_running_loop().time())
        assert not controller.list_in_flight()
        await controller.close()

    run(main(), seed=1)
    return batches, took[0]


def rewards(batches: list[Batch]) -> list[float]:
    return [r.reward.value for b in batches for g in b.groups for r in g.rollouts if r.reward is not None]


def answers(batches: list[Batch]) -> list[tuple[int, int]]:
    return sorted((r.draw_id, r.index) for b in batches for g in b.groups for r in g.rollouts)


def test_rollout_selection_what_finishes_first_earns_less_where_long_answers_are_right_more_often() -> None:
    # 2,560 answers each: the standard error is 0.01. By order statistics, the 8 shortest of 10 hold 5 - 1.98 long
    # ones: 0.2 + 0.6 * 0.378 = 0.427; a fifth of tail batching's rounds, long ones, choose nothing.
    plain, tail, redundant = (fmean(rewards(trained(policy)[0])) for policy in ({}, TAIL, REDUNDANT))
    assert plain == pytest.approx(0.501, abs=0.02)
    assert tail == pytest.approx(0.439, abs=0.02)
    assert redundant == pytest.approx(0.427, abs=0.02)


def test_rollout_selection_a_run_counts_what_it_trained_beside_what_it_scored_and_stopped() -> None:
    (batch,), _ = trained(REDUNDANT | {"prompt_redundancy": 1.0}, num_steps=1)
    selection_bias = batch.selection_bias
    assert selection_bias is not None
    assert len(selection_bias.counted) == NUM_PROMPTS * GROUP_SIZE
    assert len(selection_bias.counted) + len(selection_bias.unused) + selection_bias.num_stopped == NUM_PROMPTS * 10
    kept = [str(r.rollout_id) for g in batch.groups for r in g.rollouts]
    metrics = selection_bias.compute_metrics()
    assert metrics["selection/length_counted"] == pytest.approx(fmean(map(length_of, kept)))
    assert metrics["selection/reward_counted"] == pytest.approx(fmean(map(reward_of, kept)))
    assert metrics["selection/stopped_share"] == pytest.approx(selection_bias.num_stopped / (NUM_PROMPTS * 10))
    # what was stopped is longer than whatever its group counted
    stopped = {f"train-{d}.{i}" for d in range(NUM_PROMPTS) for i in range(10)} - set(kept)
    for draw_id in range(NUM_PROMPTS):
        own = f"train-{draw_id}."
        longest = max(length_of(name) for name in kept if name.startswith(own))
        assert min(length_of(name) for name in stopped if name.startswith(own)) >= longest


def test_rollout_selection_the_last_that_counted_stands_in_for_what_was_stopped() -> None:
    # Of a group's 10, the 8th by length is long with probability P(Binomial(10, 1/2) >= 3) = 0.945, so right with
    # 0.767: (8 * 0.427 + 2 * 0.767) / 10 = 0.495, where the policy's is 0.5.
    batches, _ = trained(REDUNDANT)
    found = [batch.selection_bias.compute_metrics() for batch in batches if batch.selection_bias is not None]
    assert len(found) == NUM_STEPS
    assert fmean(m["selection/reward_launched"] for m in found) == pytest.approx(0.495, abs=0.025)
    assert fmean(m["selection/reward_counted"] for m in found) < 0.45
    assert all(m["selection/length_launched"] > m["selection/length_counted"] for m in found)
    selection_bias = batches[0].selection_bias
    assert selection_bias is not None and len(selection_bias.launched) == NUM_PROMPTS * 10


def test_rollout_selection_deferred_groups_that_finished_in_part_are_counted_as_unused() -> None:
    (first, *_), _ = trained(WHOLE, num_steps=3)
    assert first.selection_bias is not None and first.kind == "short"
    assert len(first.selection_bias.unused) + first.selection_bias.num_stopped == NUM_PROMPTS // 4 * GROUP_SIZE
    assert first.selection_bias.unused, "nothing of the ten prompts that were deferred had finished"
    assert (
        first.selection_bias.compute_metrics()["selection/length_finished"]
        != first.selection_bias.compute_metrics()["selection/length_counted"]
    )


def test_rollout_selection_a_policy_that_chooses_nothing_counts_nothing() -> None:
    assert trained({}, num_steps=1)[0][0].selection_bias is None


def test_rollout_selection_tail_batching_of_whole_prompts_trains_over_a_run_exactly_what_a_plain_run_trains() -> None:
    plain, plain_s = trained({})
    whole, whole_s = trained(WHOLE)
    assert answers(whole) == answers(plain)
    assert fmean(rewards(whole)) == fmean(rewards(plain))
    assert whole_s < plain_s, "it saves no time"


def test_rollout_selection_redundant_rollouts_in_launch_order_are_unbiased_and_save_nothing() -> None:
    plain, plain_s = trained({})
    ordered, ordered_s = trained(LAUNCH_ORDER)
    assert answers(ordered) == answers(plain)
    assert ordered_s == plain_s


@pytest.mark.parametrize("policy", [TAIL, WHOLE, {"prompt_redundancy": 3.0, "choose": "first_finished"}])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_rollout_selection_a_run_ends_with_nothing_deferred(policy: dict[str, Any], num_steps: int) -> None:
    batches, _ = trained(policy, num_steps=num_steps)  # asserts that nothing is in flight
    drawn = [g.draw.draw_id for b in batches for g in b.groups]
    assert sorted(drawn) == list(range(NUM_PROMPTS * num_steps)), "a prompt was drawn that is never trained"
    assert [len(b.groups) for b in batches] == [NUM_PROMPTS] * num_steps


def test_rollout_selection_no_weights_make_up_for_answers_that_were_stopped() -> None:
    # With n launched and R counted, an answer at quantile u of the lengths counts with probability
    # pi(u) = P(Binomial(n - 1, u) <= R - 1). Weights 1 / pi would be unbiased, and their variance is the integral of
    # 1 / pi: with n - R = 2, 1 / pi grows like (1 - u)^-2 towards the longest answers, so it has no bound.
    def cost(longest: float) -> float:
        u = np.linspace(0, longest, 400_001)
        counts = sum(math.comb(9, k) * u**k * (1 - u) ** (9 - k) for k in range(GROUP_SIZE))
        return float(np.trapezoid(1 / counts, u))

    assert cost(1 - 1e-2) < 10 < cost(1 - 1e-4)
    assert cost(1 - 1e-4) / cost(1 - 1e-3) > 5
