"""Weight syncs of adapters with ranks and engines as Ray actors: the run learns what one process learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos.harness import Run, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_adapters_on_ray_equal_one_process(tmp_path: Path, tiny_model: Path) -> None:
    """Two ranks send the adapter to two engines; the same run in one process has one of each."""
    settings: dict[str, Any] = {
        **tiny_config(tiny_model, num_steps=3),
        "model": {"path": str(tiny_model), "dtype": "float32", "lora": {"rank": 4}},
        "weight_sync": {"lora": "adapter"},
    }
    settings["training"] |= {"learning_rate": 1e-2}
    ray = {"type": "ray", "devices_per_node": 4, "device_mapping": {"actor_train": "0-1", "actor_infer": "2-3"}}
    alone, together = Run(tmp_path / "alone", settings), Run(tmp_path / "ray", {**settings, "cluster": ray})
    alone.finish()
    together.finish()
    found, other = ([row for row in run.metrics() if row["kind"] == "train"] for run in (alone, together))
    assert [row["reward/mean"] for row in other] == [row["reward/mean"] for row in found]
    stepped = [row for row in other if row["training/stepped"]]
    assert stepped
    assert max(row["agreement/logprob_mean_abs"] for row in stepped) <= 1e-4
    assert max(row["sync/probe_mean_abs"] or 0.0 for row in other) <= 3e-5
    # Rank 4 on every linear layer of the tiny model, in float32, and no other weight.
    assert {row["sync/bytes"] for row in stepped} == {row["sync/bytes"] for row in found if row["training/stepped"]}
