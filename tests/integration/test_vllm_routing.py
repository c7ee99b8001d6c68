"""vLLM's routing comes token by token, through groups, batches, cached prefixes and aborts."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds.tiny_model import write_tiny_model

from roll.errors import ModelError, WeightSyncError
from roll.inference.vllm import VLLMEngine
from roll.types import Generation, GenerationRequest, IntArray

sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))
from families import FAMILIES, write_model

sys.path.append(str(Path(__file__).parent))
from test_vllm_engine import Policy, check_codes, make_spec, request, until_running, whole

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its experts' 48 inner columns are no multiple of 32, so that vLLM's CPU kernels pad them."""
    tokenizer = write_tiny_model(tmp_path_factory.mktemp("tokenizer"), hidden=128, tied=False, context_length=192)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "head_dim": 32, "intermediate_size": 64}
    return write_model(tmp_path_factory.mktemp("mixture") / "qwen", tokenizer, FAMILIES["qwen3-moe"], **sizes)


def chosen_by_transformers(network: torch.nn.Module, tokens: IntArray) -> np.ndarray:
    """[L, layers, k] of one plain forward pass, sorted."""
    with torch.inference_mode():
        found = network(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    return torch.stack([x.topk(2, dim=-1).indices.sort(-1).values for x in found.router_logits], dim=1).numpy()


def check(network: torch.nn.Module, asked: GenerationRequest, made: Generation) -> None:
    tokens = whole(asked.token_ids, made)
    assert made.experts is not None and made.experts.shape == (len(tokens), 2, 2) and made.experts.dtype == np.int8
    assert (made.experts[-1] == -1).all()
    np.testing.assert_array_equal(np.sort(made.experts[:-1], -1), chosen_by_transformers(network, tokens)[:-1])


def test_vllm_router_replay_every_token_has_the_choice_of_the_pass_that_made_it(mixture: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    long = rng.integers(4, 250, 80).astype(np.int32)  # two whole blocks of the cache, and a part
    asked = [request(f"g{i}", long, max_new_tokens=4 + 5 * i, seed=i) for i in range(6)]
    asked += [request(f"p{i}", np.concatenate([long[:70], [9 + i]]).astype(np.int32), seed=i) for i in range(3)]
    asked += [request(f"r{i}", rng.integers(4, 250, 3 + 9 * i).astype(np.int32), seed=i) for i in range(8)]

    async def play() -> None:
        engine = VLLMEngine(make_spec(mixture, tmp_path / "log", records_experts=True, max_num_seqs=6))
        await engine.start()
        try:
            policy = Policy(mixture)
            for one, made in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
                check(policy.model, one, made)
            again = request("cached", long, seed=11)  # its prompt is read from the cache alone
            check(policy.model, again, await engine.generate(again))
            await engine.logprobs([rng.integers(4, 250, 70).astype(np.int32)])

            cut = request("cut", long, max_new_tokens=100, seed=6)
            answer = asyncio.ensure_future(engine.generate(cut))
            await until_running(engine, 3)
            await engine.abort(["cut"])
            made = await answer
            assert made.finish_reason == "abort"
            check(policy.model, cut, made)
        finally:
            await engine.close()

    asyncio.run(play())


def test_vllm_router_replay_new_weights_of_experts_are_computed_with(mixture: Path, tmp_path: Path) -> None:
    """Twice, and after an update that broke off midway."""
    tokens = np.random.default_rng(1).integers(4, 250, 60).astype(np.int32)
    asked = request("again", tokens[:20], max_new_tokens=20)

    async def play() -> None:
        engine = VLLMEngine(make_spec(mixture, tmp_path / "log", records_experts=True))
        await engine.start()
        try:
            policy = Policy(mixture)
            for version in (1, 2, 3):
                policy.change(version)
                offer = policy.offer(version)
                if version == 2:
                    offer = replace(offer, handle=replace(offer.handle, num_bytes=offer.handle.num_bytes // 2))
                    with pytest.raises(WeightSyncError):
                        await engine.update_weights(offer)
                    continue
                await engine.update_weights(offer)
                (found,) = await engine.logprobs([tokens])
                np.testing.assert_allclose(found, policy.logprobs(tokens), atol=1e-4)
                check(policy.model, asked, await engine.generate(asked))
            await check_codes(engine, policy, mixture, "int8")
        finally:
            await engine.close()

    asyncio.run(play())


def test_vllm_router_replay_a_model_without_experts_is_refused_at_start(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "dense", hidden=128, tied=False, context_length=192)

    async def start() -> None:
        engine = VLLMEngine(make_spec(model, tmp_path / "log", records_experts=True))
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ModelError, match="router_replay 'engine'"):
        asyncio.run(start())
