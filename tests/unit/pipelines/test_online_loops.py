"""What the loops over fresh rollouts make of a step's rollouts: which are learnt from, as what, and by which loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.choosing import chosen
from roll.algorithms.losses import LikelihoodLoss
from roll.config.pipelines import PIPELINES
from roll.pipelines.distill import loop as distill_loop
from roll.pipelines.online.online_loop import Sampled
from roll.pipelines.preference_online import loop as preference_loop
from roll.pipelines.rejection_sampling import loop as rejection_loop
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout, TrainingBatch

BASE: dict[str, Any] = {
    "name": "run",
    "model": "m",
    "data": [{"source": "arithmetic", "domain": domain, "reward": "math"} for domain in "ab"],
    "rollout": {"temperature": 0.7, "group_size": 4, "max_new_tokens": 4},
    "training": {"num_steps": 1},
}


def group(draw_id: int, domain: str, *rewards: float) -> Group:
    prompt = Prompt(uid=f"{domain}/{draw_id}", domain=domain, messages=())
    draw = PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.arange(2, dtype=np.int32))
    rollouts = [
        Rollout(
            draw_id=draw_id,
            index=index,
            prompt=prompt,
            prompt_token_ids=draw.token_ids,
            token_ids=np.full(2, 10 * draw_id + index, np.int32),
            logprobs=np.full(2, -1.0, np.float32),
            policy_versions=np.zeros(2, np.int32),
            finish_reason="stop",
            text="",
            reward=RewardResult(value=reward),
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(draw=draw, rollouts=tuple(rollouts))


class Says:
    """A frozen model that says the same of every token."""

    def __init__(self, value: float) -> None:
        self.value = value

    async def forward(self, batch: TrainingBatch, outputs: Sequence[str]) -> dict[str, list[Any]]:
        return {"logprobs": [np.full(len(sample), self.value, np.float32) for sample in batch.samples]}


class Loop:
    """An `OnlineLoop` of one step over given groups, that keeps what it is to learn."""

    def __init__(
        self, config: Any, *groups: Group, teachers: Sequence[Says] = (), reference: Says | None = None
    ) -> None:
        self.config, self.groups = config, groups
        self.learner = SimpleNamespace(teachers=teachers, reference=reference)
        self.batch = TrainingBatch(samples=())
        self.loss: Any = None

    async def sample(self, choose: Any) -> Sampled:
        return Sampled(batch=cast(Any, None), choice=chosen(self.groups, choose))

    async def ask(self, role: str, question: Awaitable[Any]) -> Any:
        return await question

    async def learn(self, batch: TrainingBatch, loss: Any, updates: Any) -> dict[str, float]:
        self.batch, self.loss = batch, loss
        return {}

    async def cross_boundary(self, *args: Any) -> list[str]:
        return []

    async def repeat(self, step: Callable[[], Awaitable[Any]]) -> None:
        await step()


def after_a_step(train: Callable[..., Any], pipeline: str, *groups: Group, parts: Any = (), **settings: Any) -> Loop:
    held = {key: settings.pop(key) for key in ("teachers", "reference") if key in settings}
    config = PIPELINES.get(pipeline).model_validate({**BASE, "pipeline": pipeline, **settings})
    loop = Loop(config, *groups, **held)
    asyncio.run(train(loop, *parts))
    return loop


def answers(batch: TrainingBatch) -> list[int]:
    """Of every sample, the number that its answer repeats."""
    return [int(sample.token_ids[-1]) for sample in batch.samples]


def test_the_best_answers_are_imitated_at_the_temperature_that_wrote_them() -> None:
    groups = group(1, "a", 0.5, 1.0, 0.9, 0.0), group(2, "b", 0.1, 0.2, 0.3, 0.0), group(3, "a", 0.0, 0.0, 0.6, 0.0)
    rejection = {"keep": 2, "min_reward": 0.5, "aggregation": "sequence_mean"}
    loop = after_a_step(rejection_loop.train, "rejection_sampling", *groups, rejection=rejection)
    assert answers(loop.batch) == [11, 12, 32]
    assert loop.batch.temperature == 0.7
    assert loop.loss == LikelihoodLoss(aggregation="sequence_mean")


def test_every_pair_is_a_unit_of_a_better_and_a_worse_answer_with_what_the_reference_says() -> None:
    groups = group(1, "a", 0.0, 1.0, 0.75, 0.9), group(2, "b", 0.2, 0.2, 0.2, 0.2), group(3, "a", 0.8, 0.0, 0.2, 0.0)
    pairing = {"type": "all", "min_difference": 0.7}
    loop = after_a_step(preference_loop.train, "preference_online", *groups, pairing=pairing, reference=Says(-3.0))
    assert answers(loop.batch) == [11, 10, 13, 10, 12, 10, 30, 31, 30, 33]
    assert [sample.unit for sample in loop.batch.samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [sample.preferred for sample in loop.batch.samples] == [True, False] * 5
    assert loop.batch.temperature == 0.7
    assert all(sample.ref_logprobs is not None and set(sample.ref_logprobs) == {-3.0} for sample in loop.batch.samples)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_every_answer_learns_from_the_teacher_of_its_source_at_its_temperature(place: str) -> None:
    teacher = [{"model": "first", "domains": ["b"]}, {"model": "second"}]
    groups = group(1, "a", 0.0, 1.0, 0.0, 0.0), group(2, "b", 0.0, 0.0, 0.0, 0.0)
    teachers = [Says(-2.0), Says(-5.0)] if place == "reward" else []
    loop = after_a_step(
        distill_loop.train,
        "distill",
        *groups,
        parts=([100, 13],),  # the second teacher lacks the last answer's token
        teachers=teachers,
        teacher=teacher,
        distillation={"place": place},
    )
    assert answers(loop.batch) == [10, 11, 12, 20, 21, 22, 23]
    assert [sample.teacher for sample in loop.batch.samples] == [1, 1, 1, 0, 0, 0, 0]
    assert loop.batch.temperature == 0.7
    worth = [sample.advantages.tolist()[-1] for sample in loop.batch.samples if sample.advantages is not None]
    assert worth == ([-4.0] * 3 + [-1.0] * 4 if place == "reward" else [0.0] * 7)
