"""Ranks that divide experts find what one rank finds, whatever tokens choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_ranks import FAMILIES_OF_EXPERTS, LOSS, MORE, build, prepare, run_rank, steps
from families import FAMILIES, write_model
from parallel_ranks import LORA, NUM_RANKS
from test_architectures import InFull
from training_helpers import make_batch, make_spec, relative_error
from worlds.ranks import run_ranks

from roll.training import TorchBackend
from roll.training.parallel import experts

STEPS = ("plain", "idle", "skewed", "last", "lora", "recomputed")
LAYOUTS: dict[str, dict[str, dict[str, int]]] = {"qwen3-moe": MORE} | {
    name: {"dp 4, ep 2": {"ep": 2}} if name in ("gpt-oss", "phi-moe") else {"tp 2, ep 4": {"tp": 2, "ep": 4}}
    for name in FAMILIES_OF_EXPERTS
    if name != "qwen3-moe"
}


def compare(directory: Path, name: str, layout: str, expected: Mapping[str, Any]) -> None:
    found = torch.load(directory / f"{name} {layout}.pt", weights_only=False)
    for step in STEPS:
        if step not in expected:
            continue
        limit = 1e-6 if step == "recomputed" else 1e-9
        mine, alone = found[step]["result"], expected[step]["result"]
        assert relative_error(found[step]["grads"], expected[step]["grads"]) <= limit, step
        assert mine.grad_norm == pytest.approx(alone.grad_norm, rel=limit)
        assert mine.loss == pytest.approx(alone.loss, rel=limit)
        assert mine.metrics == pytest.approx(alone.metrics, rel=1e-6, abs=1e-9)  # routers' shares are of float32
    for own, other in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)
    assert list(found["codes"]) == list(expected["codes"])
    assert all(torch.equal(found["codes"][key], codes) for key, codes in expected["codes"].items())
    assert list(found["weights"]) == list(expected["weights"])
    for key, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][key], weight, rtol=1e-6, atol=1e-9), key


def follow(directory: Path, name: str, layouts: Mapping[str, Any]) -> None:
    """What was saved under each layout is what one rank comes to, and so is every export."""
    alone = build(directory / name, {})
    alone.load(directory / f"{name} saved by one")
    for layout in layouts:
        with InFull():
            alone.train_step(make_batch(6), LOSS)
        other = build(directory / name, {})
        other.load(directory / f"{name} saved under {layout}")
        exported = build(directory / f"{name} export under {layout}", {})
        sources = alone.weights(), other.weights(), exported.weights()
        for (key, weight), (_, found), (_, own) in zip(*sources, strict=True):
            assert torch.allclose(weight, found, rtol=1e-6, atol=1e-9), (layout, key)
            assert torch.equal(found, own), (layout, key)


@pytest.fixture(scope="module", name="directory")
def _directory(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    for name in LAYOUTS:
        prepare(directory, name, write_model(directory / name, tiny_model, FAMILIES[name]))
    run_ranks(run_rank, (directory, LAYOUTS), NUM_RANKS)
    return directory


def test_expert_parallel_what_several_ranks_say_of_a_token_is_added_up_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    parts = [torch.full((1, 2), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    found = experts._scatter_add(2, parts, [torch.tensor([1])] * 3)
    assert found.dtype == torch.float32 and found.tolist() == [[0.0, 0.0], [258.0, 258.0]]


def test_expert_parallel_adapters_leave_experts_alone_and_are_merged_under_the_checkpoint_s_names(
    tiny_model: Path, tmp_path: Path
) -> None:
    for name in ("qwen3-moe", "deepseek-v3", "phi-moe", "llama4"):  # the last two's routers are linear layers
        path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
        backend = TorchBackend(make_spec(path, lora=LORA))
        adapted = [key for key in backend.masters.parameters if ".lora_A." in key]
        assert any("q_" in key for key in adapted)
        assert any("shared_experts" in key for key in adapted) == (name == "deepseek-v3")
        assert not any(part in key for key in adapted for part in (".experts.", ".gate.", ".router."))
        assert math.isfinite(backend.train_step(make_batch(), LOSS).loss)
        assert set(backend.weights().names()) == set(TorchBackend(make_spec(path)).weights().names())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_expert_parallel_divided_experts_have_the_gradients_metrics_and_weights_of_one_rank(
    directory: Path, name: str
) -> None:
    expected = steps(name, directory / name, {})
    for layout in LAYOUTS[name]:
        compare(directory, name, layout, expected)
    follow(directory, name, LAYOUTS[name])
