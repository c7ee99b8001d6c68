"""Runs whose weights reach the engines through a file store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos.harness import tiny_config

import roll
from roll.inference import EngineSpec, build_engine
from roll.types import GenerationRequest, SamplingParams, WeightStore
from roll.weights import Sender


def build_config(directory: Path, model: Path, num_steps: int) -> dict[str, Any]:
    base = tiny_config(model, num_steps=num_steps)
    base["model"] |= {"dtype": "bfloat16"}
    base["training"] |= {"learning_rate": 1e-5}
    base["rollout"] |= {"scheduling": {"async_ratio": 1}}
    (directory / "local").mkdir(exist_ok=True)
    sync = {"transport": "store", "store": str(directory / "store"), "local_copy_dir": str(directory / "local")}
    return {**base, "output_dir": str(directory), "weight_sync": sync}


def test_store_run_trains_resumes_and_leaves_no_files(tmp_path: Path, tiny_model: Path):
    roll.train(build_config(tmp_path, tiny_model, num_steps=3))
    record = tmp_path / "run" / "weight_store.json"
    killed = json.loads(record.read_text())["session"]
    (tmp_path / "store" / killed / "policy" / "00000000").mkdir(parents=True)  # as if the first session was killed
    roll.resume(tmp_path / "run", overrides=["training.num_steps=5"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # Each session begins with a full copy, when the engines first get the weights.
    assert [row["sync/deltas_since_full"] for row in rows] == [1, 2, 3, 1, 2]
    assert all(0 < row["sync/delta_density"] < 0.5 and row["sync/pause_s"] > 0 for row in rows)
    assert list((tmp_path / "store").iterdir()) == []
    assert list((tmp_path / "local").glob("*/*")) == []
    assert json.loads(record.read_text())["session"] != killed


def test_store_run_that_cannot_write_its_store_is_rejected_by_the_check(tmp_path: Path, tiny_model: Path):
    config = build_config(tmp_path, tiny_model, num_steps=1)
    config["weight_sync"]["store"] = "xyz://bucket/path"
    problems = roll.check(config).problems
    assert any("weight_sync.store 'xyz://bucket/path' has the scheme 'xyz'" in problem for problem in problems)
    config["weight_sync"] |= {"store": str(tmp_path / "store"), "local_copy_dir": "/missing"}
    problems = roll.check(config).problems
    assert any("weight_sync.local_copy_dir '/missing' is not a directory" in problem for problem in problems)


@pytest.mark.vllm
async def test_store_run_vllm_generates_with_the_fetched_weights(servable_model: Path, tmp_path: Path):
    from safetensors.torch import load_file

    weights = load_file(servable_model / "model.safetensors")
    store = WeightStore(url=str(tmp_path / "store"), session="run", local_dir=str(tmp_path))
    sender = Sender()
    spec = EngineSpec(
        engine_id="engine", kind="vllm", model_path=str(servable_model), dtype="float32", max_context=96,
        max_num_seqs=4, kv_cache_bytes=8 * 2**20, num_threads=1, log_path=tmp_path / "engine.log",
    )  # fmt: skip
    engine = build_engine(spec)
    try:
        await engine.start()
        for version in range(2):
            for tensor in weights.values():
                tensor.view(torch.int32).view(-1)[::7] += version
            update = sender.stage(list_source(weights), version, "store", store)
            assert update is not None
            await engine.prefetch_weights(update)
            receipt = await engine.update_weights(update)
            assert receipt.checksums == sender.send()
            request = GenerationRequest(
                request_id=f"r{version}",
                token_ids=np.arange(4, 20, dtype=np.int32),
                sampling=SamplingParams(max_new_tokens=4),
            )
            assert set((await engine.generate(request)).policy_versions) == {version}
    finally:
        await engine.close()
        sender.close()


def list_source(weights: dict[str, torch.Tensor]) -> Any:
    class Source:
        def __iter__(self) -> Any:
            return iter(weights.items())

        def names(self) -> list[str]:
            return list(weights)

    return Source()
