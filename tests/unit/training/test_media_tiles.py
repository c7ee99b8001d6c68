"""Ranks whose images have other numbers of tiles run the sharded tower equally often."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from media_ranks import UNEVEN, run_uneven_rank, uneven_step
from training_helpers import relative_error
from worlds.ranks import run_ranks
from worlds.vision_models import VisionWorld, write_vision_model

from roll.models.multimodal.features import batch_media


def write_world(directory: Path) -> VisionWorld:
    """Write a SmolVLM whose images are not enlarged: one of 30 × 30 pixels has 1 tile, one of 40 × 56 has 5."""
    model = write_vision_model(directory / "model", "smolvlm")
    file = model / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["do_resize"] = False
    file.write_text(json.dumps(config))
    return VisionWorld.create(model, directory / "media")


def test_media_tiles_images_with_other_numbers_of_tiles_are_other_runs_of_the_tower(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    processed = [world.processor.process(world.store.get(world.digests[index])) for index in (0, 1, 0)]
    assert [one.inputs["pixel_values"].shape[1] for one in processed] == [5, 1, 5]
    assert batch_media(processed) == [[0, 2], [1]]


@pytest.mark.slow
def test_media_tiles_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    world = write_world(tmp_path)
    alone = {name: uneven_step(world, name) for name in UNEVEN}
    run_ranks(run_uneven_rank, (tmp_path,), 2)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for name, (metrics, grads) in found.items():
        same, expected = alone[name]
        assert sum("vision" in key for key in grads) > 10
        assert grads.keys() == expected.keys(), name
        assert metrics == pytest.approx(same, rel=1e-5, abs=1e-6), name
        assert relative_error(grads, expected) < 1e-5, name
