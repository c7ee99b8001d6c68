"""A model directory is trained as the same model by one rank and by two, or refused by every rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from directory_ranks import LAYOUTS, run_rank, train
from safetensors.torch import load_file
from worlds.model_directories import REFUSED, TRAINED, make_directory
from worlds.ranks import run_ranks


def make_all(kinds: dict, model: Path, target: Path) -> dict[str, Path]:
    return {kind: make_directory(kind, model, target / str(number)) for number, kind in enumerate(kinds)}


def test_model_directories_are_trained_alike_by_one_rank(tiny_model: Path, tmp_path: Path):
    for kind, directory in make_all(TRAINED, tiny_model, tmp_path).items():
        train(directory).export(tmp_path / "exports" / kind)
        found, expected = (load_file(tmp_path / "exports" / k / "model.safetensors") for k in (kind, "plain"))
        assert "lm_head.weight" not in found
        assert found.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items()), kind


@pytest.mark.slow
def test_model_directories_are_trained_alike_by_two_ranks(tiny_model: Path, tmp_path: Path):
    trained = make_all(TRAINED, tiny_model, tmp_path / "trained")
    refused = make_all(REFUSED, tiny_model, tmp_path / "refused")
    exports = tmp_path / "exports"
    exports.mkdir()
    run_ranks(run_rank, (tmp_path / "meeting", trained, refused, exports), 2)
    names = load_file(tiny_model / "model.safetensors").keys()
    for layout in LAYOUTS:
        for kind in trained:
            found = load_file(exports / layout / kind / "model.safetensors")
            expected = load_file(exports / layout / "plain" / "model.safetensors")
            assert found.keys() == names, (layout, kind)
            assert all(torch.equal(weight, expected[name]) for name, weight in found.items()), (layout, kind)
    for rank in range(2):
        said = torch.load(exports / f"refused-{rank}.pt")
        assert said.keys() == refused.keys()
        assert all(re.search(REFUSED[kind][1], message) for kind, message in said.items())
