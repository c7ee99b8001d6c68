"""The controller's end with a real trainer and real `hf` engines, whole and with faults put in."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import LoRAConfig, ModelConfig
from roll.config.operations import WeightSyncConfig
from roll.config.training import TrainingConfig
from roll.errors import EngineDiedError, WeightSyncError
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.protocols import SupportsReadback
from roll.training import TrainerSpec
from roll.types import (
    FloatArray,
    IntArray,
    TensorSpec,
    TrainingBatch,
    TrainingSample,
    WeightReceipt,
    WeightUpdate,
)
from roll.weights import SyncReport, WeightSync, compute_checksum, in_process
from roll.weights import delivery as deliveries
from roll.weights.delivery import Delivery
from roll.weights.plan import plan_buckets

PROBE = [np.random.default_rng(seed).integers(4, 260, 60).astype(np.int32) for seed in range(4)]
LEARNING_RATE = 1e-5
LAYER = "model.layers.1."


class StaleEngine(HFEngine):
    """Confirms every update; of tensors whose name begins with `stale` it goes on computing with the old ones."""

    stale = "nothing"

    def held(self) -> dict[str, torch.Tensor]:
        return dict(self._decoder.model.state_dict())  # type: ignore[union-attr]

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        old = {name: tensor.clone() for name, tensor in self.held().items() if name.startswith(self.stale)}
        receipt = await super().update_weights(update)
        held = self.held()
        for name, tensor in old.items():
            held[name].copy_(tensor)
        return receipt


class ReadableEngine(StaleEngine):
    """The same, with read-back."""

    async def applied_checksums(self) -> Mapping[str, int] | None:
        return {name: compute_checksum(tensor) for name, tensor in self.held().items()}


class ForgetfulEngine(HFEngine):
    """Does not confirm one tensor."""

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = await super().update_weights(update)
        checksums = {name: value for name, value in receipt.checksums.items() if name != "model.norm.weight"}
        return replace(receipt, checksums=checksums)


class MortalEngine(HFEngine):
    """Dies in an update, when told to: before it fetches anything."""

    dying = False

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        if self.dying:
            raise EngineDiedError(self.engine_id, "its process ended")
        return await super().update_weights(update)


class PausableEngine(HFEngine):
    """Keeps every request waiting while it is paused."""

    decoding: asyncio.Event

    async def logprobs(self, sequences: Sequence[IntArray], media: Any = ()) -> list[FloatArray]:
        await self.decoding.wait()
        return await super().logprobs(sequences)


class AdapterEngine(HFEngine):
    """Keeps the version of every adapter, all of them in the same weights."""

    confirms = True

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.held = {**getattr(self, "held", {}), update.adapter: update.policy_version}
        receipt = await super().update_weights(replace(update, adapter=None))
        return replace(receipt, adapter=update.adapter if self.confirms else None)


class Engines:
    """An `EngineGroup` of engines that the test has made."""

    def __init__(self, engines: Sequence[HFEngine]) -> None:
        self.engines = list(engines)
        self.asleep: list[HFEngine] = []

    def list_awake(self) -> list[HFEngine]:
        return [engine for engine in self.engines if engine not in self.asleep]

    async def replace(self, engine_id: str) -> HFEngine:
        (index,) = [i for i, engine in enumerate(self.engines) if engine.engine_id == engine_id]
        await self.engines[index].close()
        self.engines[index] = HFEngine(self.engines[index]._spec)
        await self.engines[index].start()
        return self.engines[index]

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


class Bench:
    """A trainer, its engines, and the sync between them."""

    def __init__(self, trainer: LocalTrainerGroup, engines: Engines, sync: WeightSync) -> None:
        self.trainer, self.engines, self.sync = trainer, engines, sync
        self.version = 0

    async def step(self) -> SyncReport:
        """One real optimiser step, then a push."""
        rng = np.random.default_rng(self.version)
        samples = []
        for index in range(4):
            tokens = rng.integers(4, 260, 24).astype(np.int32)
            mask = np.arange(24) >= 8
            samples.append(
                TrainingSample(
                    sample_id=str(index),
                    unit=index,
                    prefix_length=8,
                    token_ids=tokens,
                    loss_mask=mask,
                    advantages=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
                    rollout_logprobs=np.zeros(24, dtype=np.float32),
                )
            )
        result = await self.trainer.train_step(TrainingBatch(samples=tuple(samples)), PolicyLoss())
        assert result.stepped
        self.version += 1
        return await self.sync.push(self.version)


@pytest.fixture
async def open_bench(tiny_model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Make a bench: `await open_bench(HFEngine, StaleEngine, dtype="bfloat16", …)`."""
    opened: list[Bench] = []

    async def make(
        *kinds: type[HFEngine],
        dtype: str = "float32",
        transport: str = "in_process",
        engine_model: Path | None = None,
        lora: LoRAConfig | None = None,
        quantization: str = "none",
        timeout_s: float = 60.0,
        **config: Any,
    ) -> Bench:
        spec = TrainerSpec(
            model_path=str(tiny_model),
            model=ModelConfig(path=str(tiny_model), dtype=dtype, lora=lora),  # type: ignore[arg-type]
            training=TrainingConfig(num_steps=10, learning_rate=LEARNING_RATE, num_threads=1),
            quantization=quantization,  # type: ignore[arg-type]
            seed=0,
        )
        trainer = await LocalTrainerGroup.start(spec)
        engines = Engines(
            [
                kind(
                    EngineSpec(
                        engine_id=f"engine-{index}",
                        kind="hf",
                        model_path=str(engine_model or tiny_model),
                        dtype=dtype,  # type: ignore[arg-type]
                        max_context=96,
                        max_num_seqs=4,
                    )
                )
                for index, kind in enumerate(kinds)
            ]
        )
        for engine in engines.engines:
            await engine.start()
        settings = WeightSyncConfig(transport=transport, **config)  # type: ignore[arg-type]
        sync = WeightSync(trainer, engines, settings, probe=PROBE, timeout_s=timeout_s)
        bench = Bench(trainer, engines, sync)
        opened.append(bench)
        return bench

    yield make
    for bench in opened:
        await bench.engines.close()
        await bench.trainer.close()


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "broadcast"])
async def test_weight_sync_every_engine_follows_the_trainer(open_bench: Callable[..., Any], transport: str):
    bench = await open_bench(HFEngine, HFEngine, transport=transport)
    await bench.sync.push(0)
    report = await bench.step()
    weights = dict(bench.trainer._backend.weights())
    assert (report.policy_version, report.transport, report.dead_engines) == (1, transport, {})
    assert report.engines == ("engine-0", "engine-1")
    assert report.num_tensors == len(weights)
    assert report.num_bytes == sum(4 * tensor.numel() for tensor in weights.values())
    for engine in bench.engines.engines:
        held = engine._decoder.model.state_dict()
        assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
    for result in report.probe.values():
        assert result.mean_abs < 5e-6
        assert result.change > 1e-4
        assert result.change_missed < 5e-6
    assert report.compute_metrics()["sync/probe_mean_abs"] == max(r.mean_abs for r in report.probe.values())


async def test_weight_sync_merged_adapters_arrive_as_plain_weights(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine, lora=LoRAConfig(rank=4))
    before = {name: tensor.clone() for name, tensor in bench.trainer._backend.weights()}
    await bench.sync.push(0)
    report = await bench.step()
    held = bench.engines.engines[0]._decoder.model.state_dict()
    assert any(not torch.equal(held[name], tensor) for name, tensor in before.items())
    assert report.probe["engine-0"].mean_abs < 5e-6


@pytest.mark.parametrize(("form", "lora"), [("int8", None), ("fp8", None), ("int8", LoRAConfig(rank=4))])
async def test_weight_sync_engines_hold_what_the_codes_that_were_sent_stand_for(
    open_bench: Callable[..., Any], form: str, lora: LoRAConfig | None
):
    bench = await open_bench(HFEngine, quantization=form, lora=lora, transport="shared_memory")
    await bench.sync.push(0)
    report = await bench.step()
    weights = dict(bench.trainer._backend.weights())
    linear = {name for name in weights if "_proj" in name}
    assert len(linear) == 2 * 7 and report.num_tensors == len(weights) + len(linear)
    by_name = {name: (1, 4 * len(weights[name])) if name in linear else (4, 0) for name in weights}
    assert report.num_bytes == sum(each * weights[n].numel() + scales for n, (each, scales) in by_name.items())
    held = bench.engines.engines[0]._decoder.model.state_dict()
    for name, weight in weights.items():
        largest = weight.abs().amax(-1, keepdim=True)
        if name not in linear:
            assert torch.equal(held[name], weight)
        elif form == "int8":
            assert ((held[name] - weight).abs() <= largest / 127 * 0.5001).all() and not torch.equal(held[name], weight)
        else:  # three bits behind the first one, down to 2 ** -9 of a unit where a row's largest is 448
            close = torch.maximum(weight.abs() / 16, largest / 448 / 2**10) * 1.0001
            assert ((held[name] - weight).abs() <= close).all() and not torch.equal(held[name], weight)
    assert 1e-3 < report.probe["engine-0"].mean_abs < 0.5


@pytest.mark.parametrize(("form", "value"), [("none", math.nan), ("int8", math.inf), ("fp8", math.nan)])
async def test_weight_sync_weights_that_are_not_finite_are_the_trainers_and_not_the_engines_fault(
    open_bench: Callable[..., Any], form: str, value: float
):
    bench = await open_bench(HFEngine, quantization=form, transport="shared_memory")
    await bench.sync.push(0)
    (broken,) = [p for name, p in bench.trainer._backend.masters.parameters.items() if "layers.1.mlp.up_proj" in name]
    with torch.no_grad():
        broken[3, 5] = value
    with pytest.raises(WeightSyncError) as caught:
        await bench.sync.push(1)
    assert str(caught.value) == (
        "weight sync of policy version 1: the trainer's own log-probs are not finite, so the policy's weights have NaN "
        "or infinite values: resume from an earlier checkpoint with a lower training.learning_rate."
    )


class Corrupting:
    """A trainer group whose offers are tampered with on their way."""

    def __init__(self, inner: LocalTrainerGroup, tamper: Callable[[WeightUpdate], None]) -> None:
        self.inner, self.tamper = inner, tamper

    async def send_weights(self, policy_version: int, transport: str, deliver: Callable[..., Any]) -> Mapping[str, int]:
        async def tampered(update: WeightUpdate) -> None:
            self.tamper(update)
            await deliver(update)

        return await self.inner.send_weights(policy_version, transport, tampered)


def flip_bit_of_norm(update: WeightUpdate) -> None:
    (bucket,) = plan_buckets(update.manifest, 2**63)
    (slot,) = [slot for slot in bucket.slots if slot.spec.name == "model.norm.weight"]
    descriptor = os.open(f"/proc/{update.handle.process_id}/fd/{update.handle.descriptor}", os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, slot.offset)
    os.pwrite(descriptor, bytes([byte ^ 1]), slot.offset)
    os.close(descriptor)


async def test_weight_sync_one_bit_corrupted_in_transport_stops_the_sync_naming_the_tensor(
    open_bench: Callable[..., Any],
):
    bench = await open_bench(HFEngine, transport="shared_memory")
    bench.sync._trainer = Corrupting(bench.trainer, flip_bit_of_norm)
    with pytest.raises(
        WeightSyncError,
        match=r"version 0 over shared_memory, engine 'engine-0': .* sent for tensor 'model\.norm\.weight'",
    ):
        await bench.sync.push(0)


async def test_weight_sync_a_tensor_dropped_in_transport_stops_the_sync_naming_it(open_bench: Callable[..., Any]):
    def drop_norm(update: WeightUpdate) -> None:
        staged = in_process._staged_tensors[update.handle]
        staged[:] = [item for item in staged if item[0] != "model.norm.weight"]

    bench = await open_bench(HFEngine)
    bench.sync._trainer = Corrupting(bench.trainer, drop_norm)
    with pytest.raises(WeightSyncError, match=r"engine 'engine-0': .*tensor 'model\.norm\.weight' is missing"):
        await bench.sync.push(0)


async def test_weight_sync_a_tensor_that_an_engine_does_not_confirm_is_named(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine, ForgetfulEngine)
    with pytest.raises(WeightSyncError, match=r"engine 'engine-1': it did not receive tensor 'model\.norm\.weight'"):
        await bench.sync.push(0)


@pytest.mark.parametrize("stale", ["model.layers.0.", LAYER, "model.layers.0.mlp.down_proj", "model.embed_tokens"])
async def test_weight_sync_in_float32_one_layer_left_stale_by_one_step_trips_the_probe(
    open_bench: Callable[..., Any], stale: str
):
    bench = await open_bench(HFEngine, StaleEngine)
    await bench.sync.push(0)
    await bench.step()
    bench.engines.engines[1].stale = stale
    with pytest.raises(WeightSyncError, match="engine 'engine-1': every tensor arrived as sent, but its log-probs"):
        await bench.step()


async def test_weight_sync_in_bfloat16_such_a_layer_hides_in_rounding_and_only_read_back_sees_and_names_it(
    open_bench: Callable[..., Any],
):
    blind = await open_bench(StaleEngine, dtype="bfloat16")
    seeing = await open_bench(ReadableEngine, dtype="bfloat16")
    for bench in (blind, seeing):
        await bench.sync.push(0)
        await bench.step()
        bench.engines.engines[0].stale = LAYER
    assert not isinstance(blind.engines.engines[0], SupportsReadback)
    missed = await blind.step()
    assert missed.probe["engine-0"].mean_abs < missed.probe["engine-0"].tolerance, "the limit that the docs state"
    with pytest.raises(WeightSyncError, match=r"uses different bytes than it received for .*'model\.layers\.1\."):
        await seeing.step()


async def test_weight_sync_read_back_is_counted_when_all_is_well(open_bench: Callable[..., Any]):
    bench = await open_bench(ReadableEngine, HFEngine)
    report = await bench.sync.push(0)
    assert report.num_read_back >= report.num_tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weight_sync_an_engine_that_applies_nothing_trips_the_probe_at_any_precision(
    open_bench: Callable[..., Any], dtype: str
):
    bench = await open_bench(StaleEngine, dtype=dtype)
    await bench.sync.push(0)
    bench.engines.engines[0].stale = ""
    with pytest.raises(WeightSyncError, match=r"log-probs (did not change although|differ from the trainer's)"):
        await bench.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weight_sync_a_layer_that_never_held_the_models_weights_trips_the_first_probe(
    open_bench: Callable[..., Any], dtype: str, tmp_path: Path
):
    class NeverLoads(StaleEngine):
        stale = LAYER

    bench = await open_bench(NeverLoads, dtype=dtype, engine_model=write_tiny_model(tmp_path / "other", seed=9))
    with pytest.raises(WeightSyncError, match="log-probs differ from the trainer's"):
        await bench.sync.push(0)


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "broadcast"])
async def test_weight_sync_a_dead_engine_is_reported_the_others_are_synced_and_its_successor_can_be(
    open_bench: Callable[..., Any], transport: str
):
    bench = await open_bench(MortalEngine, HFEngine, transport=transport)
    await bench.sync.push(0)
    bench.engines.engines[0].dying = True
    report = await bench.step()
    assert list(report.dead_engines) == ["engine-0"]
    assert report.dead_engines["engine-0"].cause == "its process ended"
    assert report.engines == ("engine-1",)
    fresh = await bench.engines.replace("engine-0")
    caught_up = await bench.sync.push_to(fresh)
    assert (caught_up.policy_version, caught_up.engines) == (1, ("engine-0",))
    assert caught_up.probe["engine-0"].mean_abs < 5e-6
    assert (await bench.step()).engines == ("engine-0", "engine-1")


async def test_weight_sync_an_engine_that_does_not_answer_counts_as_dead(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    class Hanging(HFEngine):
        async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
            await asyncio.Event().wait()
            raise AssertionError

    within = deliveries.call_with_timeout

    def patient_with_the_other(timeout_s: float, engine: HFEngine, *call: Any) -> Any:
        return within(timeout_s if isinstance(engine, Hanging) else 60.0, engine, *call)

    monkeypatch.setattr(deliveries, "call_with_timeout", patient_with_the_other)
    bench = await open_bench(Hanging, HFEngine, timeout_s=0.5)
    report = await bench.sync.push(0)
    assert report.dead_engines["engine-0"].cause.startswith("it did not confirm policy version 0 within 0.5")
    assert report.engines == ("engine-1",)
    with pytest.raises(EngineDiedError, match=r"within 0\.5\d* s"):
        await bench.sync.push_to(bench.engines.engines[0])


async def test_weight_sync_an_engine_that_dies_under_the_probe_is_reported(open_bench: Callable[..., Any]):
    class DiesLater(HFEngine):
        async def logprobs(self, sequences: Any, media: Any = ()) -> Any:
            raise EngineDiedError(self.engine_id, "gone")

    bench = await open_bench(DiesLater, HFEngine)
    report = await bench.sync.push(0)
    assert list(report.dead_engines) == ["engine-0"]
    assert report.engines == ("engine-1",)
    assert list(report.probe) == ["engine-1"]


async def test_weight_sync_a_receipt_of_another_version_is_refused(open_bench: Callable[..., Any]):
    class Liar(HFEngine):
        async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
            return replace(await super().update_weights(update), policy_version=41)

    bench = await open_bench(Liar)
    with pytest.raises(WeightSyncError, match="engine 'engine-0': it confirmed policy version 41"):
        await bench.sync.push(42)


async def test_weight_sync_an_engines_own_failure_is_passed_on_with_its_name(
    open_bench: Callable[..., Any], tmp_path: Path
):
    deeper = write_tiny_model(tmp_path / "deeper", layers=3)
    bench = await open_bench(HFEngine, engine_model=deeper)
    with pytest.raises(WeightSyncError, match=r"engine 'engine-0': .*'model\.layers\.2\."):
        await bench.sync.push(0)


async def test_weight_sync_probes_run_as_often_as_configured(open_bench: Callable[..., Any]):
    never = await open_bench(HFEngine, probe_every_num_steps=0)
    assert not (await never.sync.push(0)).probe
    second = await open_bench(HFEngine, probe_every_num_steps=2)
    assert [bool((await second.sync.push(version)).probe) for version in range(4)] == [True, False, True, False]


async def test_weight_sync_a_configured_tolerance_is_used(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine, probe_tolerance=1e-12)
    with pytest.raises(WeightSyncError, match="tolerated: 1e-12"):
        await bench.sync.push(0)


async def test_weight_sync_a_fresh_engine_cannot_be_synced_before_the_first_push(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine)
    with pytest.raises(WeightSyncError, match="no weights were pushed yet"):
        await bench.sync.push_to(bench.engines.engines[0])


async def test_weight_sync_engine_group_members_that_sleep_get_no_weights_before_they_wake(
    open_bench: Callable[..., Any],
):
    bench = await open_bench(HFEngine, HFEngine, transport="broadcast")
    await bench.sync.push(0)
    first = bench.engines.engines[0]
    bench.engines.asleep.append(first)
    await first.sleep()
    report = await bench.step()
    assert (report.engines, report.dead_engines) == (("engine-1",), {})
    bench.engines.asleep.clear()
    await first.wake()
    report = await bench.sync.push_to(first)
    assert (report.engines, report.policy_version) == (("engine-0",), 1)


async def test_weight_sync_keeps_a_version_of_every_adapter(open_bench: Callable[..., Any]):
    bench = await open_bench(AdapterEngine)
    await bench.sync.push(0)
    report = await bench.sync.push(3, adapter="judge")
    assert (report.adapter, report.policy_version, report.engines) == ("judge", 3, ("engine-0",))
    assert not report.probe and report.num_read_back == 0  # engines score with the policy's own weights
    assert bench.sync.versions == {None: 0, "judge": 3}
    assert bench.engines.engines[0].held == {None: 0, "judge": 3}
    with pytest.raises(
        WeightSyncError, match="needs the weights of 2 models, but the trainer has only the weights of adapter"
    ):
        await bench.sync.push_to(bench.engines.engines[0])
    assert (await bench.sync.push(1)).probe


async def test_weight_sync_of_an_adapter_that_is_not_confirmed_is_refused(open_bench: Callable[..., Any]):
    bench = await open_bench(AdapterEngine)
    bench.engines.engines[0].confirms = False
    await bench.sync.push(0)
    with pytest.raises(WeightSyncError, match="it confirmed the policy's own weights instead of the adapter 'judge'"):
        await bench.sync.push(1, adapter="judge")


async def test_weight_sync_of_an_adapter_to_an_engine_without_lora_is_refused(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine)
    await bench.sync.push(0)
    with pytest.raises(WeightSyncError, match=r"the hf engine has no LoRA adapters, .* 'judge'"):
        await bench.sync.push(1, adapter="judge")


async def test_weight_sync_wait_for_each_other(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine, HFEngine, transport="shared_memory")
    await bench.sync.push(0)
    reports = await asyncio.gather(bench.sync.push(1), bench.sync.push_to(bench.engines.engines[0]), bench.sync.push(2))
    assert [report.policy_version for report in reports] == [1, 1, 2]


async def test_weight_sync_engines_stand_still_for_the_tensors_and_decode_again_for_the_probe(
    open_bench: Callable[..., Any],
):
    bench = await open_bench(PausableEngine)
    (engine,) = bench.engines.engines
    engine.decoding = asyncio.Event()

    @asynccontextmanager
    async def standing_still() -> AsyncIterator[None]:
        engine.decoding.clear()
        yield
        engine.decoding.set()

    async with asyncio.timeout(60):
        report = await bench.sync.push(0, pause_generation=standing_still())
    assert report.probe
    assert engine.decoding.is_set()


async def test_weight_sync_an_engine_that_never_answers_the_probe_counts_as_dead(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    bench = await open_bench(PausableEngine)
    (engine,) = bench.engines.engines
    engine.decoding = asyncio.Event()
    update = engine.update_weights

    async def updated(offer: WeightUpdate) -> Any:
        receipt = await update(offer)
        bench.sync._timeout_s = 0.05  # from now on: the probe's
        return receipt

    monkeypatch.setattr(engine, "update_weights", updated)
    report = await bench.sync.push(0)
    assert "did not answer the probe" in str(report.dead_engines[engine.engine_id])


async def test_weight_sync_codes_decide_what_the_probe_tolerates_also_where_most_numbers_are_embeddings():
    embedding = TensorSpec(name="embed", shape=(100,), dtype="float32")
    codes = TensorSpec(name="up", shape=(2, 2), dtype="int8")
    delivery = Delivery(policy_version=0, timeout_s=1.0)
    for manifest, dtype in (((embedding, codes), "int8"), ((embedding,), "float32")):
        update = WeightUpdate(policy_version=0, manifest=manifest, transport="in_process", handle=None)
        await delivery.deliver([], update)
        assert delivery.dtype == dtype


async def test_weight_sync_of_a_group_whose_engines_all_sleep_ends(open_bench: Callable[..., Any]):
    bench = await open_bench(HFEngine, transport="broadcast")
    await bench.sync.push(0)
    bench.engines.asleep.append(bench.engines.engines[0])
    async with asyncio.timeout(60):
        report = await bench.step()
    assert (report.engines, report.dead_engines) == ((), {})
    bench.engines.asleep.clear()
    assert (await bench.sync.push_to(bench.engines.engines[0])).policy_version == 1
