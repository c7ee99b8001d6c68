"""Ranks that divide weights, tokens and samples in any way find what one rank finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_ranks import ONE, run_briefly, steps
from families import FAMILIES, Family, write_model
from parallel_ranks import AGAIN, DOUBLE, LAYOUTS, MORE, NUM_RANKS, PARTS, run_rank, work
from test_expert_parallel import compare
from test_same_gradient import reference
from training_helpers import make_spec, relative_error
from worlds.ranks import run_ranks

from roll.algorithms.losses import PolicyLoss
from roll.config.parallel import ParallelConfig
from roll.errors import PlacementError
from roll.models import load_causal_lm
from roll.training import TorchBackend
from roll.types import TrainingBatch

pytestmark = pytest.mark.integration

STEPS = ("plain", "again", "idle", "credited", "lora", "two heads", "critic")


@pytest.fixture(scope="module", name="batch")
def _batch(tiny_model: Path) -> TrainingBatch:
    return reference(tiny_model, 0, torch.float64).batch


@pytest.fixture(scope="module", name="expected")
def _expected(tiny_model: Path, batch: TrainingBatch) -> dict[str, Any]:
    return work(tiny_model, batch, {})


@pytest.fixture(scope="module", name="directory")
def _directory(tiny_model: Path, batch: TrainingBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layouts")
    two_parts_each = 4
    write_model(directory / "qwen3-moe", tiny_model, FAMILIES["qwen3-moe"], num_hidden_layers=two_parts_each)
    return _run(directory, tiny_model, batch, LAYOUTS, also=run_briefly)


def _run(
    directory: Path, model: Path, batch: TrainingBatch, layouts: Mapping[str, Any], num: int = NUM_RANKS,
    also: Any = None,
) -> Path:  # fmt: skip
    alone = TorchBackend(make_spec(model), precision=DOUBLE)
    alone.train_step(batch, PolicyLoss())
    alone.save(directory / "saved by one")
    run_ranks(run_rank, (directory, model, batch, layouts, num, also), num)
    return directory


def _compare(
    directory: Path, layout: str, expected: Mapping[str, Any], num: int = NUM_RANKS, steps: Sequence[str] = STEPS
) -> None:
    first, last = (torch.load(directory / f"{layout}-{r}.pt", weights_only=False) for r in (0, num - 1))
    for step in steps:
        if step not in first:
            assert "pp" in layout and step == "credited"
            continue
        found, alone = first[step]["result"], expected[step]["result"]
        assert relative_error(first[step]["grads"], expected[step]["grads"]) <= 1e-9, step
        assert found.grad_norm == pytest.approx(alone.grad_norm, rel=1e-9)
        assert found.loss == pytest.approx(alone.loss, rel=1e-9)
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-9, abs=1e-12)
        assert found.metrics == last[step]["result"].metrics
    assert max(first["streamed"], first["streamed lora"]) <= 1e-12  # errors of the gradient
    assert min(values.min() for values in expected["sharp"]) < -1e4
    for name in ("logprobs", "sharp", "values", "top"):
        for own, other in zip(first[name], expected[name], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)  # told in float32
    for kind in ("weights", "codes", "adapter"):
        assert list(first[kind]) == list(expected[kind])
        assert all(torch.equal(first[kind][name], weight) for name, weight in expected[kind].items())
    assert any(weight.dtype == torch.int8 for weight in first["codes"].values()) and not last["codes"]
    assert any(weight.any() for name, weight in first["adapter"].items() if "lora_B" in name) and not last["adapter"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_layout_a_layout_has_the_gradients_metrics_and_weights_of_one_rank(
    directory: Path, expected: dict[str, Any], layout: str
) -> None:
    _compare(directory, layout, expected)


def test_parallel_layout_experts_are_divided_whatever_tokens_choose_and_layers_in_several_parts_of_a_stage(
    directory: Path,
) -> None:
    expected = steps("qwen3-moe", directory / "qwen3-moe", {}, brief=True)
    for layout in ONE:
        compare(directory, "qwen3-moe", layout, expected)


def test_parallel_layout_a_state_passes_from_layout_to_layout_and_every_export_is_the_same_model(
    directory: Path, tiny_model: Path, batch: TrainingBatch
) -> None:
    _follow(directory, tiny_model, batch, LAYOUTS)


def _follow(directory: Path, model: Path, batch: TrainingBatch, layouts: Mapping[str, Any]) -> None:
    alone = TorchBackend(make_spec(model), precision=DOUBLE)
    alone.train_step(batch, PolicyLoss())
    for name in layouts:
        alone.train_step(batch, PolicyLoss())
        other = TorchBackend(make_spec(model), precision=DOUBLE)
        other.load(directory / f"saved under {name}")
        assert other.num_steps == alone.num_steps
        exported = load_causal_lm(directory / f"export under {name}", torch.float32).state_dict()
        for (key, weight), (_, found) in zip(alone.weights(), other.weights(), strict=True):
            assert torch.equal(weight, found), (name, key)
            assert torch.equal(weight, exported[key]), (name, key)


@pytest.mark.slow
def test_parallel_layout_so_it_is_under_other_layouts(
    tiny_model: Path, batch: TrainingBatch, expected: dict[str, Any], tmp_path: Path
) -> None:
    _run(tmp_path, tiny_model, batch, MORE)
    for layout in MORE:
        _compare(tmp_path, layout, expected)
    _follow(tmp_path, tiny_model, batch, MORE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "chunks", "tied"), [(3, 1, True), (4, 1, False), (2, 2, True), (2, 3, False), (3, 2, True)]
)
def test_parallel_layout_so_it_is_in_many_stages_of_one_rank_each(
    tiny_model: Path, tmp_path: Path, stages: int, chunks: int, tied: bool
) -> None:
    """More of them than micro-batches, in the step that has one."""
    settings = {"num_hidden_layers": max(5, stages * chunks + 1), "tie_word_embeddings": tied}
    family = Family(config="Llama", settings=settings)
    model = write_model(tmp_path / "model", tiny_model, family)
    batch = reference(model, 0, torch.float64).batch
    own = {"pp": stages, "vpp": chunks}
    layouts = {"pp": own} if chunks == 1 else {"pp": own, "pp again": {"pp": stages}, "pp once more": own}
    expected = work(model, batch, {}, deep=True)
    _run(tmp_path, model, batch, layouts, stages)
    _compare(tmp_path, "pp", expected, stages, (*STEPS, "taught"))
    _follow(tmp_path, model, batch, layouts)
    found = torch.load(tmp_path / "pp-0.pt", weights_only=False)
    assert found["measured"].metrics == pytest.approx(expected["measured"].metrics, rel=1e-9, abs=1e-12)
    alone, some = expected["bfloat16"], found["bfloat16"]
    assert some["result"].loss == pytest.approx(alone["result"].loss, rel=1e-6)
    assert relative_error(some["grads"], alone["grads"]) <= (2e-3 if tied else 1e-9)
    assert all(torch.equal(found["few adapters"][name], w) for name, w in expected["few adapters"].items())
    for own, other in zip(found["without adapters"], expected["without adapters"], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_parallel_layout_so_it_is_where_stages_have_several_parts_and_several_ranks(
    tiny_model: Path, tmp_path: Path
) -> None:
    family = Family(config="Llama", settings={"num_hidden_layers": 5, "tie_word_embeddings": True})
    model = write_model(tmp_path / "model", tiny_model, family)
    batch = reference(model, 0, torch.float64).batch
    expected = work(model, batch, {})
    _run(tmp_path, model, batch, PARTS)
    for layout in (layout for layout in PARTS if layout not in AGAIN):
        _compare(tmp_path, layout, expected)
    _follow(tmp_path, model, batch, PARTS)


def test_parallel_layout_a_number_of_ranks_that_cannot_be_divided_is_refused(tiny_model: Path) -> None:
    spec = dataclasses.replace(make_spec(tiny_model, parallel=ParallelConfig(cp=2, tp=2)), world_size=6)
    with pytest.raises(PlacementError, match=r"the number of trainer ranks \(6\) must be divisible by"):
        TorchBackend(spec)
