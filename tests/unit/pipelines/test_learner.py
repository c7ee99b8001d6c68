"""From a configuration to the trainers of a run, in this process, on real models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalCluster
from roll.config.inference import InferenceConfig
from roll.config.pipelines.rlvr import RLVRConfig
from roll.errors import ModelError, UnsupportedError
from roll.pipelines.learner import BaseModelScorer
from roll.pipelines.learning.losses import build_value_loss
from roll.pipelines.online.opening import build_policy_spec as online_spec
from roll.pipelines.reinforcement.trainers import (
    build_critic_specs,
    build_policy_spec,
    build_reference,
    build_reference_specs,
    resolve_critic_path,
)
from roll.training import Schedule
from roll.types import TrainingBatch, TrainingSample

PENALTY = {"coefficient": 0.1}


def config(
    model: Path, *, lora: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **algorithm: Any
):
    return RLVRConfig.model_validate(
        {
            "name": "x",
            "model": {"path": str(model), "dtype": "float32", "lora": lora},
            "training": {"num_steps": 10, "learning_rate": 1e-3, "num_threads": 1, **(training or {})},
            "data": [{"source": "arithmetic", "reward": "math"}],
            "algorithm": algorithm,
        }
    )


def batch() -> TrainingBatch:
    rng = np.random.default_rng(0)
    samples = []
    for index in range(4):
        tokens = rng.integers(4, 260, 12).astype(np.int32)
        mask = np.arange(12) >= 5
        sample = TrainingSample(
            sample_id=str(index),
            unit=index,
            prefix_length=5,
            token_ids=tokens,
            loss_mask=mask,
            advantages=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
            rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
            returns=np.where(mask, 0.7, 0.0).astype(np.float32),
            old_values=np.zeros(12, np.float32),
        )
        samples.append(sample)
    return TrainingBatch(samples=tuple(samples))


async def values_of(critic: Any, batch: TrainingBatch) -> list[Any]:
    return (await critic.forward(batch, ["values"]))["values"]


def test_learner_every_trainers_schedule_counts_its_own_updates(tiny_model: Path) -> None:
    run = config(
        tiny_model,
        training={"warmup_steps": 2, "schedule": "cosine"},
        type="ppo",
        updates={"num_minibatches": 4, "num_epochs": 3},
        critic={"learning_rate": 0.5, "num_epochs": 2, "warmup_steps": 4},
    )
    policy, (critic,) = build_policy_spec(run, tiny_model), build_critic_specs(run, tiny_model)
    assert policy.schedule == Schedule(peak=1e-3, num_updates=6 * 12, num_warmup=2 * 12, shape="cosine")
    assert critic.schedule == Schedule(peak=0.5, num_updates=10 * 8, num_warmup=2 * 8, shape="cosine")
    assert policy.role == "policy" and critic.role == "critic"


def test_learner_one_update_a_step_is_the_schedule_of_the_configuration(tiny_model: Path) -> None:
    run = config(tiny_model)
    assert build_policy_spec(run, tiny_model).schedule == Schedule.from_config(run.training)


def test_learner_only_the_policy_sends_weights_in_codes(tiny_model: Path) -> None:
    run = config(tiny_model, type="ppo")
    assert build_policy_spec(run, tiny_model).quantization == "none"
    run = run.model_copy(update={"inference": InferenceConfig(quantization="fp8")})
    other: Any = SimpleNamespace(**dict(run), updates_per_step=1, synced_adapter=None, sent_quantization="fp8")
    assert build_policy_spec(run, tiny_model).quantization == online_spec(other, tiny_model).quantization == "fp8"
    assert build_critic_specs(run, tiny_model)[0].quantization == "none"


def test_learner_critics_are_there_only_where_the_algorithm_uses_them(tiny_model: Path) -> None:
    assert build_critic_specs(config(tiny_model), tiny_model) == []
    two = build_critic_specs(config(tiny_model, type="asy_ppo"), tiny_model)
    assert [spec.role for spec in two] == ["critic", "critic"]
    assert len({spec.seed for spec in two}) == 2


def test_learner_a_reference_is_started_only_where_the_policy_cannot_be_it(tiny_model: Path) -> None:
    assert build_reference_specs(config(tiny_model), tiny_model) == []
    (spec,) = build_reference_specs(config(tiny_model, kl=PENALTY), tiny_model)
    assert spec.role == "reference"
    assert build_reference_specs(config(tiny_model, kl=PENALTY, lora={"rank": 2}), tiny_model) == []
    full = config(tiny_model, kl={**PENALTY, "estimator": "full"})
    assert build_reference_specs(full, tiny_model) == []
    assert build_policy_spec(full, tiny_model).holds_reference
    assert not build_policy_spec(config(tiny_model, kl=PENALTY), tiny_model).holds_reference


def test_learner_a_critics_backbone_is_the_policys_model_or_one_with_its_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    assert resolve_critic_path(config(tiny_model, type="ppo"), tiny_model) == tiny_model
    smaller = write_tiny_model(tmp_path / "smaller", layers=1)
    run = config(tiny_model, type="ppo", critic={"model": str(smaller)})
    assert resolve_critic_path(run, tiny_model) == smaller
    strange = write_tiny_model(tmp_path / "strange")
    text = (strange / "tokenizer.json").read_text()
    (strange / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|other|>"))
    run = config(tiny_model, type="ppo", critic={"model": str(strange)})
    with pytest.raises(
        ModelError, match=r"the tokenizer of algorithm\.critic\.model .* differs from that of model\.path"
    ):
        resolve_critic_path(run, tiny_model)


async def test_learner_a_critic_smaller_than_the_policy_learns_in_its_own_thread(
    tmp_path: Path, tiny_model: Path
) -> None:
    smaller = write_tiny_model(tmp_path / "smaller", layers=1)
    run = config(tiny_model, type="ppo", critic={"model": str(smaller), "learning_rate": 1e-2, "value_clip": None})
    (spec,) = build_critic_specs(run, smaller)
    critic = await LocalCluster().start_trainer(spec, "critic")
    try:
        data = batch()
        assert not any(values.any() for values in await values_of(critic, data))
        results = [await critic.train_step(data, build_value_loss(run.algorithm)) for _ in range(10)]
        assert results[0].learning_rate == pytest.approx(1e-2)
        assert results[-1].metrics["value/error"] < 0.1 * results[0].metrics["value/error"]
        said = await values_of(critic, data)
        await critic.save(tmp_path / "critic-0")
        await critic.train_step(data, build_value_loss(run.algorithm))
        assert not np.array_equal((await values_of(critic, data))[0], said[0])
        await critic.load(tmp_path / "critic-0")
        assert all(np.array_equal(a, b) for a, b in zip(await values_of(critic, data), said, strict=True))
        with pytest.raises(UnsupportedError, match="role 'critic' does not compute logprobs"):
            await critic.forward(data, ["logprobs"])
    finally:
        await critic.close()


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
async def test_learner_the_reference_stays_where_the_policy_began(
    tiny_model: Path, lora: dict[str, Any] | None
) -> None:
    run = config(tiny_model, kl=PENALTY, lora=lora, training={"learning_rate": 0.02})
    cluster = LocalCluster()
    policy = await cluster.start_trainer(build_policy_spec(run, tiny_model), "actor_train")
    own = [await cluster.start_trainer(spec, "reference") for spec in build_reference_specs(run, tiny_model)]
    try:
        reference = build_reference(run, policy, own)
        assert isinstance(reference, BaseModelScorer) is (lora is not None)
        assert reference is not None
        first = (await policy.forward(batch(), ["logprobs"]))["logprobs"]
        for _ in range(3):
            await policy.train_step(batch(), PolicyLoss())
        for found, expected in zip((await reference.forward(batch(), ["logprobs"]))["logprobs"], first, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        moved = zip((await policy.forward(batch(), ["logprobs"]))["logprobs"], first, strict=True)
        assert max(np.abs(a - b).max() for a, b in moved) > 0.05
    finally:
        for trainer in (policy, *own):
            await trainer.close()


def test_learner_for_the_full_divergence_nothing_brings_log_probs(tiny_model: Path) -> None:
    run = config(tiny_model, kl={**PENALTY, "estimator": "full"}, lora={"rank": 2})
    assert build_reference(run, None, []) is None  # type: ignore[arg-type]  # not looked at


def test_learner_specs_travel_as_plain_data(tiny_model: Path) -> None:
    import pickle

    for spec in build_critic_specs(config(tiny_model, type="asy_ppo"), tiny_model):
        again = pickle.loads(pickle.dumps(dataclasses.replace(spec, rank=1, world_size=2)))
        assert (again.role, again.schedule, again.rank) == ("critic", spec.schedule, 1)
