"""Adapters in a live hf engine: those of the trainer, one per row, replaced while requests run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_helpers import Weights, generate_all, has_generated, prompt, reference_logprobs, request, running, same, send
from peft import PeftModel

sys.path.append(str(Path(__file__).parents[1] / "training"))
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import LikelihoodLoss
from roll.config.model import LoRAConfig
from roll.errors import DataError, UnsupportedError, WeightSyncError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import WeightReceipt
from roll.weights.adapters import check_adapter_manifest
from roll.weights.plan import describe_tensor

LORA = LoRAConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj", "down_proj"])
VARIANTS = {
    "plain": LORA,
    "patterns": LORA.model_copy(
        update={"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    ),
    "dora": LORA.model_copy(update={"use_dora": True, "target_modules": "all-linear"}),
}
TEXT = prompt(5, 80)


def train(backend: TorchBackend, seed: int) -> TorchBackend:
    backend.train_step(make_batch(seed), LikelihoodLoss())
    return backend


def build(model: Path, lora: LoRAConfig = LORA, **settings: Any) -> TorchBackend:
    return train(TorchBackend(make_spec(model, lora=lora, learning_rate=0.02, **settings)), 0)


async def sync(engine: Any, backend: TorchBackend, version: int, name: str | None = None) -> WeightReceipt:
    return await send(engine, backend.adapter_weights(), version, adapter=name)


def peft_logprobs(backend: TorchBackend, model: Path, place: Path, tokens: np.ndarray) -> np.ndarray:
    """[L] of plain transformers with the exported adapter; entry 0 is 0."""
    backend.export(place / "model")
    network = PeftModel.from_pretrained(load_causal_lm(model, "float32", attention="eager"), place / "adapter")
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        logprobs = network(input_ids=ids[None]).logits[0].double().log_softmax(-1)
    return np.concatenate([[0.0], logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()])


@pytest.mark.parametrize("variant", list(VARIANTS))
async def test_hf_adapters_equal_peft_after_each_sync(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    backend = build(tiny_model, VARIANTS[variant])
    async with running(tiny_model, lora=VARIANTS[variant]) as engine:
        base, seen = reference_logprobs(tiny_model, TEXT), []
        for version in (1, 2, 3):
            receipt = await sync(engine, backend, version)
            assert (receipt.policy_version, receipt.adapter) == (version, None)
            assert set(receipt.checksums) == set(backend.adapter_weights().names())
            (found,) = await engine.logprobs([TEXT])
            expected = peft_logprobs(backend, tiny_model, tmp_path / str(version), TEXT)
            np.testing.assert_allclose(found, expected, atol=1e-5)
            seen.append(found)
            made = await engine.generate(request("a", TEXT[:64]))  # the prefix of all versions is the same
            whole = np.concatenate([TEXT[:64], made.token_ids])
            again = peft_logprobs(backend, tiny_model, tmp_path / f"{version}b", whole)[64:]
            np.testing.assert_allclose(made.logprobs, again, atol=1e-5)
            assert set(made.policy_versions) == {version}
            train(backend, version)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in ((base, seen[0]), (seen[0], seen[1]), (seen[1], seen[2])))


async def test_hf_adapters_each_row_of_a_batch_uses_its_adapter(tiny_model: Path) -> None:
    backends = {name: build(tiny_model, seed=seed) for seed, name in enumerate("xy")}
    tokens = prompt(1)
    rows = [replace(request(f"{i}", tokens), adapter=name) for i, name in enumerate(("x", None, "y", "x", None))]
    async with running(tiny_model) as engine:
        plain = await generate_all(engine, [replace(row, adapter=None) for row in rows])
    async with running(tiny_model, lora=LORA, max_adapters=2) as engine:
        for version, (name, backend) in enumerate(backends.items(), start=1):
            await sync(engine, backend, version, name)
        together = await generate_all(engine, rows)
        alone = [await engine.generate(row) for row in rows]
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    assert [same(a, b) for a, b in zip(together, plain, strict=True)] == [False, True, False, False, True]
    assert [set(one.policy_versions) for one in together] == [{1}, {0}, {2}, {1}, {0}]


async def test_hf_adapters_scoring_uses_the_named_adapter(tiny_model: Path) -> None:
    first, second = build(tiny_model, seed=1), build(tiny_model, seed=2)
    async with running(tiny_model, lora=LORA, max_adapters=2) as engine:
        await sync(engine, first, 1, "first")
        await sync(engine, second, 2, "second")
        scores = {name: (await engine.logprobs([TEXT], adapter=name))[0] for name in ("first", "second", None)}
        with pytest.raises(DataError, match="logprobs names the adapter 'third'"):
            await engine.logprobs([TEXT], adapter="third")
    for name, backend in (("first", first), ("second", second)):
        expected = reference_logprobs(tiny_model, TEXT, **dict(backend.weights()))
        np.testing.assert_allclose(scores[name], expected, atol=1e-5)
    np.testing.assert_allclose(scores[None], reference_logprobs(tiny_model, TEXT), atol=1e-5)


async def test_hf_adapters_running_request_continues_with_the_new_adapter(tiny_model: Path) -> None:
    backend = build(tiny_model)
    async with running(tiny_model, lora=LORA) as engine:
        await sync(engine, backend, 1)
        call = asyncio.create_task(engine.generate(request("a", max_new_tokens=40)))
        await has_generated(engine, 5)
        await engine.pause("keep")
        await sync(engine, train(backend, 1), 2)
        await engine.resume()
        made = await call
    versions = made.policy_versions.tolist()
    assert versions == sorted(versions) and set(versions) == {1, 2}


async def test_hf_adapters_thousand_syncs_do_not_change_frozen_weights(tiny_model: Path) -> None:
    backend = build(tiny_model, dtype="bfloat16")
    async with running(tiny_model, dtype="bfloat16", lora=LORA) as engine:
        assert engine._decoder is not None
        weights = {name: tensor.clone() for name, tensor in engine._decoder.model.state_dict().items()}
        for version in range(1, 1001):
            await sync(engine, backend, version)
        assert all(torch.equal(t, weights[name]) for name, t in engine._decoder.model.state_dict().items())


async def test_hf_adapters_engine_needs_a_sync_after_sleep(
    tiny_model: Path,
) -> None:
    backend = build(tiny_model)
    async with running(tiny_model, lora=LORA) as engine:
        with pytest.raises(WeightSyncError, match="no adapter has arrived yet"):
            await engine.generate(request("a"))
        await sync(engine, backend, 1)
        before = await engine.generate(request("a"))
        await engine.sleep()
        await engine.wake()
        with pytest.raises(WeightSyncError, match="it was asleep"):
            await engine.generate(request("a"))
        await sync(engine, backend, 1)
        assert same(await engine.generate(request("a")), before)


class _Changed:
    """The adapter with some of its tensors replaced."""

    def __init__(self, backend: TorchBackend, **changes: torch.Tensor | None) -> None:
        self.tensors = dict(backend.adapter_weights()) | changes

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, tensor) for name, tensor in self.tensors.items() if tensor is not None)

    def names(self) -> list[str]:
        return [name for name, _ in self]


FIRST = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({FIRST: None}, rf"'{FIRST}' is missing from the update \(1 of 12 are missing\)"),
        ({FIRST: torch.zeros(8, 32)}, rf"'{FIRST}' must have shape \(4, 32\), got \(8, 32\)"),
        (
            {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)},
            r"up_proj.lora_A.weight' does not belong to the engine's adapters: model.lora selects 6 layers",
        ),
        ({"model.embed_tokens.weight": torch.zeros(4)}, "embed_tokens.weight' does not belong"),
        (
            {FIRST: torch.zeros(4, 32, dtype=torch.int8)},
            rf"'{FIRST}' must have one of the dtypes float32, bfloat16, float16, got int8",
        ),
        (
            {FIRST: torch.full((4, 32), torch.nan)},
            rf"version 1: adapter tensor '{FIRST}' has NaN or infinite values in float32: resume from an earlier",
        ),
    ],
)
async def test_hf_adapters_invalid_update_is_rejected_with_the_expected_tensors(
    changes: dict[str, Any], message: str, tiny_model: Path
) -> None:
    backend = build(tiny_model)
    async with running(tiny_model, lora=LORA) as engine:
        with pytest.raises(WeightSyncError, match=message):
            await send(engine, _Changed(backend, **changes), 1)
        with pytest.raises(WeightSyncError, match="no usable weights"):
            await engine.generate(request("a"))


async def test_hf_adapters_a_tensor_that_is_sent_twice_is_refused(tiny_model: Path) -> None:
    layers = {"q_proj": (8, 4)}
    manifest = [
        describe_tensor(f"q_proj.{part}", torch.zeros(shape))
        for part, shape in (("lora_A.weight", (4, 4)), ("lora_B.weight", (8, 4)), ("lora_A.weight", (4, 4)))
    ]
    check_adapter_manifest(manifest[:2], layers, LORA, policy_version=1)
    with pytest.raises(WeightSyncError, match=r"adapter tensor 'q_proj.lora_A.weight' is sent more than once"):
        check_adapter_manifest(manifest, layers, LORA, policy_version=1)


async def test_hf_adapters_unknown_names_and_too_many_adapters_are_refused(tiny_model: Path) -> None:
    backend = build(tiny_model)
    async with running(tiny_model, lora=LORA) as engine:
        await sync(engine, backend, 1, "x")
        with pytest.raises(DataError, match="names the adapter 'y', which the engine has not received: sync it first"):
            await engine.generate(replace(request("a"), adapter="y"))
        with pytest.raises(WeightSyncError, match="'y' cannot be added: the engine has 1 adapters, its maximum"):
            await sync(engine, backend, 1, "y")
    async with running(tiny_model) as engine:
        with pytest.raises(UnsupportedError, match=r"the hf engine has no LoRA adapters, got adapter 'judge'"):
            await engine.generate(replace(request("a"), adapter="judge"))
        with pytest.raises(UnsupportedError, match="got adapter 'x'"):
            await send(engine, Weights({"w": torch.zeros(1)}), 1, adapter="x")
