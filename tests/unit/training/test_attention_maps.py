"""The statistics of the live policy's attention equal those of transformers' own eager maps, written out as loops."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_architectures import MODELS, write_model
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import UnsupportedError
from roll.models import load_causal_lm
from roll.models.tiny import write_tiny_model
from roll.training import TorchBackend, attention_maps
from roll.training.attention_maps import observed_layers
from roll.training.precision import Precision
from roll.types import AttentionStatistics, TrainingBatch

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
WINDOW, HORIZON = 4, (2, 7)
SHAPE = {"groups": 3, "group_size": 3, "response": (1, 20)}


@pytest.fixture(scope="module", name="model_path")
def _model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("deeper"), layers=9, seed=4)


def reference_statistics(model: Any, batch: TrainingBatch) -> list[tuple[list[float], list[float]]]:
    """WAAD and FAI of every token by the formulas, from the maps that transformers returns."""
    num_layers = model.config.num_hidden_layers
    result = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            attentions = model(input_ids=ids, output_attentions=True).attentions
        maps = [m for layer in observed_layers(num_layers) for m in attentions[layer][0].double().numpy()]
        n, first = len(sample), sample.prefix_length
        far = []
        for m in maps:
            spans = [sum(m[t, s] * (t - s) for s in range(t + 1)) for t in range(first, n)]
            far.append(sum(spans) / len(spans))
        order = sorted(range(len(maps)), key=lambda i: far[i])
        count = round(0.3 * len(maps))
        local = sum(maps[i] for i in order[:count]) / count
        wide = sum(maps[i] for i in order[-count:]) / count
        waad, fai = [0.0] * n, [0.0] * n
        for t in range(first, n):
            waad[t] = sum(local[t, s] * min(t - s, WINDOW) for s in range(t + 1))
            later = [wide[u, t] for u in range(t + HORIZON[0], min(n - 1, t + HORIZON[1]) + 1)]
            fai[t] = sum(later) / len(later) if later else 0.0
        result.append((waad, fai))
    return result


def assert_close(found: list[AttentionStatistics], expected: list[Any], batch: TrainingBatch, limit: float) -> None:
    for own, (waad, fai), sample in zip(found, expected, batch.samples, strict=True):
        assert own.waad.dtype == own.fai.dtype == np.float32
        assert own.waad.shape == own.fai.shape == sample.token_ids.shape
        np.testing.assert_allclose(own.waad, waad, rtol=limit, atol=limit)
        np.testing.assert_allclose(own.fai, fai, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("settings", "elements"),
    [
        ({}, 2**20),
        ({"share_prefix": False, "max_tokens_per_micro_batch": 40}, 50),
        ({"max_tokens_per_micro_batch": 1}, 1),
    ],
)
def test_statistics_equal_those_of_eager_maps(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, settings: dict[str, Any], elements: int
) -> None:
    monkeypatch.setitem(attention_maps.MAP_ELEMENTS, "cpu", elements)  # one row of maps at a time, or all
    batch = make_batch(**SHAPE)
    model = load_causal_lm(model_path, torch.float64, attention="eager")
    expected = reference_statistics(model, batch)
    backend = TorchBackend(make_spec(model_path, **settings), precision=DOUBLE)
    found = backend.attention_statistics(batch, WINDOW, HORIZON)
    assert_close(found, expected, batch, 1e-6)
    assert any(own.waad.max() > 1 for own in found)
    assert any(own.fai.max() > 0.02 for own in found)


@pytest.mark.parametrize("name", ["Qwen3", "Mistral", "Gemma3Text", "Phi3", "SmolLM3"])
def test_other_decoders_and_sliding_windows(tiny_model: Path, tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / name, tiny_model, name, **MODELS[name])
    batch = make_batch(6, **SHAPE)
    model = load_causal_lm(path, torch.float64, attention="eager")
    backend = TorchBackend(make_spec(path), precision=DOUBLE)
    found = backend.attention_statistics(batch, WINDOW, HORIZON)
    assert_close(found, reference_statistics(model, batch), batch, 1e-6)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_maps_are_those_of_the_policy_as_it_is_now(model_path: Path, lora: LoRAConfig | None) -> None:
    batch = make_batch(3, **SHAPE)
    backend = TorchBackend(make_spec(model_path, lora=lora, learning_rate=0.03))
    before = backend.attention_statistics(batch, WINDOW, HORIZON)
    for seed in (1, 2, 3):
        backend.train_step(make_batch(seed, **SHAPE), PolicyLoss())
    after = backend.attention_statistics(batch, WINDOW, HORIZON)
    assert max(np.abs(a.waad - b.waad).max() for a, b in zip(before, after, strict=True)) > 1e-2
    model = load_causal_lm(model_path, torch.float32, attention="eager")
    model.load_state_dict({n: t.detach() for n, t in backend.weights()}, strict=False)
    model.tie_weights()
    assert_close(after, reference_statistics(model.double(), batch), batch, 1e-4)


def test_looking_changes_nothing_of_what_follows(model_path: Path) -> None:
    batch = make_batch(**SHAPE)
    results = []
    for look in (False, True):
        backend = TorchBackend(make_spec(model_path, activation_checkpointing=True))
        if look:
            backend.attention_statistics(batch, WINDOW, HORIZON)
        results.append(dataclasses.replace(backend.train_step(batch, PolicyLoss()), timings_s={}, logprobs=()))
    assert results[0] == results[1]


def test_a_sample_does_not_depend_on_what_is_in_the_batch_or_in_which_order(model_path: Path) -> None:
    batch = make_batch(5, **SHAPE)
    backend = TorchBackend(make_spec(model_path, max_tokens_per_micro_batch=60))
    found = backend.attention_statistics(batch, WINDOW, HORIZON)
    some = dataclasses.replace(batch, samples=batch.samples[::-2])
    for own, other in zip(backend.attention_statistics(some, WINDOW, HORIZON), found[::-2], strict=True):
        np.testing.assert_allclose(own.waad, other.waad, atol=1e-5)
        np.testing.assert_allclose(own.fai, other.fai, atol=1e-6)


def test_an_empty_answer_gets_zeros_for_its_prompt(model_path: Path) -> None:
    batch = make_batch(**SHAPE)
    short = dataclasses.replace(
        batch.samples[0],
        **{n: getattr(batch.samples[0], n)[: batch.samples[0].prefix_length] for n in ("token_ids", "loss_mask")},
    )
    mixed = dataclasses.replace(batch, samples=(short, *batch.samples[1:]))
    backend = TorchBackend(make_spec(model_path))
    found = backend.attention_statistics(mixed, WINDOW, HORIZON)
    assert found[0].waad.tolist() == found[0].fai.tolist() == [0.0] * len(short)
    for own, other in zip(found[1:], backend.attention_statistics(batch, WINDOW, HORIZON)[1:], strict=True):
        np.testing.assert_allclose(own.waad, other.waad, atol=1e-5)


def test_layers_behind_the_last_observed_one_do_not_run(model_path: Path) -> None:
    backend = TorchBackend(make_spec(model_path))
    ran: list[int] = []
    for index, layer in enumerate(backend.network.decoder.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    backend.attention_statistics(make_batch(**SHAPE), WINDOW, HORIZON)
    assert ran == [0, 1, 2, 3, 4]  # of nine layers 3, 4 and 5 are observed; 5 ends when its queries and keys are there


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(30, (10, 12, 14, 17, 19)), (24, (8, 10, 12, 13, 15)), (9, (3, 4, 5)), (2, (0, 1)), (1, (0,))],
)
def test_layers_are_spaced_evenly_over_the_middle_third(num_layers: int, expected: tuple[int, ...]) -> None:
    assert observed_layers(num_layers) == expected


def test_a_critic_has_no_policy_to_look_at(model_path: Path) -> None:
    backend = TorchBackend(dataclasses.replace(make_spec(model_path), role="critic"))
    with pytest.raises(UnsupportedError, match="attention_statistics"):
        backend.attention_statistics(make_batch(**SHAPE), WINDOW, HORIZON)
