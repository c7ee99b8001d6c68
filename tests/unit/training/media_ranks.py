"""What one or two ranks compute for batches with images, for `test_media.py`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from critic_helpers import VALUE_LOSS, valued
from parallel_ranks import DOUBLE, FULL
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from training_helpers import make_spec
from worlds.vision_batches import media_batch
from worlds.vision_models import VisionWorld

from roll.config.model import LoRAConfig, VisionConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.training.network.vision_parts import list_tower_blocks
from roll.types import TrainingBatch, TrainingSample

WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({}, {}),
    "tp": ({"tp": 2}, {}),
    "cp": ({"cp": 2}, {}),
    "pp": ({"pp": 2}, {}),
    "critic, dp": ({}, {"role": "critic"}),
    "critic, tp": ({"tp": 2}, {"role": "critic"}),
    "frozen tower, dp": ({}, {"freeze": ["tower"]}),
    "adapters, dp": ({}, {"lora": LoRAConfig(rank=2)}),
}
"""Layouts, and changes of the trainer, by name."""
ALONE = {"": "dp", "critic": "critic, dp", "frozen tower": "frozen tower, dp", "adapters": "adapters, dp"}
"""By what comes before the comma in a way's name, the way whose trainer has one rank."""


def steps(world: VisionWorld, way: str, **ranks: Any) -> tuple[Any, Any] | str:
    """Metrics and gradients of an update, or why the layout is refused."""
    parallel, changes = WAYS[way]
    if not ranks:
        parallel = {}
    spec = make_spec(world.model, max_tokens_per_micro_batch=100, parallel=ParallelConfig(**parallel))
    role = changes.get("role", "policy")
    vision = VisionConfig.model_validate({"freeze": changes.get("freeze", [])})
    model = spec.model.model_copy(update={"vision": vision, "lora": changes.get("lora")})
    spec = dataclasses.replace(
        spec, role=role, model=model, holds_reference=role == "policy", media_dir=world.store.directory, **ranks
    )
    batch, loss = (media_batch(world), FULL) if role == "policy" else (valued(media_batch(world)), VALUE_LOSS)
    try:
        backend = TorchBackend(spec, precision=DOUBLE)
        if ranks and not parallel:
            check_sharded(backend)
        result = backend.train_step(batch, loss)
        return result.metrics, get_gradients(backend)
    except ModelError as error:
        return str(error)


def check_sharded(backend: TorchBackend) -> None:
    """Check that every block of the tower is a bucket of its own, and that no parameter is whole on a rank."""
    for name, parameter in backend.network.named_parameters():
        assert isinstance(parameter, DTensor), name
    blocks = list_tower_blocks(backend.model)
    assert len(blocks) >= 2 and all(isinstance(block, FSDPModule) for block in blocks)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    tower = [(n, p) for n, p in backend.model.named_parameters() if "vision" in n or "visual" in n]
    numbered = {parameter for name, parameter in tower if re.search(r"(layers?|blocks)\.\d+\.", name)}
    assert len(numbered) > 10 and numbered <= inside


def get_gradients(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """Gradients by name, without weights that no pass uses (the pooling head of a SigLIP tower)."""
    found = {}
    for name, parameter in backend.masters.parameters.items():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach().clone()
    return found


def run_rank(rank: int, directory: Path, names: tuple[str, ...], ways: tuple[str, ...]) -> None:
    """Every family in every way, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    worlds = {name: VisionWorld.create(directory / name, directory / f"{name} media") for name in names}
    found = {(name, way): steps(worlds[name], way, **ranks) for name in names for way in ways}
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()


UNEVEN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "5 tiles and 1, no image": ((0, 1), ()),
    "1 tile and 5, 1 tile": ((1, 0), (1,)),
    "5 tiles, 1 tile": ((0,), (1,)),
    "5 tiles, 1 tile, and no image": ((0,), (1, 0, 1), (), ()),
}
"""The images of the samples of a batch, by name: image 0 has 5 tiles, image 1 has 1 tile."""


def uneven_step(world: VisionWorld, name: str, **ranks: Any) -> tuple[Any, Any]:
    """Metrics and gradients of an update for samples with other numbers of tiles."""
    rng, samples = np.random.default_rng(0), []
    for number, images in enumerate(UNEVEN[name]):
        prompt, media = world.prompt("{}" * len(images) + "what is it?", *images)
        tokens = np.concatenate([prompt, rng.integers(3, 250, 6)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        samples.append(
            TrainingSample(
                sample_id=str(number),
                unit=number,
                prefix_length=len(prompt),
                token_ids=tokens,
                loss_mask=mask,
                media=media,
                advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                max_length=16,
            )
        )
    spec = make_spec(world.model, max_tokens_per_micro_batch=100)
    spec = dataclasses.replace(spec, holds_reference=True, media_dir=world.store.directory, **ranks)
    backend = TorchBackend(spec, precision=DOUBLE)
    return backend.train_step(TrainingBatch(samples=tuple(samples)), FULL).metrics, get_gradients(backend)


def run_uneven_rank(rank: int, directory: Path) -> None:
    """All cases of `UNEVEN`, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    world = VisionWorld.create(directory / "model", directory / "media")
    found = {name: uneven_step(world, name, **ranks) for name in UNEVEN}
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()
