"""The estimated memory of vision towers, beside what autograd keeps for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds.vision_models import VISION_MODELS, picture, write_vision_model

from roll.config.model import VisionConfig
from roll.config.tower_memory import estimate_tower_bytes
from roll.media import MediaStore
from roll.models import describe_model
from roll.models.multimodal import MediaInputs, MediaProcessor
from roll.models.multimodal.features import encode_media

FAST = ("smolvlm", "qwen3-vl", "gemma3")
REST = (pytest.mark.matrix, pytest.mark.slow)
FAMILIES = [pytest.param(name, marks=() if name in FAST else REST) for name in VISION_MODELS]


def widen(path: Path) -> None:
    """Replace the model of a directory by one with a wider and deeper tower, in which vectors outweigh statistics."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size = 128, 384
    setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", 6)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(path)


def measure_kept_bytes(model: Any, inputs: MediaInputs, digests: list[str]) -> tuple[int, int]:
    """Return the bytes that autograd keeps in the tower for images, without weights, and their feature tokens."""
    import torch

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = encode_media(model, [inputs.get(digest) for digest in digests], "cpu", model.dtype)
    return sum(t.untyped_storage().nbytes() for t in saved.values()), sum(len(own.embeds) for own in features)


@pytest.mark.parametrize("name", FAMILIES)
def test_tower_memory_is_what_autograd_keeps(tmp_path: Path, name: str) -> None:
    """Within 15 %, as the trainer loads the model; a frozen tower keeps almost nothing."""
    from roll.models import load_causal_lm
    from roll.training.network.vision_parts import freeze_parts

    path = write_vision_model(tmp_path / "model", name)
    widen(path)
    tower = describe_model(path).tower
    assert tower is not None and (tower.num_layers, tower.hidden_size, tower.intermediate_size) == (6, 128, 384)
    inputs = MediaInputs(MediaStore(None), MediaProcessor(path))
    digests = [inputs.store.add_image(picture(seed, 64, 64)) for seed in range(2)]
    for dtype, element in (("float32", 4), ("bfloat16", 2)):
        model = load_causal_lm(path, dtype).train()
        for frozen in ([], ["tower"], ["tower", "projector"]):
            vision = VisionConfig.model_validate({"freeze": frozen})
            freeze_parts(model, vision)
            kept, num_tokens = measure_kept_bytes(model, inputs, digests)
            found = estimate_tower_bytes(vision, tower, num_tokens, element, checkpointing=False)
            if not frozen:
                whole = kept
                assert found["vision tower"] == pytest.approx(kept, rel=0.15)
            else:
                assert kept <= sum(found.values()) <= 0.2 * whole
