"""Losses of texts, pairs and scores through the real trainer and a tiny model: shared prompts, micro-batches, order and
ranks leave loss and gradient as a padded pass over the whole batch gives them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pair_helpers import PAIRS, SINGLE
from pair_model_helpers import (
    DOUBLE,
    SCORED,
    STILL,
    cases,
    critic,
    padded_gradient,
    pair_batch,
    run_cases,
    run_rank,
    scored,
    scored_gradient,
)
from training_helpers import grads_of, make_spec, relative_error
from worlds.ranks import run_ranks
from worlds.tiny_model import write_tiny_model

from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import TrainingBatch

pytestmark = pytest.mark.integration

LIMIT = 2e-7
"""Of a gradient's relative error: norms and softmax of the model are in float32, also where it is in float64."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"max_tokens_per_micro_batch": 40},
    "without shared prompts": {"share_prefix": False, "max_tokens_per_micro_batch": 40},
    "each pair alone": {"share_prefix": False, "max_tokens_per_micro_batch": 1},
}


@pytest.fixture(scope="module", name="model")
def _model(tiny_model: Path) -> Any:
    return load_causal_lm(tiny_model, torch.float64)


@pytest.fixture(scope="module", name="backends")
def _backends(tiny_model: Path) -> dict[str, TorchBackend]:
    return {n: TorchBackend(make_spec(tiny_model, **STILL, **own), precision=DOUBLE) for n, own in LAYOUTS.items()}


def shuffled(batch: TrainingBatch) -> TrainingBatch:
    samples = list(batch.samples)
    random.Random(0).shuffle(samples)
    return replace(batch, samples=tuple(samples))


@pytest.mark.parametrize("name", [*PAIRS, *SINGLE])
def test_preference_loss_layout_and_order_change_nothing(
    name: str, model: Any, backends: dict[str, TorchBackend]
) -> None:
    loss, expected = (PAIRS | SINGLE)[name]
    batch = pair_batch(7, targets=name in PAIRS and PAIRS[name][0].pairwise_loss.supports_margin)
    right, grads = padded_gradient(model, batch, expected)
    metrics = []
    for layout, backend in backends.items():
        result = backend.train_step(shuffled(batch) if layout == "micro-batches" else batch, loss)
        assert result.loss == pytest.approx(right, rel=1e-7, abs=1e-9), layout
        found = grads_of(backend)
        assert relative_error(found, {n: grads[n] for n in found}) <= LIMIT, layout
        metrics.append(result.metrics)
        assert metrics[-1] == pytest.approx(metrics[0], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", SCORED)
def test_preference_loss_scores_are_of_whole_texts(name: str, model: Any, tiny_model: Path) -> None:
    loss, expected = SCORED[name]
    batch = scored(pair_batch(8))
    for settings in LAYOUTS.values():
        backend = critic(tiny_model, **settings)
        head = backend.masters.parameters["score.weight"].detach().clone()
        right, grads = scored_gradient(model, head, batch, expected)
        result = backend.train_step(batch, loss)
        assert result.loss == pytest.approx(right, rel=1e-7)
        found = grads_of(backend)
        assert relative_error(found, {n: grads[n] for n in found}) <= LIMIT


@pytest.fixture(scope="module", name="teachers")
def _teachers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    directory = tmp_path_factory.mktemp("teachers")
    wide = write_tiny_model(directory / "a", seed=7, layers=3, hidden=48)
    return str(wide), str(write_tiny_model(directory / "b", seed=8, layers=1, tied=False))


@pytest.fixture(scope="module", name="two_ranks")
def _two_ranks(tiny_model: Path, teachers: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("two ranks")
    run_ranks(run_rank, (directory, tiny_model, teachers), 2)
    return torch.load(directory / "found.pt", weights_only=False)


@pytest.fixture(scope="module", name="one_rank")
def _one_rank(tiny_model: Path, teachers: tuple[str, ...]) -> dict[str, Any]:
    return run_cases(tiny_model, teachers)


@pytest.mark.parametrize("name", cases())
def test_preference_loss_two_ranks_find_what_one_finds(
    name: str, two_ranks: dict[str, Any], one_rank: dict[str, Any]
) -> None:
    (loss, metrics, grads), (own_loss, own_metrics, own_grads) = two_ranks[name], one_rank[name]
    assert loss == pytest.approx(own_loss, rel=1e-7)
    assert metrics == pytest.approx(own_metrics, rel=1e-6, abs=1e-9)
    assert relative_error(grads, own_grads) <= LIMIT


def test_preference_loss_two_ranks_say_the_same_likeliest_tokens(
    two_ranks: dict[str, Any], one_rank: dict[str, Any]
) -> None:
    for (ids, logprobs), (own_ids, own_logprobs) in zip(two_ranks["tops"], one_rank["tops"], strict=True):
        np.testing.assert_array_equal(ids, own_ids)
        np.testing.assert_allclose(logprobs, own_logprobs, rtol=1e-6)
