"""New weights in a live hf engine: applied, proven, and visible in every token's policy version."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_helpers import Weights, generate_all, has_generated, prompt, reference_logprobs, request, running, same, sync
from safetensors.torch import load_file
from worlds.tiny_model import write_tiny_model

sys.path.append(str(Path(__file__).parents[1] / "training"))
from families import FAMILIES, write_model

from roll.errors import WeightSyncError
from roll.inference import hf_weights
from roll.models import list_linear_weights
from roll.weights import compute_checksum
from roll.weights.quantization import QuantizedWeights, dequantize, quantize

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of the tiny one's shape with other weights."""
    return write_tiny_model(tmp_path / "other", seed=1)


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
async def test_hf_weights_after_a_sync_the_engine_is_the_other_model(
    tiny_model: Path, other: Path, transport: str
) -> None:
    weights = load_file(other / "model.safetensors")
    async with running(tiny_model) as engine:
        before = await generate_all(engine, [request(f"{i}") for i in range(4)])
        receipt = await sync(engine, weights, 7, transport)
        after = await generate_all(engine, [request(f"{i}") for i in range(4)])
    async with running(other) as engine:
        expected = await generate_all(engine, [request(f"{i}") for i in range(4)])
    assert all(same(a, e) for a, e in zip(after, expected, strict=True))
    assert not any(same(a, b) for a, b in zip(after, before, strict=True))
    assert {v for g in before for v in g.policy_versions} == {0} and {v for g in after for v in g.policy_versions} == {
        7
    }
    assert (receipt.engine_id, receipt.policy_version) == ("e0", 7)
    assert receipt.checksums == {name: compute_checksum(tensor) for name, tensor in weights.items()}


async def test_hf_weights_of_another_dtype_are_cast(tiny_model: Path, other: Path) -> None:
    weights = load_file(other / "model.safetensors")
    async with running(tiny_model, dtype="bfloat16") as engine:
        await sync(engine, weights, 1)
        after = await engine.generate(request("a"))
    async with running(other, dtype="bfloat16") as engine:
        assert same(after, await engine.generate(request("a")))


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["tied llama", "mixtral"])
async def test_hf_weights_in_codes_make_it_the_model_that_is_read_back(
    tiny_model: Path, tmp_path: Path, family: str, form: str
) -> None:
    path = tiny_model
    if family in FAMILIES:
        path = write_model(tmp_path / "own", tiny_model, FAMILIES[family])
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    linear = list_linear_weights(str(path))
    back = {n: dequantize(*quantize(w, form), torch.bfloat16) if n in linear else w for n, w in weights.items()}
    async with running(path, dtype="bfloat16") as engine:
        before = await engine.generate(request("a"))
        await sync(engine, dict(QuantizedWeights(Weights(weights), form, linear)), 1)
        after = await engine.generate(request("a"))
        held = hf_weights._list_model_tensors(engine._decoder.model)  # type: ignore[union-attr]
        assert all(torch.equal(held[name], tensor) for name, tensor in back.items())
        await sync(engine, back, 2)
        again = await engine.generate(request("a"))
    assert after.logprobs.tobytes() == again.logprobs.tobytes() != before.logprobs.tobytes()


async def test_hf_weights_tied_weights_may_come_under_either_name_or_both(tiny_model: Path, other: Path) -> None:
    weights = load_file(other / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    answers = []
    async with running(tiny_model) as engine:
        for version, named in enumerate((("model.embed_tokens",), ("lm_head",), ("model.embed_tokens", "lm_head"))):
            offer = {name: tensor for name, tensor in weights.items() if "embed" not in name}
            await sync(engine, {**offer, **{f"{name}.weight": embedding for name in named}}, version)
            answers.append(await engine.generate(request("a")))
    assert same(answers[0], answers[1]) and same(answers[0], answers[2])


async def test_hf_weights_untied_weights_must_both_come(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "untied", tied=False)
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    async with running(model) as engine:
        with pytest.raises(WeightSyncError, match=r"'lm_head\.weight' is missing"):
            await sync(engine, weights, 1)


async def test_hf_weights_tokens_made_before_and_after_a_sync_carry_their_versions(
    tiny_model: Path, other: Path
) -> None:
    weights = load_file(other / "model.safetensors")
    async with running(tiny_model) as engine:
        undisturbed = await engine.generate(request("a", max_new_tokens=40))
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=40)))
        await has_generated(engine, 10)
        await engine.pause("keep")
        await sync(engine, weights, 3)
        await engine.resume()
        result = await task
    changed = int((result.policy_versions == 0).sum())
    assert 10 <= changed < 40 and result.policy_versions.tolist() == [0] * changed + [3] * (40 - changed)
    assert result.token_ids[:changed].tolist() == undisturbed.token_ids[:changed].tolist()
    assert result.logprobs[:changed].tobytes() == undisturbed.logprobs[:changed].tobytes()
    # The first token after the change: the old cache under the new weights, so neither model's own answer.
    assert result.logprobs[changed:].tobytes() != undisturbed.logprobs[changed:].tobytes()


async def test_hf_weights_a_sync_without_a_pause_falls_between_two_tokens(tiny_model: Path, other: Path) -> None:
    async with running(tiny_model) as engine:
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=60)))
        await has_generated(engine, 5)
        await sync(engine, load_file(other / "model.safetensors"), 1)
        versions = (await task).policy_versions
    assert (np.diff(versions) >= 0).all() and set(versions.tolist()) == {0, 1}


async def test_hf_weights_log_probs_come_from_the_current_weights(tiny_model: Path, other: Path) -> None:
    tokens = prompt(1, 30)
    async with running(tiny_model) as engine:
        (before,) = await engine.logprobs([tokens])
        await sync(engine, load_file(other / "model.safetensors"), 1)
        (after,) = await engine.logprobs([tokens])
    assert np.abs(before - reference_logprobs(tiny_model, tokens)).max() < 1e-4
    assert np.abs(after - reference_logprobs(other, tokens)).max() < 1e-4


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
async def test_hf_weights_a_wrong_offer_is_refused_with_the_tensors_name(
    tiny_model: Path, other: Path, fault: str
) -> None:
    weights = load_file(other / "model.safetensors")
    tensor = weights.pop(NAME)
    name = f"model.layers.9.{NAME}" if fault == "unknown" else NAME
    if fault != "missing":
        weights[name] = tensor.T.contiguous() if fault == "shape" else tensor
    async with running(tiny_model) as engine:
        with pytest.raises(WeightSyncError, match=f"'{name}'"):
            await sync(engine, weights, 1)
        with pytest.raises(WeightSyncError, match="policy version 1 failed"):
            await engine.generate(request("a"))
        await sync(engine, load_file(other / "model.safetensors"), 2)
        assert set((await engine.generate(request("a"))).policy_versions.tolist()) == {2}


@pytest.mark.parametrize("linear", [(), (NAME,)])
async def test_hf_weights_a_layer_that_arrived_but_was_not_applied_is_caught(
    tiny_model: Path, other: Path, monkeypatch: pytest.MonkeyPatch, linear: tuple[str, ...]
) -> None:
    weights, live_tensors = load_file(other / "model.safetensors"), hf_weights._list_model_tensors
    calls = 0

    def with_a_stale_copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """As if one layer were written to a copy of the weights, not to those that the model computes with."""
        nonlocal calls
        calls += 1
        tensors = live_tensors(model)  # type: ignore[arg-type]
        if calls == 1:
            tensors[NAME] = tensors[NAME].clone()
            tensors = {**tensors}
        return tensors

    monkeypatch.setattr(hf_weights, "_list_model_tensors", with_a_stale_copy)
    async with running(tiny_model) as engine:
        with pytest.raises(WeightSyncError, match=f"'{NAME}' of policy version 4 was received, but the model contains"):
            await sync(engine, dict(QuantizedWeights(Weights(weights), "int8", linear)), 4)


async def test_hf_weights_not_a_number_arrives_as_sent(tiny_model: Path, other: Path) -> None:
    weights = load_file(other / "model.safetensors")
    weights[NAME][0, 0] = float("nan")
    async with running(tiny_model) as engine:
        receipt = await sync(engine, weights, 1)  # bytes are compared, so NaN equals itself
    assert receipt.checksums[NAME] == compute_checksum(weights[NAME])


async def test_hf_weights_sleep_frees_the_memory_and_kept_requests_go_on_after_the_sync(tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    async with running(tiny_model) as engine:
        undisturbed = await engine.generate(request("a", max_new_tokens=40))
        task = asyncio.create_task(engine.generate(request("a", max_new_tokens=40)))
        await has_generated(engine, 5)
        await engine.pause("keep")
        await engine.sleep()
        await engine.sleep()
        decoder = engine._decoder
        assert decoder is not None
        assert sum(p.numel() for p in decoder.model.parameters()) == 0 and not decoder._cache._layers
        with pytest.raises(WeightSyncError, match=r"wake\(\)"):
            await sync(engine, weights, 1)
        await engine.wake()
        for call in (engine.resume, lambda: engine.generate(request("b")), lambda: engine.logprobs([prompt(1)])):
            with pytest.raises(WeightSyncError, match="asleep"):
                await call()
        await sync(engine, weights, 1)
        await engine.resume()
        result = await task
    assert result.token_ids.tolist() == undisturbed.token_ids.tolist()  # same weights: same tokens, cache recomputed
    assert np.abs(result.logprobs - undisturbed.logprobs).max() < 1e-5
    assert sorted(set(result.policy_versions.tolist())) == [0, 1]
    assert decoder.model.get_output_embeddings().weight is decoder.model.get_input_embeddings().weight
