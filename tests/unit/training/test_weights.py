"""What engines get: HF names, tied weights once, adapters merged; and an export that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_helpers import logprobs_of, make_batch, make_spec, reference_logprobs
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import ModelError
from roll.models import load_causal_lm, load_tokenizer
from roll.protocols import TrainBackend, WeightSource
from roll.training import TorchBackend


def test_trainer_weights_it_is_a_train_backend_with_a_weight_source(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    assert isinstance(backend, TrainBackend)
    assert isinstance(backend.weights(), WeightSource)


@pytest.mark.parametrize("tied", [True, False])
def test_trainer_weights_names_are_those_of_the_checkpoint_and_tied_weights_come_once(
    tmp_path: Path, tied: bool
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=tied)
    checkpoint = load_file(model / "model.safetensors")
    weights = TorchBackend(make_spec(model)).weights()
    assert ("lm_head.weight" in weights.names()) is not tied
    assert sorted(weights.names()) == sorted(checkpoint)
    assert [name for name, _ in weights] == list(weights.names())
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in weights)


def test_trainer_weights_are_read_anew_by_every_iteration(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model))
    source = backend.weights()
    before = {name: tensor.clone() for name, tensor in source}
    backend.train_step(make_batch(), PolicyLoss())
    assert all(not torch.equal(before[name], tensor) for name, tensor in source)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4, alpha=8.0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_weights_an_export_loads_in_transformers_and_gives_the_trainers_logprobs(
    tiny_model: Path, tmp_path: Path, lora: LoRAConfig | None, dtype: str
) -> None:
    backend = TorchBackend(make_spec(tiny_model, dtype=dtype, lora=lora, learning_rate=0.01))
    batch = make_batch(1)
    for seed in range(3):
        backend.train_step(make_batch(seed), PolicyLoss())
    backend.export(tmp_path / "export")
    model = load_causal_lm(tmp_path / "export", getattr(torch, dtype), attention="eager")
    assert model.config.dtype == getattr(torch, dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    limit = 1e-4 if dtype == "float32" else 0.2
    for found, expected in zip(logprobs_of(backend, batch), reference_logprobs(model, batch), strict=True):
        np.testing.assert_allclose(found, expected.detach().float().numpy(), atol=limit)
    untrained = logprobs_of(TorchBackend(make_spec(tiny_model, dtype=dtype)), batch)
    assert max(np.abs(a - b).max() for a, b in zip(logprobs_of(backend, batch), untrained, strict=True)) > 0.5
    text = "2 + 3 = 5"
    assert load_tokenizer(tmp_path / "export")(text) == load_tokenizer(tiny_model)(text)
    assert model.generation_config.eos_token_id == [2, 3]
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert {f.stat().st_mode for f in (tmp_path / "export").iterdir()} == {ordinary.stat().st_mode}


def test_trainer_weights_lora_moves_only_adapters_and_merging_leaves_the_live_network_alone(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=LoRAConfig(rank=2, alpha=6.0), learning_rate=0.01))
    frozen = {n: p.clone() for n, p in backend.model.named_parameters() if not p.requires_grad}
    assert all("lora_" in name for name in backend.masters.parameters)
    backend.train_step(make_batch(), PolicyLoss())
    backend.train_step(make_batch(), PolicyLoss())
    logprobs = logprobs_of(backend, make_batch(2))
    merged = dict(backend.weights())
    assert all((a == b).all() for a, b in zip(logprobs_of(backend, make_batch(2)), logprobs, strict=True))
    parameters = dict(backend.model.named_parameters())
    assert all(torch.equal(parameters[n], p) for n, p in frozen.items())
    layer = "model.layers.1.mlp.down_proj"
    a, b = (parameters[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    expected = parameters[f"{layer}.base_layer.weight"] + 3.0 * b @ a
    torch.testing.assert_close(merged[f"{layer}.weight"], expected.detach())
    assert set(merged) == set(load_file(tiny_model / "model.safetensors"))


LAYERS = "Choose from down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or use all-linear"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["q_proj", "v_prj"]}, f"has 'v_prj', .* Did you mean 'v_proj'\\? {LAYERS}"),
        (
            {"target_modules": ["lm_head"]},
            f"has 'lm_head', which is not a linear layer of LlamaForCausalLM's.*{LAYERS}",
        ),
        ({"target_modules": ["embed_tokens"]}, f"has 'embed_tokens', which is not a linear layer.*{LAYERS}"),
        ({"target_modules": ["(a+)+$"]}, LAYERS),
        ({"target_modules": [""]}, LAYERS),
        ({"target_modules": []}, "target_modules is empty: choose from down_proj"),
        (
            {"rank": 10**12},
            "model.lora.rank must be <= 32, the largest possible rank for .*, got 1000000000000: lower model.lora.rank",
        ),
    ],
)
def test_trainer_weights_adapters_that_fit_nothing_are_refused(
    tiny_model: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        TorchBackend(make_spec(tiny_model, lora=LoRAConfig(**settings)))


def test_trainer_weights_adapters_on_chosen_modules_only(tiny_model: Path) -> None:
    backend = TorchBackend(make_spec(tiny_model, lora=LoRAConfig(target_modules=["q_proj"])))
    assert {n.split(".")[-4] for n in backend.masters.parameters} == {"q_proj"}


def test_trainer_weights_offloading_on_a_cpu_changes_nothing(tiny_model: Path) -> None:
    moved, left = (TorchBackend(make_spec(tiny_model, dtype="bfloat16")) for _ in range(2))
    moved.train_step(make_batch(), PolicyLoss())
    left.train_step(make_batch(), PolicyLoss())
    moved.offload(["parameters", "optimizer"])
    moved.onload(["parameters", "optimizer"])
    results = [backend.train_step(make_batch(1), PolicyLoss()) for backend in (moved, left)]
    assert results[0].loss == results[1].loss
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(moved.weights(), left.weights(), strict=True))
