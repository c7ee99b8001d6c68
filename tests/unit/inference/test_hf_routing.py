"""The engine says of every token which experts its routers chose, whoever computed it."""

from __future__ import annotations

import asyncio
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_helpers import engine_spec, generate_all, has_generated, prompt, request, running, sync
from safetensors.torch import load_file

from roll.errors import ModelError
from roll.inference.hf_decoder import Decoder
from roll.inference.hf_routing import reuse_first_pass
from roll.models import find_routers, load_causal_lm
from roll.types import Generation, GenerationRequest, IntArray

sys.path.append(str(Path(__file__).parents[1] / "training"))
from families import FAMILIES, write_model


@pytest.fixture(scope="module")
def mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "qwen", tiny_model, FAMILIES["qwen3-moe"])


@functools.cache
def plain(model: Path) -> Any:
    return load_causal_lm(model, "float32", attention="eager")


def chosen_by_transformers(model: Path, tokens: IntArray) -> np.ndarray:
    """[L, layers, k] of one plain forward pass, sorted."""
    network = plain(model)
    with torch.inference_mode():
        logits = network(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True)
    return torch.stack([x.topk(2, dim=-1).indices.sort(-1).values for x in logits.router_logits], dim=1).numpy()


def check(model: Path, asked: GenerationRequest, made: Generation) -> None:
    tokens = np.concatenate([asked.token_ids, made.token_ids])
    assert made.experts is not None and made.experts.shape == (len(tokens), 2, 2) and made.experts.dtype == np.int8
    assert (made.experts[-1] == -1).all()
    np.testing.assert_array_equal(np.sort(made.experts[:-1], -1), chosen_by_transformers(model, tokens)[:-1])


@pytest.mark.parametrize("admission", ["wave", pytest.param("continuous", marks=pytest.mark.slow)])
def test_hf_router_replay_choices_are_the_model_s_own_in_groups_batches_and_shared_prompts(
    mixture: Path, admission: str
) -> None:
    """Ten requests for four rows, five of one prompt, of several lengths."""
    shared = prompt(3)
    asked = [request(f"g{i}", shared, max_new_tokens=3 + 2 * i) for i in range(5)]
    asked += [request(f"r{i}", max_new_tokens=5 + i) for i in range(4)] + [request("one", prompt(1, 1))]

    async def play() -> list[Generation]:
        options = {"admission": admission}
        async with running(mixture, max_num_seqs=4, records_experts=True, options=options) as engine:
            return await generate_all(engine, asked)

    for one, made in zip(asked, asyncio.run(play()), strict=True):
        check(mixture, one, made)


def test_hf_router_replay_what_was_chosen_before_new_weights_stays(mixture: Path) -> None:
    """Tokens of the first weights keep their choices, also where the cache is computed again."""
    asked = request("a", max_new_tokens=12)
    tensors = load_file(mixture / "model.safetensors")
    moved = {name: -x if name.endswith("gate.weight") else x for name, x in tensors.items()}

    async def play() -> Generation:
        async with running(mixture, records_experts=True) as engine:
            answer = asyncio.ensure_future(engine.generate(asked))
            await has_generated(engine, 5)
            await engine.pause("keep")
            await engine.sleep()
            await engine.wake()
            await sync(engine, moved, 1)
            await engine.resume()
            return await answer

    made = asyncio.run(play())
    tokens = np.concatenate([asked.token_ids, made.token_ids])
    before = int((made.policy_versions == 0).sum())
    assert made.experts is not None and 5 <= before < 12
    kept = len(asked.token_ids) + before - 1
    expected = chosen_by_transformers(mixture, tokens)
    np.testing.assert_array_equal(np.sort(made.experts[:kept], -1), expected[:kept])
    assert (np.sort(made.experts[kept:-1], -1) != expected[kept:-1]).any() and (made.experts[kept:-1] >= 0).all()


def test_hf_router_replay_a_model_without_experts_is_refused_at_start(tiny_model: Path) -> None:
    async def start() -> None:
        async with running(tiny_model, records_experts=True):
            pass

    with pytest.raises(ModelError, match="has no router"):
        asyncio.run(start())


def test_hf_router_replay_passes_over_parts_use_the_experts_of_the_whole(mixture: Path) -> None:
    """Though the routers' weights have changed; afterwards routers choose by themselves."""
    network = load_causal_lm(mixture, "float32", attention="eager")
    tokens = torch.from_numpy(prompt(5).astype(np.int64))[None]
    with torch.inference_mode():
        with reuse_first_pass(network):
            whole = network(input_ids=tokens).logits
            for router in find_routers(network):
                router.weight.neg_()
            torch.testing.assert_close(network(input_ids=tokens[:, :7]).logits, whole[:, :7])
        assert not torch.allclose(network(input_ids=tokens).logits, whole, atol=0.1)


def test_hf_router_replay_a_mixture_in_bfloat16_is_not_refused_for_its_own_rounding(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Whose last expert is another one when a token is decoded, which moved its logits by a standard deviation."""
    sizes = {
        "num_experts": 8,
        "num_local_experts": 8,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    model = write_model(tmp_path / "qwen", tiny_model, FAMILIES["qwen3-moe"], **sizes)
    made = Decoder(engine_spec(model, dtype="bfloat16", records_experts=True), torch.device("cpu"))
    assert made.vocab_size == 260
