"""Weight syncs that train the vision tower: the engines compute with its new weights, also for images seen before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from worlds.vision_batches import media_batch
from worlds.vision_models import VisionWorld, write_vision_model

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import ModelConfig
from roll.config.operations import WeightSyncConfig
from roll.config.training import TrainingConfig
from roll.errors import WeightSyncError
from roll.inference import EngineSpec, build_engine
from roll.inference.hf import HFEngine
from roll.models.multimodal import model_media
from roll.protocols import InferenceEngine
from roll.training import TrainerSpec
from roll.types import GenerationRequest, IntArray, MediaSpan, SamplingParams, WeightReceipt, WeightUpdate
from roll.weights import WeightSync
from roll.weights.probe import build_probe_batch

PROMPTS = (
    ("{} and {}, what is different?", (0, 1)),
    ("{} and {}, what is different?", (1, 0)),
    ("the last one: {} again", (2,)),
    ("no image at all", ()),
    ("{} ab {} cd {} ef", (3, 2, 3)),
)
"""Texts and the numbers of their images; all images occur several times."""
LEARNING_RATE = 3e-3


class Engines:
    """A group of one engine."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engines = [engine]

    def list_awake(self) -> list[InferenceEngine]:
        return self.engines


class Bench:
    """A trainer and one engine of a vision-language model."""

    def __init__(self, world: VisionWorld, trainer: LocalTrainerGroup, engine: Any) -> None:
        self.world, self.trainer, self.engine = world, trainer, engine
        self.version = 0
        self.prompts = [world.prompt(text, *images) for text, images in PROMPTS]
        self.sync = self.open_sync(0)

    def open_sync(self, probe_every_num_steps: int) -> WeightSync:
        settings = WeightSyncConfig(transport="shared_memory", probe_every_num_steps=probe_every_num_steps)
        tokens, media = zip(*self.prompts, strict=True)
        return WeightSync(self.trainer, Engines(self.engine), settings, probe=tokens, probe_media=media)  # type: ignore[arg-type]

    def copy_tower(self) -> dict[str, torch.Tensor]:
        weights = self.trainer._backend.weights()
        return {name: tensor.clone() for name, tensor in weights if "vision" in name or "visual" in name}

    async def train(self) -> None:
        """Take one step of the optimizer, which changes the tower."""
        before = self.copy_tower()
        result = await self.trainer.train_step(media_batch(self.world), PolicyLoss())
        assert result.stepped
        after = self.copy_tower()
        assert sum(not tensor.equal(after[name]) for name, tensor in before.items()) > 10

    async def push(self) -> None:
        self.version += 1
        await self.sync.push(self.version)

    async def measure_difference(self) -> float:
        """Return the largest difference between the log-probs of engine and trainer, with every image asked twice."""
        tokens = [tokens for tokens, _ in self.prompts] * 2
        media = [media for _, media in self.prompts] * 2
        own = await self.engine.logprobs(tokens, media)
        scored = await self.trainer.forward(build_probe_batch(tokens, media), ["logprobs"])
        pairs = zip(own, scored["logprobs"], strict=True)
        return max(float(np.abs(one[1:] - other[1:]).max()) for one, other in pairs)

    async def generate(self, number: int, name: str, num_tokens: int = 8) -> Any:
        tokens, media = self.prompts[number]
        sampling = SamplingParams(max_new_tokens=num_tokens, seed=number)
        return await self.engine.generate(
            GenerationRequest(request_id=name, token_ids=tokens, media=media, sampling=sampling)
        )

    def compute_sampled(self, token_ids: IntArray, media: tuple[MediaSpan, ...]) -> np.ndarray:
        """Return the log-probs [L - 1] that an engine must sample with, by transformers, from the trainer's weights."""
        model = transformers.AutoModelForImageTextToText.from_pretrained(self.world.model, dtype=torch.float32).eval()
        changed = dict(self.trainer._backend.model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(changed[name])
            return self.world.reference_logprobs(model, token_ids, media, sampled=True).numpy()


@pytest.fixture(name="open_bench")
async def _open_bench(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Bench] = []

    async def make(name: str, kind: str, build: Callable[[EngineSpec], Any] = build_engine) -> Bench:
        model = write_vision_model(tmp_path / "model", name, heads=2)
        world = VisionWorld.create(model, tmp_path / "media")
        spec = TrainerSpec(
            model_path=str(model),
            model=ModelConfig(path=str(model), dtype="float32"),
            training=TrainingConfig(num_steps=10, learning_rate=LEARNING_RATE, num_threads=1),
            seed=0,
            media_dir=world.store.directory,
        )
        trainer = await LocalTrainerGroup.start(spec)
        engine = build(
            EngineSpec(
                engine_id="engine",
                kind=kind,
                model_path=str(model),
                dtype="float32",
                max_context=200,
                max_num_seqs=8,
                kv_cache_bytes=32 * 2**20,
                num_threads=1,
                media_dir=world.store.directory,
                log_path=tmp_path / "engine.log",
            )
        )
        await engine.start()
        opened.append(Bench(world, trainer, engine))
        return opened[-1]

    yield make
    for bench in opened:
        await bench.engine.close()
        await bench.trainer.close()


async def check_syncs(bench: Bench) -> None:
    assert await bench.measure_difference() < 1e-4
    bench.sync = bench.open_sync(1)
    await bench.push()
    for _ in range(3):
        await bench.train()
        assert await bench.measure_difference() > 0.1  # the step is large enough to be seen
        await bench.push()
        assert await bench.measure_difference() < 1e-4
        for number in (0, 4, 0):
            tokens, media = bench.prompts[number]
            answer = await bench.generate(number, "generated")
            whole = np.concatenate([tokens, answer.token_ids])
            expected = bench.compute_sampled(whole, media)[len(tokens) - 1 :]
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl", "gemma3"])
async def test_media_sync_hf_engine_follows_a_trained_tower(open_bench: Callable[..., Any], name: str) -> None:
    await check_syncs(await open_bench(name, "hf"))


class StaleTower(HFEngine):
    """Confirms every update, but keeps the old weights of the vision tower."""

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        assert self._decoder is not None
        held = self._decoder.model.state_dict()
        old = {name: tensor.clone() for name, tensor in held.items() if "vision_model" in name}
        receipt = await super().update_weights(update)
        for name, tensor in old.items():
            held[name].copy_(tensor)
        return receipt


async def test_media_sync_a_stale_tower_is_found_by_the_probe(open_bench: Callable[..., Any]) -> None:
    bench = await open_bench("smolvlm", "hf", StaleTower)
    bench.sync = bench.open_sync(1)
    await bench.push()
    await bench.train()
    with pytest.raises(WeightSyncError, match="engine 'engine': every tensor arrived as sent, but its log-probs"):
        await bench.push()


async def test_media_sync_cached_features_of_the_old_tower_are_found_by_the_probe(
    open_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await open_bench("smolvlm", "hf")
    cached: dict[int, Any] = {}
    encode, engine_model = model_media.encode_media, bench.engine._decoder.model

    def encode_once(model: Any, media: Any, device: Any, dtype: Any) -> Any:
        if model is not engine_model:
            return encode(model, media, device, dtype)
        for image in media:
            if id(image) not in cached:
                cached[id(image)] = encode(model, [image], device, dtype)[0]
        return [cached[id(image)] for image in media]

    monkeypatch.setattr(model_media, "encode_media", encode_once)
    bench.sync = bench.open_sync(1)
    await bench.push()
    await bench.train()
    with pytest.raises(WeightSyncError, match="engine 'engine': every tensor arrived as sent, but its log-probs"):
        await bench.push()


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_media_sync_vllm_engine_follows_a_trained_tower(open_bench: Callable[..., Any]) -> None:
    bench = await open_bench("smolvlm", "vllm")
    await check_syncs(bench)
    await check_running_request(bench)
    await check_fault(bench)


async def check_running_request(bench: Bench) -> None:
    """A request that runs during a sync continues with the features of the new tower.

    Its prompt was answered before, so vLLM first computed it from the prefix cache, without the pixels of its images.
    """
    tokens, media = bench.prompts[0]
    await bench.train()
    running = asyncio.create_task(bench.generate(0, "running", 60))
    steps = bench.engine.load().num_steps
    while bench.engine.load().num_steps < steps + 5:
        await asyncio.sleep(0.001)
    await bench.push()
    answer = await running
    new = answer.policy_versions == bench.version
    assert new.any() and not new.all()
    whole = np.concatenate([tokens, answer.token_ids])
    expected = bench.compute_sampled(whole, media)[len(tokens) - 1 :]
    np.testing.assert_allclose(answer.logprobs[new], expected[new], atol=1e-4)
    assert np.abs(answer.logprobs[~new] - expected[~new]).max() > 0.05


async def check_fault(bench: Bench) -> None:
    """Without a reset of vLLM's encoder cache, the probe finds features of the old tower."""

    async def do_nothing() -> None:
        pass

    bench.engine._llm.reset_encoder_cache = do_nothing
    await bench.train()
    with pytest.raises(WeightSyncError, match="engine 'engine': every tensor arrived as sent, but its log-probs"):
        await bench.push()
    assert await bench.measure_difference() > 0.1
    del bench.engine._llm.reset_encoder_cache
    await bench.push()
    assert await bench.measure_difference() < 1e-4


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_media_sync_vllm_that_computes_images_causally_is_refused_by_the_probe(
    open_bench: Callable[..., Any],
) -> None:
    """The images of Gemma 3 attend in both directions, but not in vLLM on a CPU. No code names the model."""
    bench = await open_bench("gemma3", "vllm")
    bench.sync = bench.open_sync(1)
    with pytest.raises(WeightSyncError, match="engine 'engine': every tensor arrived as sent, but its log-probs"):
        await bench.push()
    assert await bench.measure_difference() > 0.1
