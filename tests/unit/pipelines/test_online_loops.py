"""What objectives over fresh rollouts make of a step's rollouts: which are learnt from, as what, and by which loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll.algorithms.losses import LikelihoodLoss
from roll.config.pipelines import PIPELINES
from roll.pipelines.distill import objective as distill_objective
from roll.pipelines.learner import Learner
from roll.pipelines.preference_online import objective as preference_objective
from roll.pipelines.rejection_sampling import objective as rejection_objective
from roll.types import Group, Prompt, PromptDraw, RewardResult, Rollout, StepResult, TrainingBatch

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


class Policy:
    """A trainer that keeps what it is to learn."""

    num_ranks = 1

    def __init__(self) -> None:
        self.batch = TrainingBatch(samples=())
        self.loss: Any = None

    async def train_step(self, batch: TrainingBatch, loss: Any) -> StepResult:
        self.batch, self.loss = batch, loss
        return StepResult(loss=0.0, grad_norm=0.0, learning_rate=0.0, num_tokens=0, num_loss_tokens=0, stepped=True)


def after_a_step(
    objective: Callable[..., Any], pipeline: str, *groups: Group, parts: Any = (), **settings: Any
) -> Policy:
    held = {key: settings.pop(key) for key in ("teachers", "reference") if key in settings}
    config = PIPELINES.get(pipeline).model_validate({**BASE, "pipeline": pipeline, **settings})
    policy: Any = Policy()
    run = SimpleNamespace(
        seed=0,
        state=SimpleNamespace(step=0),
        mid_update=False,
        has_trained=False,
        spans=SimpleNamespace(phase=lambda name: nullcontext()),
    )
    online: Any = SimpleNamespace(config=config, run=run, learner=Learner(policy=policy, **held))
    learned = objective(online, *parts)
    batch: Any = SimpleNamespace(groups=groups, rejection_reasons={}, expired={})

    async def step() -> None:
        assert (await learned.learn(await learned.collect(batch))).has_new_weights

    asyncio.run(step())
    return policy


def answers(batch: TrainingBatch) -> list[int]:
    """Of every sample, the number that its answer repeats."""
    return [int(sample.token_ids[-1]) for sample in batch.samples]


def test_online_loops_the_best_answers_are_imitated_at_the_temperature_that_wrote_them() -> None:
    groups = group(1, "a", 0.5, 1.0, 0.9, 0.0), group(2, "b", 0.1, 0.2, 0.3, 0.0), group(3, "a", 0.0, 0.0, 0.6, 0.0)
    rejection = {"keep": 2, "min_reward": 0.5, "aggregation": "sequence_mean"}
    policy = after_a_step(rejection_objective.build_objective, "rejection_sampling", *groups, rejection=rejection)
    assert answers(policy.batch) == [11, 12, 32]
    assert policy.batch.temperature == 0.7
    assert policy.loss == LikelihoodLoss(aggregation="sequence_mean")


def test_online_loops_every_pair_is_a_unit_of_a_better_and_a_worse_answer_with_what_the_reference_says() -> None:
    groups = group(1, "a", 0.0, 1.0, 0.75, 0.9), group(2, "b", 0.2, 0.2, 0.2, 0.2), group(3, "a", 0.8, 0.0, 0.2, 0.0)
    pairing = {"type": "all", "min_difference": 0.7}
    policy = after_a_step(
        preference_objective.build_objective, "preference_online", *groups, pairing=pairing, reference=Says(-3.0)
    )
    assert answers(policy.batch) == [11, 10, 13, 10, 12, 10, 30, 31, 30, 33]
    assert [sample.unit for sample in policy.batch.samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [sample.preferred for sample in policy.batch.samples] == [True, False] * 5
    assert policy.batch.temperature == 0.7
    assert all(
        sample.ref_logprobs is not None and set(sample.ref_logprobs) == {-3.0} for sample in policy.batch.samples
    )


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_online_loops_every_answer_learns_from_the_teacher_of_its_source_at_its_temperature(place: str) -> None:
    teacher = [{"model": "first", "domains": ["b"]}, {"model": "second"}]
    groups = group(1, "a", 0.0, 1.0, 0.0, 0.0), group(2, "b", 0.0, 0.0, 0.0, 0.0)
    teachers = [Says(-2.0), Says(-5.0)] if place == "reward" else []
    policy = after_a_step(
        distill_objective.build_objective,
        "distill",
        *groups,
        parts=([100, 13],),  # the second teacher lacks the last answer's token
        teachers=teachers,
        teacher=teacher,
        distillation={"mode": place},
    )
    assert answers(policy.batch) == [10, 11, 12, 20, 21, 22, 23]
    assert [sample.teacher for sample in policy.batch.samples] == [1, 1, 1, 0, 0, 0, 0]
    assert policy.batch.temperature == 0.7
    worth = [sample.advantages.tolist()[-1] for sample in policy.batch.samples if sample.advantages is not None]
    assert worth == ([-4.0] * 3 + [-1.0] * 4 if place == "reward" else [0.0] * 7)
