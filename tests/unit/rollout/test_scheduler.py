"""The scheduler against engines that die, rewards that fail, and orders that vary."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from roll.errors import EngineDiedError, MalformedPromptError, RewardInfraError, UnscorableError, WorkerDiedError
from roll.rollout import LLMProxy, RolloutScheduler, SamplingPlan
from roll.rollout.attempts import compute_request_seed
from roll.rollout.loops import Generate, generate_single_answer
from roll.types import (
    EngineLoad,
    Generation,
    GenerationRequest,
    IntArray,
    Message,
    Prompt,
    PromptDraw,
    RewardResult,
    Rollout,
    RolloutStatus,
    SamplingParams,
)

PLAN = SamplingPlan(purpose="train", group_size=3, sampling=SamplingParams(max_new_tokens=4))


def draws(count: int) -> list[PromptDraw]:
    return [
        PromptDraw(
            draw_id=i,
            prompt=Prompt(uid=f"d/{i}", domain="d", messages=(Message(role="user", content=str(i)),)),
            token_ids=np.array([i, i + 1], np.int32),
        )
        for i in range(count)
    ]


class CountingEngine:
    """Answers with the seed's last digits; dies at the n-th request if told to."""

    def __init__(self, engine_id: str, dies_at: int | None = None) -> None:
        self.engine_id = engine_id
        self.dies_at = dies_at
        self.served: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.hold: asyncio.Event | None = None
        self.ended: dict[str, asyncio.Event] = {}
        """Of requests that are held: set when they are aborted."""
        self.num_free = 0
        """Requests that are not held."""

    async def generate(self, request: GenerationRequest) -> Generation:
        self.served.append(request)
        is_free = len(self.served) <= self.num_free
        await asyncio.sleep(0)
        if self.dies_at is not None and len(self.served) >= self.dies_at:
            raise EngineDiedError(self.engine_id, "killed")
        if self.hold is not None and not is_free:
            ended = self.ended.setdefault(request.request_id, asyncio.Event())
            await ended.wait()
        seed = request.sampling.seed or 0
        return Generation(
            request_id=request.request_id,
            token_ids=np.array([seed % 97, seed % 89], np.int32),
            logprobs=np.zeros(2, np.float32),
            policy_versions=np.zeros(2, np.int32),
            finish_reason="stop",
            engine_id=self.engine_id,
        )

    async def abort(self, request_ids: Collection[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.ended.setdefault(request_id, asyncio.Event()).set()

    def load(self) -> EngineLoad:
        return EngineLoad(num_running=0, num_waiting=0, kv_used=0.0, capacity=8)


class Engines:
    def __init__(self, *engines: CountingEngine) -> None:
        self._engines = list(engines)
        self.num_replaced = 0

    @property
    def engines(self) -> Sequence[CountingEngine]:
        return self._engines

    def exclude(self, engine: CountingEngine) -> None:
        """Weight syncs are not tested here."""

    async def replace(self, engine_id: str) -> CountingEngine:
        await asyncio.sleep(0)
        self.num_replaced += 1
        index = next(i for i, e in enumerate(self._engines) if e.engine_id == engine_id)
        self._engines[index] = CountingEngine(engine_id)
        return self._engines[index]


class Numbers:
    """Renders tokens as numbers."""

    def decode_final_text(self, token_ids: IntArray, context: IntArray) -> str:
        return self.decode(token_ids)

    def decode(self, token_ids: IntArray) -> str:
        return " ".join(map(str, token_ids))

    def escape_special_tokens(self, text: str) -> str:
        return text

    def tokenize_follow_up(self, observation: str) -> IntArray:
        return np.array([len(observation)], dtype=np.int32)


async def right(rollout: Rollout) -> RewardResult:
    return RewardResult(value=1.0)


def build(engines: Engines, reward=right, prepared: list[str] | None = None, loop: Any = None) -> RolloutScheduler:
    async def prepare(engine: CountingEngine) -> None:
        if prepared is not None:
            prepared.append(engine.engine_id)

    return RolloutScheduler(LLMProxy(engines, prepare), {"d": reward}, Numbers(), seed=7, loop=loop)


async def test_rollout_scheduler_groups_come_back_in_draw_order_with_all_their_rollouts() -> None:
    groups = await build(Engines(CountingEngine("a"))).collect(draws(4), PLAN)
    assert [g.draw.draw_id for g in groups] == [0, 1, 2, 3]
    assert [[r.index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 4
    assert all(r.reward is not None and r.reward.value == 1.0 for g in groups for r in g.rollouts)


async def test_rollout_scheduler_tokens_do_not_depend_on_the_number_of_engines() -> None:
    one = await build(Engines(CountingEngine("a"))).collect(draws(5), PLAN)
    three = await build(Engines(*(CountingEngine(n) for n in "abc"))).collect(draws(5), PLAN)
    assert [r.token_ids.tolist() for g in one for r in g.rollouts] == [
        r.token_ids.tolist() for g in three for r in g.rollouts
    ]


async def test_rollout_scheduler_requests_spread_evenly_over_engines() -> None:
    engines = [CountingEngine(n) for n in "abc"]
    await build(Engines(*engines)).collect(draws(4), PLAN)
    assert [len(e.served) for e in engines] == [4, 4, 4]


async def test_rollout_scheduler_a_dead_engine_is_replaced_once_synced_and_its_requests_are_issued_again() -> None:
    dying, living = CountingEngine("a", dies_at=2), CountingEngine("b")
    engines, prepared = Engines(dying, living), []
    groups = await build(engines, prepared=prepared).collect(draws(4), PLAN)
    assert engines.num_replaced == 1
    assert prepared == ["a"]
    assert all(r.status is RolloutStatus.COMPLETED for g in groups for r in g.rollouts)
    undisturbed = await build(Engines(CountingEngine("a"))).collect(draws(4), PLAN)
    assert [r.token_ids.tolist() for g in groups for r in g.rollouts] == [
        r.token_ids.tolist() for g in undisturbed for r in g.rollouts
    ]


async def test_rollout_scheduler_a_verifier_that_fails_once_is_asked_again_without_generating_again() -> None:
    calls: dict[str, int] = {}

    async def flaky(rollout: Rollout) -> RewardResult:
        calls[rollout.rollout_id] = calls.get(rollout.rollout_id, 0) + 1
        if calls[rollout.rollout_id] == 1:
            raise RewardInfraError("verifier crashed")
        return RewardResult(value=0.5)

    engine = CountingEngine("a")
    groups = await build(Engines(engine), flaky).collect(draws(2), PLAN)
    assert len(engine.served) == 6
    assert all(r.reward and r.reward.value == 0.5 for g in groups for r in g.rollouts)


async def test_rollout_scheduler_what_infrastructure_failed_is_marked_and_has_no_reward() -> None:
    async def broken(rollout: Rollout) -> RewardResult:
        if rollout.index == 1:
            raise RewardInfraError("no verifier here")
        return RewardResult(value=1.0)

    (group,) = await build(Engines(CountingEngine("a")), broken).collect(draws(1), PLAN)
    failed = group.rollouts[1]
    assert failed.status is RolloutStatus.INFRA_ERROR
    assert failed.reward is None
    assert "no verifier here" in failed.cause
    assert [r.index for r in group.scored_rollouts] == [0, 2]


@pytest.mark.parametrize("num_failures", [1, 2, 3])
async def test_rollout_scheduler_what_fails_before_an_engine_has_the_request_is_tried_again(num_failures: int) -> None:
    tries: dict[int, int] = {}

    async def loop(
        draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Any
    ) -> Rollout:
        tries[index] = tries.get(index, 0) + 1
        if tries[index] <= num_failures:
            raise WorkerDiedError("the environment cannot be reset")
        return await generate_single_answer(draw, index, first_request, generate, renderer)

    scheduler = build(Engines(CountingEngine("a")), loop=loop)
    (group,) = await scheduler.collect(draws(1), PLAN)
    assert tries == {0: min(3, num_failures + 1), 1: min(3, num_failures + 1), 2: min(3, num_failures + 1)}
    if num_failures < 3:
        assert len(group.scored_rollouts) == 3
    else:
        assert {r.cause for r in group.rollouts} == {"WorkerDiedError: the environment cannot be reset"}
        assert {r.status for r in group.rollouts} == {RolloutStatus.INFRA_ERROR}
    assert len(scheduler.lifecycle) == 0


async def test_rollout_scheduler_an_answer_that_can_never_be_scored_is_given_up_at_once() -> None:
    asked: list[int] = []

    async def picky(rollout: Rollout) -> RewardResult:
        asked.append(rollout.index)
        if rollout.index == 1:
            raise UnscorableError("too long for the judge")
        return RewardResult(value=1.0)

    scheduler = build(Engines(CountingEngine("a")), picky)
    (group,) = await scheduler.collect(draws(1), PLAN)
    assert sorted(asked) == [0, 1, 2]  # each once
    assert (group.rollouts[1].status, group.rollouts[1].reward) == (RolloutStatus.INFRA_ERROR, None)
    (again,) = await scheduler.collect(draws(1), PLAN)  # it was the answer's doing: others to the prompt are tried
    assert len(again.scored_rollouts) == 2


async def test_rollout_scheduler_a_malformed_prompt_is_marked_by_name_and_nothing_more_is_generated_for_it() -> None:
    asked: list[str] = []

    async def picky(rollout: Rollout) -> RewardResult:
        asked.append(rollout.prompt.uid)
        if rollout.prompt.uid == "d/1":
            raise MalformedPromptError("d/1", "its tests cannot be used")
        return RewardResult(value=1.0)

    engine = CountingEngine("a")
    scheduler = build(Engines(engine), picky)
    good, bad = await scheduler.collect(draws(2), PLAN)
    assert len(good.scored_rollouts) == 3
    assert [r.status for r in bad.rollouts] == [RolloutStatus.INFRA_ERROR] * 3
    assert {r.cause for r in bad.rollouts} == {"MalformedPromptError: prompt 'd/1': its tests cannot be used"}
    assert asked.count("d/1") == 3  # once for each of its answers
    served = len(engine.served)
    good, bad = await scheduler.collect(draws(2), PLAN)
    assert (len(good.scored_rollouts), len(bad.scored_rollouts)) == (3, 0)
    assert {r.cause for r in bad.rollouts} == {"MalformedPromptError: prompt 'd/1': its tests cannot be used"}
    assert len(engine.served) == served + 3
    assert len(scheduler.lifecycle) == 0  # all of their lives have ended


async def test_rollout_scheduler_a_bug_in_a_reward_ends_the_collection_and_aborts_the_rest() -> None:
    async def buggy(rollout: Rollout) -> RewardResult:
        raise ZeroDivisionError("bug")

    engine = CountingEngine("a")
    engine.hold, engine.num_free = asyncio.Event(), 1
    with pytest.raises(ZeroDivisionError):
        await build(Engines(engine), buggy).collect(draws(1), PLAN)
    assert set(engine.aborted) == {"train-0.1", "train-0.2"}  # the first had its answer


async def test_rollout_scheduler_cancelling_aborts_requests_at_the_engine() -> None:
    engine = CountingEngine("a")
    engine.hold = asyncio.Event()
    task = asyncio.create_task(build(Engines(engine)).collect(draws(1), PLAN))
    while len(engine.served) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(engine.aborted) == {"train-0.0", "train-0.1", "train-0.2"}


def test_rollout_scheduler_seeds_differ_between_requests_and_are_stable() -> None:
    seeds = {compute_request_seed(0, p, d, i) for p in ("train", "eval") for d in range(50) for i in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert compute_request_seed(3, "train", 1, 2) == compute_request_seed(3, "train", 1, 2)
