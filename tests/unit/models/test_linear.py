"""Which weights of a model are those of linear layers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from families import FAMILIES, write_model

from roll.errors import ModelError
from roll.models import list_linear_weights

STAYS = re.compile(
    r"embed|lm_head|norm|conv\.conv|conv1d|mlp\.gate\.weight|block_sparse_moe\.gate\.|shared_expert_gate"
)
"""Matrices that are no linear layers, or none of those that go to engines in 8 bits."""
IN_ONE_TENSOR = ("llama4", "gpt-oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_model_linear_every_matrix_but_embeddings_outputs_and_routers(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    path = write_model(tmp_path / name, tiny_model, FAMILIES[name])
    with safe_open(path / "model.safetensors", framework="pt") as file:
        matrices = {key for key in file.keys() if len(file.get_slice(key).get_shape()) == 2}  # noqa: SIM118
    if name in IN_ONE_TENSOR:
        with pytest.raises(
            ModelError, match=r"experts\.\w+' of all experts in one tensor\. Set weight_sync\.quantization"
        ):
            list_linear_weights(str(path))
    else:
        found = list_linear_weights(str(path))
        assert found == {key for key in matrices if not STAYS.search(key)}
        assert any("experts" in key for key in found) == FAMILIES[name].moe
