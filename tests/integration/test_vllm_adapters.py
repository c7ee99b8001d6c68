"""LoRA adapters in a live vllm engine, against plain transformers with peft."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from worlds.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))
from families import FAMILIES, write_model
from test_vllm_engine import make_spec, request, until_running
from training_helpers import make_batch
from training_helpers import make_spec as make_trainer_spec

from roll.algorithms.losses import LikelihoodLoss
from roll.config.model import LoRAConfig
from roll.errors import DataError, WeightSyncError
from roll.inference import build_engine
from roll.inference.vllm import VLLMEngine
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import IntArray, WeightReceipt, WeightUpdate
from roll.weights.shared_memory import SharedMemorySender

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

LORA = LoRAConfig(
    rank=6,
    alpha=9.0,
    use_rslora=True,
    rank_pattern={"k_proj": 3, "layers.1.*up_proj": 8},
    alpha_pattern={"o_proj": 4.0},
)
PREFIX = np.random.default_rng(0).integers(4, 260, 64).astype(np.int32)


class Filled(list[tuple[str, torch.Tensor]]):
    """A source of given tensors."""

    def names(self) -> list[str]:
        return [name for name, _ in self]


class Trainer:
    """A trainer of one adapter, compared with peft with the adapter that the trainer exports."""

    def __init__(self, model: Path, place: Path, seed: int, lora: LoRAConfig = LORA) -> None:
        self.model, self.place, self.sender, self.num_exports = model, place, SharedMemorySender(), 0
        self.backend = TorchBackend(make_trainer_spec(model, lora=lora, learning_rate=0.02))
        self.change(seed)

    def change(self, seed: int) -> None:
        self.backend.train_step(make_batch(seed), LikelihoodLoss())
        self.num_exports += 1
        place = self.place / str(self.num_exports)
        self.backend.export(place / "model")
        base = load_causal_lm(self.model, "float32", attention="eager")
        self.network: Any = PeftModel.from_pretrained(base, place / "adapter")

    async def sync(self, engine: VLLMEngine, version: int, name: str | None = None) -> WeightReceipt:
        return await engine.update_weights(replace(self.offer(version), adapter=name))

    def offer(self, version: int, **changes: float) -> WeightUpdate:
        """An update; `changes` fills some of its tensors with a number."""
        source = self.backend.adapter_weights()
        if changes:
            source = Filled([(n, t if n not in changes else torch.full_like(t, changes[n])) for n, t in source])
        update = self.sender.stage(source, version)
        assert update is not None
        return update

    def logprobs(self, tokens: IntArray) -> np.ndarray:
        return compute_logprobs(self.network, tokens)


@torch.inference_mode()
def compute_logprobs(network: Any, tokens: IntArray) -> np.ndarray:
    """[L]; entry 0 is 0."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logprobs = network(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    return np.concatenate([[0.0], logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


def with_prefix(seed: int, length: int = 8) -> IntArray:
    return np.concatenate([PREFIX, np.random.default_rng(seed).integers(4, 260, length).astype(np.int32)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=128, tied=False, context_length=192)


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Trainer:
    return Trainer(model, tmp_path, 0)


async def start(model: Path, log: Path, lora: LoRAConfig = LORA, **changes: object) -> VLLMEngine:
    engine = build_engine(make_spec(model, log, lora=lora, **changes))
    assert isinstance(engine, VLLMEngine)
    await engine.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMEngine]:
    """An engine whose policy has an adapter."""
    engine = await start(model, tmp_path_factory.mktemp("logs") / "infer-0.log")
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VLLMEngine]:
    """An engine with two named adapters, whose policy is the model itself."""
    engine = await start(model, tmp_path_factory.mktemp("logs") / "infer-1.log", max_adapters=2)
    yield engine
    await engine.close()


async def test_vllm_adapters_requests_are_rejected_before_the_first_adapter(engine: VLLMEngine) -> None:
    with pytest.raises(WeightSyncError, match="has received no adapter yet: run a weight sync first"):
        await engine.generate(request("early"))
    with pytest.raises(WeightSyncError, match="has received no adapter yet"):
        await engine.logprobs([with_prefix(0)])


async def test_vllm_adapters_replacement_invalidates_the_prefix_cache(engine: VLLMEngine, trainer: Trainer) -> None:
    sequences, seen = [with_prefix(seed, 20) for seed in range(4)], []
    for version in (1, 2, 3):
        receipt = await trainer.sync(engine, version)
        assert (receipt.policy_version, receipt.adapter) == (version, None)
        assert set(receipt.checksums) == set(trainer.backend.adapter_weights().names())
        prompts = [with_prefix(seed) for seed in range(4)]
        made = await asyncio.gather(
            *(engine.generate(request(f"{version}-{i}", one, seed=i)) for i, one in enumerate(prompts))
        )
        for prompt, one in zip(prompts, made, strict=True):
            expected = trainer.logprobs(np.concatenate([prompt, one.token_ids]))[len(prompt) :]
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
            assert set(one.policy_versions) == {version}
        found = await engine.logprobs(sequences)
        for sequence, one in zip(sequences, found, strict=True):
            np.testing.assert_allclose(one, trainer.logprobs(sequence), atol=1e-5)
        seen.append(found[0])
        trainer.change(version)
    assert all(np.abs(a - b).max() > 1e-2 for a, b in zip(seen[1:], seen[:-1], strict=True))


async def test_vllm_adapters_running_request_continues_with_the_new_adapter(
    engine: VLLMEngine, trainer: Trainer
) -> None:
    await trainer.sync(engine, 1)
    prompt = with_prefix(9)
    call = asyncio.create_task(engine.generate(request("long", prompt, max_new_tokens=100)))
    await until_running(engine, 5)
    await engine.pause("keep")
    trainer.change(1)
    await trainer.sync(engine, 2)
    await engine.resume()
    made = await call
    versions = made.policy_versions
    assert set(versions) == {1, 2} and (np.diff(versions) >= 0).all()
    expected = trainer.logprobs(np.concatenate([prompt, made.token_ids]))[len(prompt) :]
    np.testing.assert_allclose(made.logprobs[versions == 2], expected[versions == 2], atol=1e-5)


async def test_vllm_adapters_rejected_update_keeps_the_old_adapter(engine: VLLMEngine, trainer: Trainer) -> None:
    await trainer.sync(engine, 1)
    before = await engine.generate(request("a"))
    update = trainer.offer(2)
    with pytest.raises(WeightSyncError, match=r"lora_B.weight' is missing from the update \(1 of 28 are missing\)"):
        await engine.update_weights(replace(update, manifest=update.manifest[:-1]))
    with pytest.raises(WeightSyncError, match=r"q_proj\.lora_A\.weight' has NaN or infinite values in float32: resume"):
        await engine.update_weights(trainer.offer(2, **{"model.layers.0.self_attn.q_proj.lora_A.weight": np.nan}))
    after = await engine.generate(request("a"))
    assert after.logprobs.tobytes() == before.logprobs.tobytes() and set(after.policy_versions) == {1}


async def test_vllm_adapters_each_row_of_a_batch_uses_its_adapter(
    shared: VLLMEngine, model: Path, tmp_path: Path
) -> None:
    trainers = {name: Trainer(model, tmp_path / name, seed) for seed, name in enumerate("xy")}
    for version, (name, each) in enumerate(trainers.items(), start=1):
        await each.sync(shared, version, name)
    base = load_causal_lm(model, "float32", attention="eager")
    rows = [
        replace(request(f"{i}", with_prefix(i % 2), seed=i), adapter="x--y-x-y"[i].strip("-") or None) for i in range(8)
    ]
    made = await asyncio.gather(*map(shared.generate, rows))
    for row, one in zip(rows, made, strict=True):
        network = base if row.adapter is None else trainers[row.adapter].network
        expected = compute_logprobs(network, np.concatenate([row.token_ids, one.token_ids]))[len(row.token_ids) :]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
        assert set(one.policy_versions) == {{None: 0, "x": 1, "y": 2}[row.adapter]}
    with pytest.raises(DataError, match="names the adapter 'z', which the engine has not received: sync it first"):
        await shared.generate(replace(request("z"), adapter="z"))
    with pytest.raises(WeightSyncError, match="'z' cannot be added: the engine has 2 adapters, its maximum"):
        await trainers["x"].sync(shared, 3, "z")


async def test_vllm_adapters_thousand_syncs_do_not_change_frozen_weights(
    shared: VLLMEngine, model: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model, tmp_path, 0)
    await trainer.sync(shared, 0, "x")
    before = await shared.generate(request("a"))
    for version in range(1, 1001):
        await trainer.sync(shared, version, "x")
    after = await shared.generate(request("a"))
    assert after.logprobs.tobytes() == before.logprobs.tobytes()
    adapted = await shared.generate(replace(request("b"), adapter="x"))
    assert set(adapted.policy_versions) == {1000}


@pytest.mark.slow
async def test_vllm_adapters_with_biases_equal_the_trainer(model: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, use_rslora=True)
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 256}
    path = write_model(tmp_path / "qwen2", model, FAMILIES["qwen2"], **sizes)
    trainer = Trainer(path, tmp_path, 0, lora)
    engine = await start(path, tmp_path / "log", lora)
    try:
        await trainer.sync(engine, 1)
        prompt = with_prefix(0)
        made = await engine.generate(request("a", prompt))
        expected = trainer.logprobs(np.concatenate([prompt, made.token_ids]))[len(prompt) :]
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-5)
        base = compute_logprobs(load_causal_lm(path, "float32", attention="eager"), prompt)
        assert np.abs(trainer.logprobs(prompt) - base).max() > 1e-2
    finally:
        await engine.close()
