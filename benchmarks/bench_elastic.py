"""Weight sync through a file store over a slow link, and devices that engines and the trainer share in real runs.

`--parts store`: a real AdamW step of SmolLM2-135M-Instruct in bfloat16 changes the weights before each sync. The store
is a local directory behind a file system of fsspec that limits the sum of all transfers to `--mbit-per-s`.
`--parts sharing`: `_elastic_runs` (about 20 minutes on two cores, which nothing else should use).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from _elastic_runs import measure_sharing
from _report import RESULTS, report
from fsspec.implementations.local import LocalFileSystem

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import ModelConfig
from roll.config.operations import WeightSyncConfig
from roll.config.training import TrainingConfig
from roll.inference import EngineSpec
from roll.inference.hf import HFEngine
from roll.models import resolve_model
from roll.training import TrainerSpec
from roll.types import TrainingBatch, TrainingSample, WeightReceipt, WeightStore, WeightUpdate
from roll.weights import WeightSync

MODEL = "smollm2-135m-instruct"
LEARNING_RATES = (1e-6, 5e-5)
NUM_DELTAS = 3


class ThrottledFileSystem(LocalFileSystem):
    """A local directory behind a link of limited bandwidth, which all transfers share."""

    protocol = "throttled"
    bytes_per_s = 12.5e6
    _link = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("throttled://") if isinstance(path, str) else path)

    def _transfer(self, num_bytes: int) -> None:
        with self._link:
            time.sleep(num_bytes / self.bytes_per_s)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        """Read a file through the link."""
        data = super().cat_file(path, start, end, **options)
        self._transfer(len(data))
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file through the link."""
        self._transfer(len(value))
        super().pipe_file(path, value, mode, **options)


class TimedEngine(HFEngine):
    """Records the time that it takes to apply the last update."""

    apply_s = 0.0

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = await super().update_weights(update)
        self.apply_s = receipt.duration_s
        return receipt


class OneEngine:
    """An `EngineGroup` of one engine."""

    def __init__(self, engine: TimedEngine) -> None:
        self.engines = [engine]

    def list_awake(self) -> list[TimedEngine]:
        """Return the engine."""
        return self.engines


def build_batch(seed: int) -> TrainingBatch:
    """Return two samples of random tokens."""
    rng, mask = np.random.default_rng(seed), np.arange(64) >= 16
    return TrainingBatch(
        samples=tuple(
            TrainingSample(
                sample_id=str(index),
                unit=index,
                prefix_length=16,
                token_ids=rng.integers(0, 40_000, 64).astype(np.int32),
                loss_mask=mask,
                advantages=np.where(mask, 1.0 - 2.0 * index, 0.0).astype(np.float32),
                rollout_logprobs=np.zeros(64, dtype=np.float32),
            )
            for index in range(2)
        )
    )


async def measure_syncs(model_path: str, learning_rate: float, directory: str) -> dict[str, Any]:
    """Push a full copy, then deltas; return their sizes and times."""
    training = TrainingConfig(num_steps=100, learning_rate=learning_rate)
    spec = TrainerSpec(model_path=model_path, model=ModelConfig(path=model_path, dtype="bfloat16"), training=training)
    engine = TimedEngine(
        EngineSpec(
            engine_id="engine", kind="hf", model_path=model_path, dtype="bfloat16", max_context=128, max_num_seqs=4
        )
    )
    trainer = await LocalTrainerGroup.start(spec)
    await engine.start()

    @asynccontextmanager
    async def pause() -> AsyncIterator[None]:
        await engine.pause("keep")
        yield
        await engine.resume()

    store = WeightStore(url=f"throttled://{directory}/store", session=f"run-{learning_rate}", local_dir=directory)
    settings = WeightSyncConfig(transport="store", store=store.url, probe_every_num_steps=0)
    sync = WeightSync(trainer, OneEngine(engine), settings, store=store)  # type: ignore[arg-type]
    rows: list[dict[str, Any]] = []
    try:
        for version in range(1 + NUM_DELTAS):
            if version:
                await trainer.train_step(build_batch(version), PolicyLoss())
            begin = time.monotonic()
            result = await sync.push(version, pause_generation=pause())
            metrics = result.compute_metrics()
            rows.append(
                {
                    "share": metrics["sync/written_bytes"] / result.num_bytes,
                    "density": metrics.get("sync/delta_density"),
                    "total_s": time.monotonic() - begin,
                    "prefetch_s": metrics["sync/prefetch_s"],
                    "pause_s": result.pause_s,
                    "pause_per_apply": result.pause_s / engine.apply_s,
                }
            )
            print(learning_rate, rows[-1], flush=True)
    finally:
        await engine.close()
        await trainer.close()
    deltas = rows[1:]
    return {"full": rows[0]} | {"delta": {key: statistics.median(row[key] for row in deltas) for key in deltas[0]}}


async def main() -> None:
    """Measure all learning rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit-per-s", type=float, default=100.0, help="bandwidth of the link")
    parser.add_argument("--parts", nargs="+", choices=["store", "sharing"], default=["store", "sharing"])
    arguments = parser.parse_args()
    ThrottledFileSystem.bytes_per_s = arguments.mbit_per_s * 1e6 / 8
    fsspec.register_implementation("throttled", ThrottledFileSystem)
    model_path = str(resolve_model(MODEL))
    figures = json.loads((RESULTS / "elastic.json").read_text())["figures"]
    if "store" in arguments.parts:
        figures["mbit_per_s"] = arguments.mbit_per_s
        for learning_rate in LEARNING_RATES:
            with tempfile.TemporaryDirectory() as directory:
                figures[f"learning rate {learning_rate:g}"] = await measure_syncs(model_path, learning_rate, directory)
    if "sharing" in arguments.parts:
        with tempfile.TemporaryDirectory() as directory:
            figures["sharing"] = await asyncio.to_thread(measure_sharing, Path(directory), MODEL)
    report("elastic", figures)


if __name__ == "__main__":
    asyncio.run(main())
