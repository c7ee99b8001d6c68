"""Weight syncs by the transport `store`, with a real trainer and real `hf` engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import LoRAConfig, ModelConfig
from roll.config.operations import WeightSyncConfig
from roll.config.training import TrainingConfig
from roll.errors import EngineDiedError, WeightSyncError
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.protocols import SupportsPrefetch
from roll.training import TrainerSpec
from roll.types import (
    GenerationRequest,
    SamplingParams,
    TrainingBatch,
    TrainingSample,
    WeightReceipt,
    WeightStore,
    WeightUpdate,
)
from roll.weights import SyncReport, WeightSync
from roll.weights.store import files
from roll.weights.store.files import DirectoryBackend


class RecordingEngine(HFEngine):
    """Records the order of its calls."""

    events: list[str]
    dies = False

    async def prefetch_weights(self, update: WeightUpdate) -> None:
        if self.dies:
            raise EngineDiedError(self.engine_id, "its process ended")
        await super().prefetch_weights(update)
        self.events.append("fetched")

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.events.append("update")
        return await super().update_weights(update)


class PlainEngine(RecordingEngine):
    """Does not support prefetching."""

    prefetch_weights = None  # type: ignore[assignment]


class Engines:
    """An `EngineGroup` of given engines."""

    def __init__(self, engines: list[RecordingEngine]) -> None:
        self.engines = engines

    def list_awake(self) -> list[RecordingEngine]:
        return self.engines


class Bench:
    """A trainer, its engines, and the sync between them."""

    def __init__(self, trainer: LocalTrainerGroup, engines: list[RecordingEngine], store: WeightStore) -> None:
        self.trainer, self.engines, self.store = trainer, engines, store
        settings = WeightSyncConfig(transport="store", store=store.url, probe_every_num_steps=0)
        self.sync = WeightSync(trainer, Engines(engines), settings, store=store)  # type: ignore[arg-type]
        self.events: list[str] = []
        self.version = 0
        for engine in engines:
            engine.events = self.events

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        self.events.append("paused")
        for engine in self.engines:
            await engine.pause("keep")
        yield
        for engine in self.engines:
            await engine.resume()
        self.events.append("resumed")

    async def push(self, **options: Any) -> SyncReport:
        return await self.sync.push(self.version, pause_generation=self.pause(), **options)

    async def train(self) -> None:
        rng = np.random.default_rng(self.version)
        samples = []
        for index in range(4):
            mask = np.arange(24) >= 8
            samples.append(
                TrainingSample(
                    sample_id=str(index),
                    unit=index,
                    prefix_length=8,
                    token_ids=rng.integers(4, 260, 24).astype(np.int32),
                    loss_mask=mask,
                    advantages=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
                    rollout_logprobs=np.zeros(24, dtype=np.float32),
                )
            )
        assert (await self.trainer.train_step(TrainingBatch(samples=tuple(samples)), PolicyLoss())).stepped
        self.version += 1

    def check_weights(self) -> None:
        """Assert that every engine holds the trainer's weights."""
        weights = dict(self.trainer._backend.weights())
        for engine in self.engines:
            held = engine._decoder.model.state_dict()  # type: ignore[union-attr]
            assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())


@pytest.fixture
async def open_bench(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Make a bench: `await open_bench(RecordingEngine, …)`."""
    opened: list[Bench] = []
    (tmp_path / "local").mkdir()

    async def make(*kinds: type[RecordingEngine], learning_rate: float = 1e-6, lora: LoRAConfig | None = None) -> Bench:
        spec = TrainerSpec(
            model_path=str(tiny_model),
            model=ModelConfig(path=str(tiny_model), dtype="bfloat16", lora=lora),
            training=TrainingConfig(num_steps=10, learning_rate=learning_rate, num_threads=1),
        )
        trainer = await LocalTrainerGroup.start(spec)
        engines = [
            kind(
                EngineSpec(
                    engine_id=f"engine-{index}",
                    kind="hf",
                    model_path=str(tiny_model),
                    dtype="bfloat16",
                    max_context=96,
                    max_num_seqs=4,
                )
            )
            for index, kind in enumerate(kinds)
        ]
        for engine in engines:
            await engine.start()
        store = WeightStore(url=str(tmp_path / "store"), session="run-1", local_dir=str(tmp_path / "local"))
        opened.append(Bench(trainer, engines, store))
        return opened[-1]

    yield make
    for bench in opened:
        for engine in bench.engines:
            await engine.close()
        await bench.trainer.close()
    assert list((tmp_path / "local").glob("*/*")) == [], "closed engines leave no local copies"
    assert list((tmp_path / "store").glob("*")) == [], "a closed trainer leaves no files in the store"


async def test_store_sync_engines_fetch_before_they_are_paused(open_bench: Callable[..., Any]):
    bench = await open_bench(RecordingEngine, RecordingEngine)
    for _ in range(3):
        bench.events.clear()
        report = await bench.push()
        assert bench.events == ["fetched", "fetched", "paused", "update", "update", "resumed"]
        assert (report.policy_version, report.engines) == (bench.version, ("engine-0", "engine-1"))
        bench.check_weights()
        await bench.train()


@pytest.mark.parametrize(("learning_rate", "largest_share"), [(1e-6, 0.05), (5e-5, 1.0)])
async def test_store_sync_of_a_real_step_writes_a_small_delta(
    open_bench: Callable[..., Any], learning_rate: float, largest_share: float
):
    bench = await open_bench(RecordingEngine, learning_rate=learning_rate)
    full = await bench.push()
    await bench.train()
    metrics = (await bench.push()).compute_metrics()
    bench.check_weights()
    assert 0 < metrics["sync/delta_density"] < 0.8
    assert metrics["sync/pause_s"] > 0 < metrics["sync/prefetch_s"]
    # The manifest describes every tensor in about 200 bytes, which counts only for a tiny model.
    assert metrics["sync/written_bytes"] - 300 * full.num_tensors <= largest_share * full.num_bytes


async def test_store_sync_engine_generates_while_it_fetches(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    bench = await open_bench(RecordingEngine)
    await bench.push()
    await bench.train()
    generated, read = threading.Event(), DirectoryBackend.read

    def read_after_generation(self: DirectoryBackend, path: str) -> bytes:
        assert generated.wait(30), "the engine does not generate during the fetch"
        return read(self, path)

    monkeypatch.setattr(DirectoryBackend, "read", read_after_generation)
    pushing = asyncio.create_task(bench.push())
    generation = await bench.engines[0].generate(
        GenerationRequest(
            request_id="r", token_ids=np.arange(4, 12, dtype=np.int32), sampling=SamplingParams(max_new_tokens=8)
        )
    )
    assert set(generation.policy_versions) == {0}
    assert bench.events[-1] == "resumed"
    generated.set()
    await pushing
    bench.check_weights()


async def test_store_sync_engine_without_prefetch_fetches_while_it_is_paused(open_bench: Callable[..., Any]):
    bench = await open_bench(PlainEngine)
    assert not isinstance(bench.engines[0], SupportsPrefetch)
    for _ in range(2):
        bench.events.clear()
        await bench.push()
        assert bench.events == ["paused", "update", "resumed"]
        bench.check_weights()
        await bench.train()
    from roll.weights.store import receiver

    receiver._process_prefetcher.close()  # which is otherwise closed at the end of the process


async def test_store_sync_of_merged_adapters_writes_deltas(open_bench: Callable[..., Any]):
    bench = await open_bench(RecordingEngine, lora=LoRAConfig(rank=4))
    await bench.push()
    await bench.train()
    metrics = (await bench.push()).compute_metrics()
    assert metrics["sync/deltas_since_full"] == 1
    bench.check_weights()


async def test_store_sync_with_a_corrupted_bucket_does_not_pause_the_engines(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    bench = await open_bench(RecordingEngine)
    await bench.push()
    await bench.train()
    bench.events.clear()
    read = DirectoryBackend.read
    monkeypatch.setattr(files, "BACKOFF_S", 0.0)
    monkeypatch.setattr(
        DirectoryBackend, "read", lambda self, path: read(self, path)[:-1] if "bucket" in path else read(self, path)
    )
    with pytest.raises(WeightSyncError, match=r"engine 'engine-0': weight store .*policy/00000001/bucket-00000"):
        await bench.push()
    assert bench.events == []


async def test_store_sync_engine_that_dies_while_it_fetches_is_replaced(open_bench: Callable[..., Any]):
    bench = await open_bench(RecordingEngine, RecordingEngine)
    await bench.push()
    await bench.train()
    bench.engines[1].dies = True
    dead: list[str] = []
    report = await bench.push(on_dead=dead.extend)
    assert (report.engines, dead) == (("engine-0",), ["engine-1"])
    bench.engines[1].dies = False  # stands for a new engine
    report = await bench.sync.push_to(bench.engines[1])
    assert report.compute_metrics()["sync/written_bytes"] == 0
    bench.check_weights()


async def test_store_sync_that_is_canceled_is_followed_by_a_full_copy(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    bench = await open_bench(RecordingEngine)
    await bench.push()
    await bench.train()
    writing, canceled, write = asyncio.Event(), threading.Event(), DirectoryBackend.write
    loop = asyncio.get_running_loop()

    def wait_until_canceled(self: DirectoryBackend, path: str, data: bytes) -> None:
        loop.call_soon_threadsafe(writing.set)
        assert canceled.wait(30)
        write(self, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryBackend, "write", wait_until_canceled)
        pushing = asyncio.create_task(bench.push())
        await writing.wait()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        canceled.set()
    report = await bench.push()
    assert report.compute_metrics()["sync/deltas_since_full"] == 0
    bench.check_weights()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "store"}, "transport store requires the key store: set it to a directory"),
        (
            {"store": "/mnt/x"},
            "store is supported only with transport store, got transport auto: set transport to store, or remove store",
        ),
        ({"transport": "store", "store": "s3:/bucket/x"}, "'s3:/bucket/x' lacks a slash .*: write s3://bucket/x"),
        ({"transport": "store", "store": "file://"}, "'file://' does not name a directory: set it to one such as /mnt"),
        ({"transport": "store", "store": "file://mnt/x"}, "'file://mnt/x' does not name a directory"),
        ({"transport": "store", "store": "s3://"}, "'s3://' does not name a directory"),
        ({"transport": "store", "store": "://x"}, "'://x' does not name a directory"),
        ({"transport": "store", "store": "memory://x"}, "in the memory of the trainer's process, where engines cannot"),
        ({"transport": "store", "store": "$NO_SUCH_VARIABLE/x"}, "NO_SUCH_VARIABLE"),
        ({"transport": "store", "store": "/mnt/x", "full_copy_every_num_syncs": 0}, "greater than or equal to 1"),
    ],
)
def test_store_sync_configuration_is_checked(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        WeightSyncConfig(**settings)


def test_store_sync_configuration_expands_the_home_directory_but_no_url(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert WeightSyncConfig(transport="store", store="~/weights").store == "/home/me/weights"
    for url in ("file:///mnt/x", "s3://bucket/~x", "/mnt/x"):
        assert WeightSyncConfig(transport="store", store=url).store == url
