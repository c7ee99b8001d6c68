"""Two ranks that divide a model of any family find what one rank finds, or refuse it by what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from family_ranks import WAYS, kind, run_rank, steps
from training_helpers import relative_error
from worlds.ranks import run_ranks

pytestmark = pytest.mark.slow

IN_FLOAT32 = ("gemma2", "gemma3", "cohere2", "olmo2")
"""Their norms compute in float32 whatever they are given."""
REFUSED = {
    ("llama4", "cp"): "scales queries by position",
    ("gpt-oss", "cp"): "sinks",
    ("qwen3-next", "cp"): "recurrent",
    ("lfm2", "cp"): "recurrent",
    ("gpt-oss", "tp"): "base_model_tp_plan",
    ("phi-moe", "tp"): "base_model_tp_plan",
    ("lfm2", "tp"): "base_model_tp_plan",
}


@pytest.fixture(scope="module", name="found")
def _found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("families")
    alone = {}
    for name, family in FAMILIES.items():
        write_model(directory / name, tiny_model, family)
        by_layer = {key: value * 2 for key, value in family.settings.items() if isinstance(value, list)}
        deep = {"num_hidden_layers": 4, **by_layer}
        write_model(directory / kind(name, "vpp"), tiny_model, family, **deep)
        for own in {kind(name, way) for way in WAYS}:
            alone[own, "alone"] = steps(name, directory / own, {})
    run_ranks(run_rank, (directory,), 2)
    return alone | torch.load(directory / "found.pt", weights_only=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tensor_parallel_family_a_family_is_divided_or_refused(found: dict[str, Any], name: str, way: str) -> None:
    mine, expected = found[name, way], found[kind(name, way), "alone"]
    if (name, way) in REFUSED:
        assert isinstance(mine, str)
        assert REFUSED[name, way] in mine
        return
    limit = 1e-5 if FAMILIES[name].moe else 1e-6 if name in IN_FLOAT32 else 1e-9
    if way in ("pp", "vpp"):  # the same to the bit, but that tied embeddings add up their gradient in another order
        limit = 1e-15
    for (metrics, own), (same, other) in zip(mine, expected, strict=True):
        assert relative_error(own, other) <= limit
        assert metrics == pytest.approx(same, rel=100 * limit, abs=limit)
