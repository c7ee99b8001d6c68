"""vLLM engines that compute in 8 bits, against a trainer, and against products that are computed here."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor, nn
from worlds.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parent))
from test_vllm_engine import make_spec, request

from roll.algorithms.losses import PolicyLoss
from roll.cluster.local import LocalTrainerGroup
from roll.config.model import ModelConfig
from roll.config.operations import WeightSyncConfig
from roll.config.training import TrainingConfig
from roll.errors import WeightSyncError
from roll.inference import build_engine
from roll.inference.vllm import VLLMEngine
from roll.models import load_causal_lm
from roll.training import TrainerSpec, engine_weights
from roll.types import IntArray, TrainingBatch, TrainingSample
from roll.weights import SyncReport, WeightSync, compute_checksum

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROBE = [np.random.default_rng(seed).integers(4, 260, 60).astype(np.int32) for seed in range(4)]
LEARNING_RATE = 1e-3  # in bfloat16, smaller steps are lost to rounding
CAN_READ_INT8 = torch.cpu._is_amx_tile_supported()  # oneDNN, which is used without AMX, does not return its codes
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class OneEngine:
    """An `EngineGroup` of one engine."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engines = [engine]

    def list_awake(self) -> list[VLLMEngine]:
        return self.engines


class Bench:
    """A trainer and one engine."""

    def __init__(self, trainer: LocalTrainerGroup, engine: VLLMEngine) -> None:
        self.trainer, self.engine, self.version = trainer, engine, 0
        engines: Any = OneEngine(engine)
        self.sync = WeightSync(
            trainer, engines, WeightSyncConfig(), probe=PROBE, transport="shared_memory", computes_in_8_bits=True
        )

    async def step(self) -> SyncReport:
        """One optimizer step, and a sync."""
        rng = np.random.default_rng(self.version)
        mask = np.arange(24) >= 8
        samples = [
            TrainingSample(
                sample_id=str(index),
                unit=index,
                prefix_length=8,
                token_ids=rng.integers(4, 260, 24).astype(np.int32),
                loss_mask=mask,
                advantages=np.where(mask, 1.0 - 2.0 * (index % 2), 0.0).astype(np.float32),
                rollout_logprobs=np.zeros(24, dtype=np.float32),
            )
            for index in range(4)
        ]
        assert (await self.trainer.train_step(TrainingBatch(samples=tuple(samples)), PolicyLoss())).stepped
        self.version += 1
        return await self.sync.push(self.version)

    def weights(self) -> dict[str, Tensor]:
        """The trainer's current weights."""
        return {name: weight.detach().clone() for name, weight in self.trainer._backend.weights()}


def quantize_afresh(weights: Mapping[str, Tensor], form: str) -> dict[str, int]:
    """Checksums of codes and scales of the linear layers, computed without the library's quantization."""
    found = {}
    for name, weight in weights.items():
        if name.split(".")[-2] not in PROJECTIONS:
            continue
        values = weight.float().numpy()
        scales = np.abs(values).max(1, keepdims=True) / np.float32(127 if form == "int8" else 448)
        shares = torch.from_numpy(values / scales)
        codes = shares.round().to(torch.int8) if form == "int8" else shares.to(torch.float8_e4m3fn)
        found |= {name: compute_checksum(codes), f"{name}_scale": compute_checksum(torch.from_numpy(scales))}
    return found


class Product8Bit(nn.Module):
    """A linear layer whose weights and activations are rounded to 8 bits, by channel and by token."""

    def __init__(self, layer: nn.Linear, form: str) -> None:
        super().__init__()
        self.form, self.bias = form, layer.bias
        self.weight = self.round(layer.weight.detach().float())

    def round(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(-1, keepdim=True) / (127 if self.form == "int8" else 448)
        shares = x / scales
        return scales * (shares.round() if self.form == "int8" else shares.to(torch.float8_e4m3fn).float())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.round(x.float()), self.weight, self.bias).to(x.dtype)


@torch.inference_mode()
def compute_logprobs(model: Path, weights: Mapping[str, Tensor], tokens: IntArray, form: str) -> np.ndarray:
    """Log-probs [L - 1] of a model in bfloat16 whose linear layers compute in `form`."""
    network = load_causal_lm(model, torch.bfloat16)
    network.load_state_dict(dict(weights), strict=False)
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            if name in PROJECTIONS and isinstance(layer, nn.Linear) and form != "none":
                setattr(parent, name, Product8Bit(layer, form))
    ids = torch.from_numpy(tokens.astype(np.int64))
    logprobs = network(input_ids=ids[None]).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=128, context_length=192, tied=False)


async def open_bench(model: Path, log: Path, form: str, **changes: object) -> Bench:
    spec = TrainerSpec(
        model_path=str(model),
        model=ModelConfig(path=str(model), dtype="bfloat16"),
        training=TrainingConfig(num_steps=10, learning_rate=LEARNING_RATE, num_threads=1),
        quantization=form,  # type: ignore[arg-type]
        seed=0,
    )
    engine = build_engine(make_spec(model, log, dtype="bfloat16", quantization=form, **changes))
    assert isinstance(engine, VLLMEngine)
    await engine.start()
    return Bench(await LocalTrainerGroup.start(spec), engine)


@pytest_asyncio.fixture(loop_scope="module")
async def benches(model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Bench] = []

    async def make(form: str, **changes: object) -> Bench:
        opened.append(await open_bench(model, tmp_path / f"{form}.log", form, **changes))
        return opened[-1]

    yield make
    for bench in opened:
        await bench.engine.close()
        await bench.trainer.close()


@pytest.mark.parametrize("form", ["int8", "fp8"])
async def test_vllm_quantized_engine_has_the_quantized_trainer_weights_after_each_sync(
    benches: Callable[..., Any], model: Path, form: str
) -> None:
    bench = await benches(form)
    is_readable = form == "fp8" or CAN_READ_INT8
    first = quantize_afresh(bench.weights(), form)
    assert len(first) == 2 * 2 * len(PROJECTIONS)
    read = await bench.engine.applied_checksums()
    assert read == (first if is_readable else {}), "it quantizes the files that it starts with"
    seen = [first]
    for version in (1, 2, 3):
        report = await bench.step()
        weights = bench.weights()
        held = await bench.engine.applied_checksums()
        assert held == (quantize_afresh(weights, form) if is_readable else {})
        assert all(held[name] != before[name] for before in seen for name in held if name.endswith("weight"))
        assert report.num_read_back == len(held)
        seen.append(held)
        result = report.probe["engine-0"]
        assert not result.problem and 0 < result.mean_abs < 0.3
        generation = await bench.engine.generate(request(f"of-{version}"))
        assert generation.policy_versions.tolist() == [version] * 12
    (scores,) = await bench.engine.logprobs([PROBE[0]])
    apart = {
        other: np.abs(scores[1:] - compute_logprobs(model, weights, PROBE[0], other)).mean()
        for other in ("none", "int8", "fp8")
    }
    assert min(apart, key=apart.__getitem__) == form, f"activations are not in {form}: {apart}"


async def test_vllm_quantized_engine_with_old_codes_is_detected(
    benches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    path = [str(Path(__file__).parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, path)))
    bench = await benches("int8", options={"worker_extension_cls": "stale_receiver.StaleReceiver"})
    await bench.step()
    before = await bench.engine.applied_checksums()
    by_bytes = r"engine-0.*different bytes than it received for 28 tensors: 'model\.layers\.0"
    by_probe = r"engine-0.*every tensor arrived as sent, but its log-probs differ from the trainer's"
    with pytest.raises(WeightSyncError, match=by_bytes if CAN_READ_INT8 else by_probe):
        await bench.step()
    assert await bench.engine.applied_checksums() == before != quantize_afresh(bench.weights(), "int8")


class KeptWeights(list[tuple[str, Tensor]]):
    """A source of the same tensors at every sync."""

    def names(self) -> list[str]:
        return [name for name, _ in self]


async def test_vllm_quantized_engine_with_old_codes_differs_from_the_trainer(
    benches: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the trainer quantizes once, and sends the same codes at the second sync."""
    bench = await benches("fp8")
    await bench.step()
    assert await bench.engine.applied_checksums() == quantize_afresh(bench.weights(), "fp8")
    source = engine_weights.build_engine_weights(bench.trainer._backend, bench.trainer._spec)
    kept = KeptWeights([(name, tensor.clone()) for name, tensor in source])
    monkeypatch.setattr(engine_weights, "build_engine_weights", lambda *_: kept)
    for _ in range(2):
        await bench.step()
    assert await bench.engine.applied_checksums() != quantize_afresh(bench.weights(), "fp8")
