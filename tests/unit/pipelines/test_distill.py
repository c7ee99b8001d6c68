"""What a teacher's words are worth to every token, whose teacher is whose, and who cannot teach."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.tiny_model import write_tiny_model

import roll
from roll.algorithms.losses import DistillationLoss, PolicyLoss, SummedLoss
from roll.config.distillation import DistillationConfig
from roll.data.samples import build_batch
from roll.errors import InfraError, ModelError
from roll.pipelines.distill.objective import attach_advantages, build_distillation_loss, estimate_divergence
from roll.pipelines.distill.teachers import EngineTeacher, compute_teacher_logprobs
from roll.types import LossRequirements, OutputName, Outputs, Prompt, RewardResult, Rollout, TrainingBatch


def rollout(draw_id: int, index: int, logprobs: list[float], reward: float = 0.0, domain: str = "d") -> Rollout:
    return Rollout(
        draw_id=draw_id,
        index=index,
        prompt=Prompt(uid=f"{domain}/{draw_id}", domain=domain, messages=()),
        prompt_token_ids=np.arange(2, dtype=np.int32),
        token_ids=np.full(len(logprobs), 7 + index, np.int32),
        logprobs=np.array(logprobs, np.float32),
        policy_versions=np.zeros(len(logprobs), np.int32),
        finish_reason="stop",
        text="",
        reward=RewardResult(value=reward),
    )


class Says:
    """A teacher that says the same of every token, and remembers what it was asked."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.asked: list[str] = []

    async def forward(self, batch: TrainingBatch, outputs: Outputs) -> Mapping[OutputName, list[Any]]:
        self.asked += [sample.sample_id for sample in batch.samples]
        return {"logprobs": [np.full(len(sample), self.value, np.float32) for sample in batch.samples]}


def taught(rollouts: list[Rollout], value: float) -> TrainingBatch:
    from dataclasses import replace

    batch = build_batch(rollouts, temperature=1.0, max_new_tokens=4)
    said = (np.full(len(s), value, np.float32) for s in batch.samples)
    return replace(
        batch, samples=tuple(replace(s, teacher_logprobs=x) for s, x in zip(batch.samples, said, strict=True))
    )


def test_distill_a_token_is_worth_the_log_ratio_of_teacher_to_student_and_its_rollouts_advantage() -> None:
    rollouts = [rollout(0, 0, [-1.0, -3.0], reward=1.0), rollout(0, 1, [-2.0], reward=0.0)]
    config = DistillationConfig(mode="reward", coefficient=0.5, reward_weight=2.0)
    batch = attach_advantages(taught(rollouts, -2.0), rollouts, config)
    # rewards 1 and 0: mean 0.5, unbiased deviation 0.70711, so advantages of 0.70711 and -0.70711, twice
    own = 2.0 * 0.5 / (np.sqrt(0.5) + 1e-6)
    first, second = (sample.advantages for sample in batch.samples)
    assert first is not None and second is not None
    np.testing.assert_allclose(first, [0.0, 0.0, own - 0.5, own + 0.5], atol=1e-6)
    np.testing.assert_allclose(second, [0.0, 0.0, -own], atol=1e-6)


def test_distill_the_divergence_that_the_sampled_tokens_show_is_their_mean_log_ratio() -> None:
    batch = taught([rollout(0, 0, [-1.0, -3.0]), rollout(0, 1, [-0.5])], -2.0)
    assert estimate_divergence(batch) == {"training/distill/divergence": pytest.approx((1.0 - 1.0 + 1.5) / 3)}
    assert estimate_divergence(build_batch([rollout(0, 0, [-1.0])], temperature=1.0, max_new_tokens=4)) == {}


def test_distill_every_rollout_is_scored_by_the_teacher_of_its_source_in_the_order_of_the_batch() -> None:
    rollouts = [rollout(0, 0, [-1.0], domain="a"), rollout(1, 0, [-1.0], domain="b"), rollout(2, 0, [-1.0], domain="a")]
    batch = build_batch(rollouts, temperature=1.0, max_new_tokens=4)
    first, second = Says(-1.0), Says(-2.0)
    found = asyncio.run(compute_teacher_logprobs([first, second], {"a": 0, "b": 1}, batch, rollouts))
    assert [column[0] for column in found] == [-1.0, -2.0, -1.0]
    assert (first.asked, second.asked) == (["0.0", "2.0"], ["1.0"])


def test_distill_a_teacher_that_has_nothing_to_score_is_not_asked() -> None:
    rollouts = [rollout(0, 0, [-1.0], domain="a")]
    idle = Says(-2.0)
    batch = build_batch(rollouts, temperature=1.0, max_new_tokens=4)
    assert len(asyncio.run(compute_teacher_logprobs([Says(-1.0), idle], {"a": 0, "b": 1}, batch, rollouts))) == 1
    assert idle.asked == []


async def test_distill_an_engine_teachers_log_probs_that_are_not_finite_name_the_engine() -> None:
    async def logprobs(sequences: Sequence[Any], media: Sequence[Any]) -> list[np.ndarray]:
        assert len(media) == len(sequences)
        return [np.where(np.arange(len(ids)) == 2, np.nan, -1.0).astype(np.float32) for ids in sequences]

    engine: Any = SimpleNamespace(engine_id="teacher-0", logprobs=logprobs)
    batch = build_batch([rollout(3, 1, [-1.0, -2.0])], temperature=1.0, max_new_tokens=4)
    with pytest.raises(InfraError, match=r"engine 'teacher-0' returned log-probs that are not finite .* rollout 3\.1"):
        await EngineTeacher(engine).forward(batch, ["logprobs"])


def test_distill_the_loss_is_what_the_configuration_says() -> None:
    exact = build_distillation_loss(DistillationConfig(divergence="jsd", beta=0.1))
    assert isinstance(exact, DistillationLoss)
    assert (exact.divergence.kind, exact.divergence.beta) == ("jsd", 0.1)
    assert isinstance(build_distillation_loss(DistillationConfig(mode="reward")), PolicyLoss)
    mixed = build_distillation_loss(DistillationConfig(reward_weight=1.0, coefficient=0.3))
    assert isinstance(mixed, SummedLoss) and [weight for weight, _ in mixed.parts] == [0.3, 1.0]
    assert build_distillation_loss(DistillationConfig(mode="reward")).needs == LossRequirements()


def test_distill_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(
    tmp_path: Path, tiny_model: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "pipeline": "distill",
        "name": "run",
        "output_dir": str(tmp_path),
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "teacher": str(other),
        "data": [{"source": "arithmetic", "reward": "math"}],
        "rollout": {"max_new_tokens": 4},
        "training": {"num_steps": 1},
        "tracking": {"console": "quiet", "tensorboard": False},
    }
    with pytest.raises(ModelError, match=r"differs from that of .* 2 of the student's differ"):
        roll.train(config)
    assert not (tmp_path / "run").exists()
    assert any("the tokenizer of teacher.model" in problem for problem in roll.check(config).problems)


@pytest.mark.integration
def test_distill_roll_check_counts_the_teachers_memory(tmp_path: Path, tiny_model: Path) -> None:
    teacher = write_tiny_model(tmp_path / "teacher", seed=1)
    base = {
        "pipeline": "distill",
        "name": "run",
        "output_dir": str(tmp_path),
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "teacher": str(teacher),
        "data": [{"source": "arithmetic", "reward": "math"}],
        "rollout": {"max_new_tokens": 4},
        "training": {"num_steps": 1},
        "inference": {"engine": "hf"},
    }
    held, own = (roll.check({**base, **more}) for more in ({}, {"distillation": {"mode": "reward"}}))
    assert held.model is not None and not held.problems and not own.problems
    size = 4 * held.model.num_parameters
    assert held.memory[0].parts["teachers"] == size
    assert next(role for role in own.memory if role.role == "teacher").parts["weights"] == size
