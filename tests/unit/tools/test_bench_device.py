"""The benchmark of devices runs where there is none, and its figures hang together."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_bench_device_every_figure_is_measured_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_device")
    size = bench.SIZES["tiny"]
    found = bench.measure(size, torch.device("cpu"))
    for name in ("bench_device", "_trainer_parts", "_report"):
        sys.modules.pop(name, None)
    ceilings, trainer = found["ceilings"], found["trainer"]
    assert found["device"] == "cpu"
    assert ceilings["square_flops_per_s"] == max(ceilings[f"square_{side}_flops_per_s"] for side in size.squares)
    layer = size.hidden * (2 * size.hidden + 2 * size.hidden * size.kv_heads // size.heads + 3 * size.inner + 2)
    assert trainer["num_weights"] == size.words * size.hidden + size.layers * layer + size.hidden
    assert trainer["utilisation"] == pytest.approx(
        trainer["model_flops"] / trainer["forward_backward_s"] / ceilings["square_flops_per_s"]
    )
    assert found["attention"]["num_tokens"] <= size.micro_batch_tokens
    assert all(
        math.isfinite(value) and value > 0
        for part in ("ceilings", "trainer", "vocabulary")
        for value in found[part].values()
    )
