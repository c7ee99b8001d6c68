"""What one or two ranks compute for batches with audio and video, for `test_omni.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parallel_ranks import DOUBLE, FULL
from training_helpers import make_spec
from worlds.omni_models import OmniWorld

from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.types import TrainingBatch, TrainingSample

TEXTS = (
    "{audio 0} and {video 0}, what",
    "{audio 0} and {video 1}, what",
    "{video 2}{image 0}{audio 1} so",
    "hear: {audio 2}",
    "{image 1} ab {audio 1} cd {video 2} ef {image 0} gh {audio 2}",
    "nothing here",
)
"""Prompts; the first two are a group. Micro-batches differ in their kinds of media."""
OTHER_ORDER = ("hear {audio 0} and see {image 0}", "see {image 1} and hear {audio 1}", "see {video 0}", "nothing")
"""Prompts of which two ranks get two each, with other kinds of media in another order."""
WAYS: dict[str, dict[str, int]] = {"dp": {}, "tp": {"tp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}


def omni_batch(world: OmniWorld, texts: Sequence[str] = TEXTS, *, group_size: int = 2) -> TrainingBatch:
    """Groups of samples, each with a random answer."""
    rng = np.random.default_rng(0)
    samples = []
    for number, text in enumerate(texts):
        prompt, media = world.prompt(text)
        for index in range(group_size):
            tokens = np.concatenate([prompt, rng.integers(3, 250, 5)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            samples.append(
                TrainingSample(
                    sample_id=f"{number}.{index}",
                    unit=max(number - 1, 0) if texts is TEXTS else number,
                    prefix_length=len(prompt),
                    token_ids=tokens,
                    loss_mask=mask,
                    media=media,
                    advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                    max_length=16,
                )
            )
    return TrainingBatch(samples=tuple(samples))


def steps(
    world: OmniWorld, parallel: Mapping[str, int], texts: Sequence[str] = TEXTS, **ranks: Any
) -> tuple[Any, Any] | str:
    """Metrics and gradients of an update, or why the layout is refused."""
    spec = make_spec(world.model, max_tokens_per_micro_batch=120, parallel=ParallelConfig(**parallel))
    spec = dataclasses.replace(spec, holds_reference=True, media_dir=world.store.directory, **ranks)
    try:
        backend = TorchBackend(spec, precision=DOUBLE)
        result = backend.train_step(omni_batch(world, texts), FULL)
    except ModelError as error:
        return str(error)
    grads = {name: parameter.grad for name, parameter in backend.masters.parameters.items()}
    whole = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}
    return result.metrics, {name: grad.detach().clone() for name, grad in whole.items() if grad is not None}


def run_rank(rank: int, directory: Path, names: tuple[str, ...]) -> None:
    """Every model in every way, as one of two ranks."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    worlds = {name: OmniWorld.create(directory / name, directory / f"{name} media") for name in names}
    found = {(name, way): steps(worlds[name], WAYS[way], **ranks) for name in names for way in WAYS}
    found |= {(name, "other order"): steps(worlds[name], {}, OTHER_ORDER, **ranks) for name in names}
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()
