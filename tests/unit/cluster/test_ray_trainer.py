"""Ranks of which one fails while the others wait for it; here, no process is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError

from roll.algorithms.losses import PolicyLoss
from roll.cluster import ray_trainer
from roll.cluster.ray_trainer import RayTrainerGroup, TrainerActor
from roll.config.model import ModelConfig
from roll.config.training import TRAINERS, TrainingConfig
from roll.errors import WorkerDiedError
from roll.training import TrainerSpec
from roll.training.packing.division import RankShare, restore_batch
from roll.types import TrainingBatch, TrainingSample


class Rank:
    """Stands for an actor. Answers what it is told to, or never."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.call = SimpleNamespace(remote=self._call)
        self.release = SimpleNamespace(remote=lambda failed: self._call("release"))

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(name)
        answer = self.answers.pop(0)
        await asyncio.sleep(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_trainer, "FAILURE_TIMEOUT_S", 0.01)


async def test_ray_trainer_the_first_rank_speaks_for_all_once_all_have_answered() -> None:
    group = RayTrainerGroup([Rank("first"), Rank("second")])
    assert await group._call("measure") == "first"


async def test_ray_trainer_a_state_is_written_once_every_rank_has_written_it() -> None:
    """What is published under a rank that still syncs its directory would fail there."""
    group = RayTrainerGroup([Rank(True, True), Rank(False, True)])
    assert not await group.is_save_written(wait=False)
    assert await group.is_save_written(wait=False)


async def test_ray_trainer_ranks_that_fail_together_can_go_on() -> None:
    group = RayTrainerGroup([Rank(ValueError("first"), True), Rank(ValueError("second"), True)])
    with pytest.raises(ValueError, match="first"):
        await group.is_save_written(wait=True)
    assert await group.is_save_written(wait=True)


async def test_ray_trainer_a_rank_that_waits_for_one_that_failed_is_asked_nothing_more() -> None:
    ranks = [Rank(None, True), Rank(ValueError("a sample lacks what the loss needs"), True)]
    group = RayTrainerGroup(ranks)
    with pytest.raises(ValueError, match="lacks"):
        await group.is_save_written(wait=True)
    with pytest.raises(
        WorkerDiedError, match=r"the trainer cannot continue, because one of its ranks failed: a sample lacks"
    ):
        await group.is_save_written(wait=True)
    assert [rank.asked for rank in ranks] == [["is_save_written"]] * 2
    await group.release(failed=True)  # gets through to whoever sends


async def test_ray_trainer_a_death_explains_what_other_ranks_met_and_names_the_rank() -> None:
    ranks = [Rank(RuntimeError("connection closed by peer")), Rank(ActorDiedError())]
    group = RayTrainerGroup(ranks, "policy", ["logs/policy-0.log", "logs/policy-1.log"])
    with pytest.raises(WorkerDiedError) as met:
        await group.is_save_written(wait=True)
    said = "rank 1 of trainer policy: its process ended (see logs/policy-1.log): resume the run."
    assert str(met.value) == said


async def test_ray_trainer_a_start_that_is_cancelled_ends_ranks_that_load_without_asking_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    rank = SimpleNamespace(build=SimpleNamespace(remote=lambda *_: asyncio.Event().wait()))
    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: rank))
    monkeypatch.setattr(ray_trainer.ray, "remote", lambda **_: lambda _: options)
    monkeypatch.setattr(ray_trainer.ray, "kill", lambda actor, no_restart: ended.append(actor))
    spec = TrainerSpec(model_path="", model=ModelConfig(path="tiny"), training=TrainingConfig(num_steps=1))
    start = asyncio.create_task(RayTrainerGroup.start(spec, [{"runtime_env": {"env_vars": {}}}]))
    for _ in range(3):
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert ended == [rank]


async def test_ray_trainer_every_rank_gets_the_columns_of_its_own_samples_and_each_part_is_stored_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: list[Any] = []
    received: list[TrainingBatch] = []

    def put(value: Any) -> Any:
        stored.append(value)
        return value

    async def train(name: str, outline: Any, columns: Any, *arguments: Any, **options: Any) -> str:
        assert (name, options) == ("forward_backward", {"last": True})
        received.append(restore_batch(outline, columns))
        return f"result of {arguments[0]}"

    monkeypatch.setattr(ray_trainer.ray, "put", put)
    ranks = [SimpleNamespace(call_with_share=SimpleNamespace(remote=train)) for _ in range(4)]
    group = RayTrainerGroup(ranks)
    share = {"data_size": 2, "computes_loss": True, "max_tokens": 8, "share_prefix": True}
    group._shares = [RankShare(data_rank=rank // 2, **share) for rank in range(4)]  # two tensor-parallel ranks each
    samples = tuple(
        TrainingSample(
            sample_id=str(i), unit=i, token_ids=np.arange(4), loss_mask=np.arange(4) > 1, advantages=np.full(4, i + 1.0)
        )
        for i in range(4)
    )
    loss = PolicyLoss()
    assert await group.forward_backward(TrainingBatch(samples=samples), loss, last=True) == f"result of {loss}"
    assert len(stored) == 3  # the outline, and the columns of each data rank
    held = [own.held or frozenset() for own in received]
    assert held[0] == held[1] and held[2] == held[3]
    assert held[0] | held[2] == set(range(4)) and not held[0] & held[2]
    for own in received:
        for i, sample in enumerate(own.samples):
            assert sample.advantages is not None
            assert sample.advantages.tolist() == [i + 1.0 if i in (own.held or ()) else 0.0] * 4


def test_ray_trainer_an_actor_sends_weights_in_codes_where_its_spec_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    model, training = ModelConfig(path=str(tiny_model)), TrainingConfig(num_steps=1, num_threads=1)
    actor = TrainerActor()
    spec = TrainerSpec(model_path=str(tiny_model), model=model, training=training, quantization="fp8")
    actor.build(spec, TRAINERS.path("torch"))
    offer = actor.stage(0, "in_process")
    assert offer is not None
    assert sum(tensor.dtype == "float8_e4m3fn" for tensor in offer.manifest) == 2 * 7
    actor.close()
