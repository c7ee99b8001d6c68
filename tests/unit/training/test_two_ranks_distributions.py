"""Two FSDP ranks find the same entropy, divergence and attention statistics as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_helpers import relative_error
from two_ranks_distributions import CASES, run_rank, work
from worlds.ranks import run_ranks
from worlds.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow  # `test_parallel` has most of it, under more layouts


@pytest.fixture(scope="module", name="model_path")
def _model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("deeper"), layers=4, seed=4)


@pytest.fixture(scope="module", name="directory")
def _directory(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two ranks")
    run_ranks(run_rank, (directory, model_path), 2)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_distribution_two_ranks_find_what_one_finds(directory: Path, model_path: Path, case: str) -> None:
    first, second = (torch.load(directory / f"{case}-{rank}.pt", weights_only=False) for rank in range(2))
    expected = work(case, model_path)
    limit = 0.05 if case == "bfloat16" else 1e-6
    assert relative_error(first["grads"], expected["grads"]) <= limit
    for name in ("result", "then"):
        result, alone = first[name], expected[name]
        assert result.metrics == second[name].metrics
        assert result.loss == pytest.approx(alone.loss, rel=limit)
        for metric in ("policy/kl_reference", "policy/entropy"):
            assert result.metrics[metric] == pytest.approx(alone.metrics[metric], rel=10 * limit)
            assert result.metrics[metric] > 1e-5
    for name in ("statistics", "one"):
        assert len(first[name]) == len(expected[name])
        for own, twin, other in zip(first[name], second[name], expected[name], strict=True):
            assert np.array_equal(own.waad, twin.waad)
            tolerance: dict[str, Any] = {"rtol": 0.05 if case == "bfloat16" else 1e-4, "atol": 1e-5}
            np.testing.assert_allclose(own.waad, other.waad, **tolerance)
            np.testing.assert_allclose(own.fai, other.fai, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_distribution_snapshots_of_two_ranks_say_the_bits_of_their_version(
    directory: Path, case: str
) -> None:
    kept = torch.load(directory / f"{case}-1.pt", weights_only=False)["kept"]
    assert all(map(np.array_equal, kept["kept"], kept["before"]))
    assert all(map(np.array_equal, kept["again"], kept["after"]))
    assert not all(map(np.array_equal, kept["before"], kept["after"]))


def test_two_ranks_distribution_adapters_that_were_off_when_fsdp_first_saw_them_are_trained(
    directory: Path, model_path: Path
) -> None:
    found = torch.load(directory / "lora-0.pt", weights_only=False)
    alone = work("lora", model_path)
    assert all(grad.any() for grad in found["grads"].values())
    for before, after, other in zip(found["below"], found["still below"], alone["below"], strict=True):
        assert np.array_equal(before, after)
        np.testing.assert_allclose(before, other, atol=1e-5)
