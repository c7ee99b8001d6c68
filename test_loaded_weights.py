"""Several ranks, in every layout, hold together what the model's files hold, bit for bit, and export what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from families import FAMILIES, write_model
from loaded_ranks import ROLES, UNEVEN, WAYS, run_rank, spec_of_one
from safetensors.torch import load_file
from test_families_divided import REFUSED
from training_helpers import make_spec

from roll.training import TorchBackend

pytestmark = pytest.mark.slow

SIX = ("qwen3", "qwen3-moe", "deepseek-v3")
"""Tied embeddings, fused experts, experts and projections of low rank with odd sizes."""


@pytest.fixture(scope="module", name="models")
def _models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("loaded")
    for name, family in FAMILIES.items():
        write_model(directory / name, tiny_model, family)
    return directory


@pytest.fixture(scope="module", name="of_two")
def _of_two(models: Path) -> list[dict[Any, Any]]:
    return _found(models, 2, list(FAMILIES), WAYS)


@pytest.fixture(scope="module", name="of_six")
def _of_six(models: Path) -> list[dict[Any, Any]]:
    return _found(models, 6, list(SIX), UNEVEN)


def _found(models: Path, size: int, names: list[str], ways: dict[str, Any]) -> list[dict[Any, Any]]:
    mp.spawn(run_rank, (size, models, names, ways), nprocs=size)  # type: ignore[no-untyped-call]
    return [torch.load(models / f"found-{size}-{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_hold_what_the_files_hold(
    of_two: list[dict[Any, Any]], models: Path, name: str, way: str, tmp_path: Path
) -> None:
    for dtype in ("float32", "bfloat16"):
        for found in of_two:
            if (name, way) in REFUSED and way == "tp":
                assert REFUSED[name, way] in found[name, way, dtype]
                continue
            assert found[name, way, dtype] == [] or (way == "pp" and isinstance(found[name, way, dtype], str))
        if of_two[0][name, way, dtype] == []:
            alone = TorchBackend(spec_of_one(make_spec(models / name, dtype=dtype)))
            alone.export(tmp_path / dtype)
            _assert_same_export(models / "exports" / f"{name}, {way}, {dtype}", tmp_path / dtype)


@pytest.mark.parametrize("way", UNEVEN)
@pytest.mark.parametrize("name", SIX)
def test_six_ranks_hold_it_in_parts_of_unequal_sizes(of_six: list[dict[Any, Any]], name: str, way: str) -> None:
    for dtype in ("float32", "bfloat16"):
        assert [found[name, way, dtype] for found in of_six] == [[]] * 6


@pytest.mark.parametrize("role", ROLES)
def test_every_role_loads_what_one_rank_loads(
    of_two: list[dict[Any, Any]], of_six: list[dict[Any, Any]], role: str
) -> None:
    for found in (*of_two, *of_six):
        for (name, way, _), wrong in found.items():
            assert name != role or wrong == [], way


def _assert_same_export(mine: Path, other: Path) -> None:
    """Tensors byte for byte, and every other file."""
    found, wanted = ({k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()} for d in (mine, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    rest = [sorted(f.name for f in d.iterdir() if f.suffix != ".safetensors") for d in (mine, other)]
    assert rest[0] == rest[1]
    for file in rest[0]:
        assert (mine / file).read_bytes() == (other / file).read_bytes(), file
