"""An engine that computes less exactly than the trainer chooses other experts; replayed, they differ less."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.inference import EngineSpec, build_engine
from roll.pipelines.learning.engine_routing import engine_routing
from roll.training import TorchBackend
from roll.types import Generation, GenerationRequest, SamplingParams, TrainingBatch, TrainingSample

sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))
from families import FAMILIES, write_model
from training_helpers import make_spec

pytestmark = pytest.mark.slow


def close_routers(path: Path) -> None:
    """Let every router's experts be nearly as good as each other, so that rounding decides between them."""
    tensors = load_file(path / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("gate.weight"):
            tensors[name] = (weight[:1] + 0.02 * weight).contiguous()
        elif "experts" in name:
            tensors[name] = weight * 8
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_log_probs_of_engine_and_trainer_come_nearer(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "num_local_experts": 16, "num_hidden_layers": 4}
    path = write_model(tmp_path / "qwen", tiny_model, FAMILIES["qwen3-moe"], **sizes)
    close_routers(path)
    prompts = [np.random.default_rng(i // 4).integers(4, 260, 24).astype(np.int32) for i in range(16)]

    async def play() -> list[Generation]:
        engine = build_engine(
            EngineSpec(
                engine_id="e", kind="hf", model_path=str(path), dtype="bfloat16", max_context=96, num_threads=1,
                records_experts=True,
            )
        )  # fmt: skip
        await engine.start()
        try:
            sampling = [SamplingParams(max_new_tokens=40, seed=i) for i in range(len(prompts))]
            asked = [
                GenerationRequest(request_id=str(i), token_ids=p, sampling=s)
                for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
            ]
            return list(await asyncio.gather(*map(engine.generate, asked)))
        finally:
            await engine.close()

    made = asyncio.run(play())
    samples = tuple(
        TrainingSample(
            sample_id=str(i),
            unit=i // 4,
            token_ids=np.concatenate([prompt, answer.token_ids]),
            loss_mask=np.arange(len(prompt) + len(answer.token_ids)) >= len(prompt),
            rollout_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), answer.logprobs]),
            experts=answer.experts,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, made, strict=True))
    )
    batch = TrainingBatch(samples=samples, temperature=1.0)
    plain = replace(batch, samples=tuple(replace(s, experts=None) for s in samples))
    backend = TorchBackend(make_spec(path))
    with torch.no_grad():
        own = backend.forward(plain, ["logprobs", "experts"])
        replayed = backend.forward(batch, ["logprobs"])["logprobs"]
    found = engine_routing(batch, (own["logprobs"], own["experts"]), replayed)
    print({name: round(value, 5) for name, value in found.items()})
    assert found["agreement/replayed_share"] == 1.0 and found["agreement/experts_alike"] < 0.99
    for figure in ("logprob_mean_abs", "divergence"):
        before, after = (found[f"agreement/{name}/{figure}"] for name in ("own_routing", "engine_routing"))
        assert after < before / 2, (figure, before, after)
