"""Two ranks with weights in 4 bits or moments in 8 bits do what one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_ranks import DOUBLE, run_rank, work
from training_helpers import make_spec, relative_error
from worlds.ranks import run_ranks
from worlds.tiny_model import write_tiny_model

from roll.errors import CheckpointError
from roll.training import TorchBackend
from roll.training.memory.adamw_8bit import dequantize_moments

pytestmark = pytest.mark.slow


def test_small_ranks_two_ranks_do_what_one_does(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden=64)
    one = work(model, tmp_path, "one")
    run_ranks(run_rank, (tmp_path, model), 2)
    for layout in ("dp_shard", "tp"):
        found = torch.load(tmp_path / f"{layout}.pt", weights_only=False)
        assert relative_error(found["weights"], one["weights"]) <= 1e-9
        assert relative_error(found["straight"], one["straight"]) <= 1e-4  # a rounding may fall to the other side
        assert all(torch.equal(found["resumed"][name], found["straight"][name]) for name in one["weights"])
        if "4 bits" in found:
            assert relative_error(found["4 bits"], one["4 bits"]) <= 1e-9
            assert relative_error(found["sent"], one["sent"]) <= 1e-9
    alone = [TorchBackend(make_spec(model, optimizer="adamw_8bit"), precision=DOUBLE) for _ in range(2)]
    alone[0].load(tmp_path / "one")
    alone[1].load(tmp_path / "dp_shard")
    for name, own in alone[0].optimizer.get_moments().items():
        if "moment1_codes" in own:
            pairs = zip(
                dequantize_moments(own), dequantize_moments(alone[1].optimizer.get_moments()[name]), strict=True
            )
            assert all(float((a - b).norm() / a.norm()) < 1e-3 for a, b in pairs)
    with pytest.raises(
        CheckpointError, match="tensors with other shapes"
    ):  # a row's blocks end where a rank's part of it does
        alone[0].load(tmp_path / "tp")
