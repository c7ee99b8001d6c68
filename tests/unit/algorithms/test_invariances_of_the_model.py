"""Every preset through the real trainer and a tiny model: packing, micro-batches, order, masked tokens and ranks
leave loss and gradient as a padded pass over the whole batch gives them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_helpers import VALUE_LOSS
from model_helpers import (
    ALONE,
    BACKENDS,
    STILL,
    WITH_VALUES,
    Case,
    backend_of,
    batch_of,
    disturbed,
    idle_case,
    loss_of,
    padded_gradient,
    run_rank,
)
from training_helpers import grads_of, make_batch, make_spec, relative_error, values_of
from worlds.ranks import run_ranks

from roll.config.presets import PRESET_NAMES
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.training.packing.micro_batches import pack
from roll.types import TrainingBatch

LIMIT = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"max_tokens_per_micro_batch": 40},
    "each alone": ALONE,
}


@pytest.fixture(scope="module", name="model")
def _model(tiny_model: Path) -> Any:
    return load_causal_lm(tiny_model, torch.float32, attention="eager")


@pytest.fixture(scope="module", name="backends")
def _backends(tiny_model: Path) -> dict[str, TorchBackend]:
    return {name: TorchBackend(make_spec(tiny_model, **STILL, **layout)) for name, layout in LAYOUTS.items()}


def learn(backend: TorchBackend, name: str, batch: TrainingBatch) -> tuple[float, dict[str, torch.Tensor], Any]:
    result = backend.train_step(batch, loss_of(name))
    return result.loss, grads_of(backend), result.metrics


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_algorithm_invariance_layout_order_and_masked_tokens_change_nothing(
    name: str, model: Any, backends: dict[str, TorchBackend]
) -> None:
    batch = batch_of(name, model)
    expected_loss, expected = padded_gradient(model, batch, loss_of(name))
    shuffled = list(batch.samples)
    random.Random(name).shuffle(shuffled)
    mixed = replace(batch, samples=tuple(shuffled))
    found = {}
    for layout, backend in backends.items():
        found[layout] = learn(backend, name, mixed if layout == "micro-batches" else batch)
        loss, grads, metrics = found[layout]
        assert abs(loss - expected_loss) <= LIMIT * max(metrics["policy/loss_scale"], abs(expected_loss)), layout
        assert relative_error(grads, expected) <= LIMIT, layout
    loss, grads, _ = learn(backends["each alone"], name, disturbed(batch, seed=1))
    assert loss == found["each alone"][0]
    assert all(torch.equal(grads[n], found["each alone"][1][n]) for n in grads)


@pytest.fixture(scope="module", name="cases")
def _cases(model: Any) -> dict[str, Case]:
    """Of every preset its whole batch, and a few samples under every output; fewer outputs once."""
    cases = {}
    for name in PRESET_NAMES:
        batch = batch_of(name, model)
        cases[name] = Case(batch=batch, loss=loss_of(name), backend="packed")
        cases[f"{name}, idle"] = idle_case(name, batch)
    idle = cases["ppo, idle"]
    cases["no head, idle"] = replace(idle, loss=loss_of("ppo"), backend="alone")
    cases["adapters, idle"] = replace(idle, backend="adapters")
    cases["critic, idle"] = replace(idle, loss=VALUE_LOSS, backend="critic")
    return cases


@pytest.fixture(scope="module", name="found")
def _found(tiny_model: Path, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("two ranks")
    run_ranks(run_rank, (directory, tiny_model, cases), 2)
    return torch.load(directory / "found.pt", weights_only=False)


@pytest.mark.parametrize("name", PRESET_NAMES)
@pytest.mark.integration
def test_algorithm_invariance_two_ranks_find_the_gradient_of_one(
    name: str, model: Any, found: tuple[Any, Any], cases: dict[str, Case]
) -> None:
    expected_loss, expected = padded_gradient(model, cases[name].batch, cases[name].loss)
    loss, metrics, grads = found[0][name]
    assert abs(loss - expected_loss) <= LIMIT * max(metrics["policy/loss_scale"], abs(expected_loss)), name
    assert relative_error(grads, expected) <= LIMIT, name


@pytest.mark.integration
def test_algorithm_invariance_a_rank_without_work_takes_part_in_every_output_and_heads_learn_as_on_one(
    tiny_model: Path, found: tuple[Any, Any], cases: dict[str, Case]
) -> None:
    alone = {kind: backend_of(kind, tiny_model) for kind in BACKENDS}
    idle = {name: case for name, case in cases.items() if ", idle" in name}
    assert len(idle) == len(PRESET_NAMES) + 3
    for name, case in idle.items():
        settings = alone[case.backend].spec.training
        by_rank = pack(
            case.batch.samples,
            max_tokens=settings.max_tokens_per_micro_batch,
            share_prefix=settings.share_prefix,
            num_ranks=2,
        )
        assert by_rank[0][-1] and not by_rank[1][-1], name
        result = alone[case.backend].train_step(case.batch, case.loss)
        loss, _, grads = found[0][name]
        scale = max(result.metrics.get("policy/loss_scale", 0.0), abs(result.loss))
        assert abs(loss - result.loss) <= LIMIT * scale, name
        assert relative_error(grads, grads_of(alone[case.backend])) <= LIMIT, name
        assert all(grad.any() for weight, grad in grads.items() if "value_head" in weight), name
    for kind in WITH_VALUES:
        for own, other in zip(found[1][kind], values_of(alone[kind], make_batch(5)), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
        assert np.concatenate(found[1][kind]).any(), kind
