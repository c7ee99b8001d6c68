"""Exports of trained vision-language models load in transformers, with their processors, and compute the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from training_helpers import make_spec
from worlds.vision_batches import media_batch
from worlds.vision_models import VISION_MODELS, VisionWorld, write_vision_model

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig, VisionConfig
from roll.models.directory import check_directory
from roll.models.multimodal import MediaProcessor
from roll.training import TorchBackend

pytestmark = pytest.mark.integration

FAST = ("smolvlm", "qwen3-vl", "gemma3")
REST = (pytest.mark.matrix, pytest.mark.slow)
FAMILIES = [pytest.param(name, marks=() if name in FAST else REST) for name in VISION_MODELS]
WAYS: dict[str, tuple[LoRAConfig | None, list[str]]] = {
    "full": (None, []),
    "frozen tower": (None, ["tower"]),
    "adapters": (LoRAConfig(rank=2), []),
    "adapters, frozen tower": (LoRAConfig(rank=2), ["tower", "projector"]),
}


@pytest.fixture(scope="module", name="worlds")
def _worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, VisionWorld] = {}

    def world(name: str) -> VisionWorld:
        if name not in made:
            directory = tmp_path_factory.mktemp("vision")
            made[name] = VisionWorld.create(write_vision_model(directory / "model", name), directory / "media")
        return made[name]

    return world


def train(world: VisionWorld, way: str) -> TorchBackend:
    lora, frozen = WAYS[way]
    spec = make_spec(world.model, max_tokens_per_micro_batch=300, learning_rate=3e-3)
    vision = VisionConfig.model_validate({"freeze": frozen})
    model = spec.model.model_copy(update={"lora": lora, "vision": vision})
    backend = TorchBackend(dataclasses.replace(spec, model=model, media_dir=world.store.directory))
    for _ in range(2):  # the first update moves only B of an adapter
        assert backend.train_step(media_batch(world, num_prompts=2), PolicyLoss()).stepped
    return backend


def load(path: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def check_same(world: VisionWorld, backend: TorchBackend, model: Any) -> None:
    batch = media_batch(world, group_size=1)
    found = backend.forward(batch, ["logprobs"])["logprobs"]
    for sample, own in zip(batch.samples, found, strict=True):
        with torch.no_grad():
            expected = world.reference_logprobs(model, sample.token_ids, sample.media).numpy()
        mask = sample.loss_mask
        np.testing.assert_allclose(own[mask], expected[mask[1:]], atol=1e-5)


def read_names(path: Path) -> set[str]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_media_exports_load_in_transformers(worlds: Any, tmp_path: Path, name: str, way: str) -> None:
    world = worlds(name)
    backend = train(world, way)
    path = tmp_path / "model"
    backend.export(path)
    check_directory(path)
    assert read_names(path) == read_names(world.model)  # the names of the published checkpoint, which vLLM reads
    check_same(world, backend, load(path))
    before, now = load(world.model), load(path)
    changed = {key for key, weight in now.named_parameters() if not torch.equal(weight, before.get_parameter(key))}
    assert changed
    if "frozen" in way:
        assert not any("vision" in key and "merger" not in key and "connector" not in key for key in changed)
    for file in ("processor_config.json", "chat_template.jinja"):
        assert (path / file).read_bytes() == (world.model / file).read_bytes()
    image = world.store.get(world.digests[0])
    one, other = (MediaProcessor(directory).process(image) for directory in (world.model, path))
    assert one.token_ids.tolist() == other.token_ids.tolist() and one.grid == other.grid
    assert all(torch.equal(tensor, other.inputs[key]) for key, tensor in one.inputs.items())
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == [type(now).__name__]


@pytest.mark.parametrize("way", ["adapters", "adapters, frozen tower"])
@pytest.mark.parametrize("name", FAMILIES)
def test_media_exports_of_adapters_load_in_peft(
    worlds: Any, tmp_path: Path, name: str, way: str, recwarn: pytest.WarningsRecorder
) -> None:
    world = worlds(name)
    backend = train(world, way)
    backend.export(tmp_path / "model")
    recwarn.clear()
    model = PeftModel.from_pretrained(load(world.model), str(tmp_path / "adapter")).eval()
    assert not [str(warning.message) for warning in recwarn if "missing" in str(warning.message)]
    check_same(world, backend, model)
