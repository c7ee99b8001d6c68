"""The statistics of the live policy's attention equal those of transformers' own eager maps, written out as loops.

They are taken in two places, both without a pass of their own: in the update's, and in that of the log-probs before it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, write_model
from training_helpers import grads_of, logprobs_of, make_batch, make_spec, relative_error
from worlds.tiny_model import write_tiny_model

from roll.algorithms.losses import AttentionCreditLoss, PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import UnsupportedError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.attention import maps as attention_maps
from roll.training.attention.maps import select_observed_layers
from roll.training.precision import Precision
from roll.types import (
    AttentionRange,
    AttentionStatistics,
    ForwardOptions,
    LossInputs,
    LossOutputs,
    LossRequirements,
    TrainingBatch,
)

pytestmark = pytest.mark.integration

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
WINDOW, HORIZON = 4, (2, 7)
RANGE = AttentionRange(window=WINDOW, horizon=HORIZON)
SHAPE = {"groups": 3, "group_size": 3, "response": (1, 20)}


@pytest.fixture(scope="module", name="model_path")
def _model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("deeper"), layers=9, seed=4)


def reference_statistics(model: Any, batch: TrainingBatch) -> list[tuple[list[float], list[float]]]:
    """WAAD and FAI of every token by the formulas, from the maps that transformers returns.

    The last token in the loss predicts nothing: it has no row, and keeps the WAAD of the one before.
    """
    num_layers = model.config.num_hidden_layers
    result = []
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            attentions = model(input_ids=ids, output_attentions=True).attentions
        maps = [m for layer in select_observed_layers(num_layers) for m in attentions[layer][0].double().numpy()]
        n, first = int(np.flatnonzero(sample.loss_mask)[-1]), sample.prefix_length
        far = []
        for m in maps:
            spans = [sum(m[t, s] * (t - s) for s in range(t + 1)) for t in range(first, n)]
            far.append(sum(spans) / max(len(spans), 1))
        order = sorted(range(len(maps)), key=lambda i: far[i])
        count = round(0.3 * len(maps))
        local = sum(maps[i] for i in order[:count]) / count
        wide = sum(maps[i] for i in order[-count:]) / count
        waad, fai = [0.0] * len(sample), [0.0] * len(sample)
        for t in range(first, n):
            waad[t] = sum(local[t, s] * min(t - s, WINDOW) for s in range(t + 1))
            later = [wide[u, t] for u in range(t + HORIZON[0], min(n - 1, t + HORIZON[1]) + 1)]
            fai[t] = sum(later) / len(later) if later else 0.0
        if n > first:
            waad[n:] = [waad[n - 1]] * (len(sample) - n)
        result.append((waad, fai))
    return result


def statistics_in_an_update(backend: TorchBackend, batch: TrainingBatch) -> list[AttentionStatistics]:
    """What a loss is shown while the policy is updated, by sample."""
    seen: dict[bytes, AttentionStatistics] = {}

    @dataclasses.dataclass
    class Looking:
        needs = LossRequirements(attention=RANGE)

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            assert inputs.attention is not None
            for own in inputs.attention:
                assert id(own.mask) in masks
                seen[masks[id(own.mask)]] = own.statistics
            return LossOutputs(loss=inputs.logprobs.sum())

    masks = {id(s.loss_mask): s.sample_id.encode() for s in batch.samples}
    backend.train_step(batch, Looking())
    return [seen[s.sample_id.encode()] for s in batch.samples]


def statistics_before_updates(backend: TorchBackend, batch: TrainingBatch) -> list[AttentionStatistics]:
    return backend.forward(batch, ["logprobs", "attention"], ForwardOptions(attention=RANGE))["attention"]


BOTH_PLACES = pytest.mark.parametrize("look", [statistics_in_an_update, statistics_before_updates])


def assert_close(found: list[AttentionStatistics], expected: list[Any], batch: TrainingBatch, limit: float) -> None:
    for own, (waad, fai), sample in zip(found, expected, batch.samples, strict=True):
        assert own.waad.dtype == own.fai.dtype == np.float32
        assert own.waad.shape == own.fai.shape == sample.token_ids.shape
        np.testing.assert_allclose(own.waad, waad, rtol=limit, atol=limit)
        np.testing.assert_allclose(own.fai, fai, rtol=limit, atol=limit)


@BOTH_PLACES
@pytest.mark.parametrize(
    ("settings", "elements"),
    [
        ({}, 2**20),
        ({"share_prefix": False, "max_tokens_per_micro_batch": 40}, 50),
        ({"max_tokens_per_micro_batch": 1, "activation_checkpointing": True}, 1),
    ],
)
def test_attention_map_statistics_equal_those_of_eager_maps(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, settings: dict[str, Any], elements: int, look: Any
) -> None:
    monkeypatch.setitem(attention_maps.MAX_MAP_ELEMENTS, "cpu", elements)  # one row of maps at a time, or all
    batch = make_batch(**SHAPE)
    model = load_causal_lm(model_path, torch.float64, attention="eager")
    expected = reference_statistics(model, batch)
    backend = TorchBackend(make_spec(model_path, **settings), precision=DOUBLE)
    found = look(backend, batch)
    assert_close(found, expected, batch, 1e-6)
    assert any(own.waad.max() > 1 for own in found)
    assert any(own.fai.max() > 0.02 for own in found)


@BOTH_PLACES
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "phi3", "smollm3"])
def test_attention_map_other_decoders_and_sliding_windows(
    tiny_model: Path, tmp_path: Path, name: str, look: Any
) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    batch = make_batch(6, **SHAPE)
    model = load_causal_lm(path, torch.float64, attention="eager")
    backend = TorchBackend(make_spec(path), precision=DOUBLE)
    expected = reference_statistics(model, batch)
    assert_close(look(backend, batch), expected, batch, 1e-6)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
def test_attention_map_are_those_of_the_policy_as_it_is_now(model_path: Path, lora: LoRAConfig | None) -> None:
    batch = make_batch(3, **SHAPE)
    backend = TorchBackend(make_spec(model_path, lora=lora, learning_rate=0.03))
    before = statistics_before_updates(backend, batch)
    for seed in (1, 2, 3):
        backend.train_step(make_batch(seed, **SHAPE), PolicyLoss())
    after = statistics_before_updates(backend, batch)
    assert max(np.abs(a.waad - b.waad).max() for a, b in zip(before, after, strict=True)) > 1e-2
    model = load_causal_lm(model_path, torch.float32, attention="eager")
    model.load_state_dict({n: t.detach() for n, t in backend.weights()}, strict=False)
    model.tie_weights()
    assert_close(after, reference_statistics(model.double(), batch), batch, 1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_map_looking_changes_nothing_of_what_is_learnt(model_path: Path, checkpointing: bool) -> None:
    batch = make_batch(**SHAPE)
    plain = AttentionCreditLoss(loss=PolicyLoss(), range=RANGE, amplification=1.0)  # factors of 1
    results = []
    for loss in (PolicyLoss(), plain):
        backend = TorchBackend(make_spec(model_path, activation_checkpointing=checkpointing))
        result = backend.train_step(batch, loss)
        metrics = {n: v for n, v in result.metrics.items() if n != "policy/credit_factor"}
        results.append((dataclasses.replace(result, timings_s={}, logprobs=(), metrics=metrics), grads_of(backend)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[1][1][n], grad) for n, grad in results[0][1].items())


def test_attention_map_log_probs_are_those_without_looking(model_path: Path) -> None:
    batch = make_batch(**SHAPE)
    backend = TorchBackend(make_spec(model_path))
    logprobs = backend.forward(batch, ["logprobs", "attention"], ForwardOptions(attention=RANGE))["logprobs"]
    assert all(np.array_equal(a, b) for a, b in zip(logprobs, logprobs_of(backend, batch), strict=True))


def test_attention_map_an_update_is_the_same_wherever_the_maps_were_taken(model_path: Path) -> None:
    batch = make_batch(**SHAPE)
    loss = AttentionCreditLoss(loss=PolicyLoss(), range=RANGE)
    first, second = (TorchBackend(make_spec(model_path), precision=DOUBLE) for _ in range(2))
    seen = statistics_before_updates(second, batch)
    brought = dataclasses.replace(
        batch,
        samples=tuple(dataclasses.replace(s, attention=own) for s, own in zip(batch.samples, seen, strict=True)),
    )
    results = [first.train_step(batch, loss), second.train_step(brought, loss)]
    assert results[0].metrics["policy/credit_factor"] > 1.05
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-12)
    assert relative_error(grads_of(first), grads_of(second)) < 1e-12
    plain = TorchBackend(make_spec(model_path), precision=DOUBLE)
    plain.train_step(batch, PolicyLoss())
    assert relative_error(grads_of(plain), grads_of(second)) > 1e-2


@BOTH_PLACES
def test_attention_map_a_sample_does_not_depend_on_what_is_in_the_batch_or_in_which_order(
    model_path: Path, look: Any
) -> None:
    batch = make_batch(5, **SHAPE)
    spec = make_spec(model_path, max_tokens_per_micro_batch=60)
    found = look(TorchBackend(spec), batch)
    some = dataclasses.replace(batch, samples=batch.samples[::-2])
    for own, other in zip(look(TorchBackend(spec), some), found[::-2], strict=True):
        np.testing.assert_allclose(own.waad, other.waad, atol=1e-5)
        np.testing.assert_allclose(own.fai, other.fai, atol=1e-6)


def test_attention_map_an_empty_answer_gets_zeros(model_path: Path) -> None:
    batch = make_batch(**SHAPE)
    end = batch.samples[0].prefix_length
    names = ("token_ids", "loss_mask", "advantages", "rollout_logprobs")
    short = dataclasses.replace(batch.samples[0], **{n: getattr(batch.samples[0], n)[:end] for n in names})
    mixed = dataclasses.replace(batch, samples=(short, *batch.samples[1:]))
    backend = TorchBackend(make_spec(model_path))
    found = statistics_before_updates(backend, mixed)
    assert found[0].waad.tolist() == found[0].fai.tolist() == [0.0] * len(short)
    for own, other in zip(found[1:], statistics_before_updates(backend, batch)[1:], strict=True):
        np.testing.assert_allclose(own.waad, other.waad, atol=1e-5)
    result = backend.train_step(mixed, AttentionCreditLoss(loss=PolicyLoss(), range=RANGE))
    assert result.stepped


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(30, (10, 12, 14, 17, 19)), (24, (8, 10, 12, 13, 15)), (9, (3, 4, 5)), (2, (0, 1)), (1, (0,))],
)
def test_attention_map_layers_are_spaced_evenly_over_the_middle_third(
    num_layers: int, expected: tuple[int, ...]
) -> None:
    assert select_observed_layers(num_layers) == expected


def test_attention_map_a_critic_has_no_policy_to_look_at(model_path: Path) -> None:
    backend = TorchBackend(dataclasses.replace(make_spec(model_path), role="critic"))
    with pytest.raises(UnsupportedError, match="attention"):
        backend.forward(make_batch(**SHAPE), ["attention"], ForwardOptions(attention=RANGE))
