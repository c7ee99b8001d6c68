"""Batches of a small diffusion model, and what one or two ranks do with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.diffusion.losses import (
    DiffusionLoss,
    DPOLoss,
    FlowMatchingLoss,
    NFTLoss,
    PolicyGradientLoss,
    RewardGradientLoss,
)
from roll.diffusion.records import DenoisingSettings, DiffusionBatch, DiffusionSample, SampleRequest
from roll.diffusion.trainer import DiffusionTrainer
from worlds.diffusion_models import make_spec

SDE = DenoisingSettings(num_steps=4, noise_level=0.7, batch_size=3, guidance_scale=1.5)
REWARD = "worlds.diffusion_models:reward_of_brightness"
LOSSES: dict[str, DiffusionLoss | RewardGradientLoss] = {
    "flow_matching": FlowMatchingLoss(num_draws=2, prompt_dropout=0.3),
    "flow_grpo": PolicyGradientLoss(clip_range=0.2, kl_coefficient=0.5, noise_level=0.7),
    "nft": NFTLoss(kl_coefficient=0.1, num_draws=2),
    "dpo": DPOLoss(beta=10.0),
    "reward_gradient": RewardGradientLoss(reward=REWARD, num_gradient_steps=2, scale=1.0),
}


def make_requests(count: int = 5, **fields: Any) -> list[SampleRequest]:
    return [SampleRequest(sample_id=str(i), prompt="x" * (i % 2), seed=100 + i, **fields) for i in range(count)]


def make_batch(trainer: DiffusionTrainer, count: int = 6, size: int = 4) -> DiffusionBatch:
    paths = trainer.sample(make_requests(count), SDE)
    return DiffusionBatch(
        samples=tuple(
            DiffusionSample(
                sample_id=path.request.sample_id,
                prompt=path.request.prompt,
                seed=7 + i // 2,
                unit=i // 2,
                path=dataclasses.replace(path, images=None),
                advantages=np.full(4, (-1.0) ** i, np.float32) * np.float32(1 + i),
                weight=1.0 + 0.1 * i,
            )
            for i, path in enumerate(paths)
        ),
        settings=SDE,
        micro_batch_size=size,
    )


def read_weights(trainer: DiffusionTrainer) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.network.named_parameters()
    }


def collect_gradients(trainer: DiffusionTrainer) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in trainer.network.named_parameters()
        if p.grad is not None
    }


def run_rank(rank: int, directory: Path, losses: list[str]) -> None:
    """One of two ranks: samples, and one update with each loss."""
    spec = make_spec(lora=None)
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    found: dict[str, Any] = {}
    for name in losses:
        trainer = DiffusionTrainer(dataclasses.replace(spec, **ranks))
        found[name] = run_updates(trainer, name)
        if name == "nft":
            trainer.save(directory / "state")
            found["buffers"] = [t.full_tensor().clone() for t in trainer._saved_buffers]
            again = DiffusionTrainer(dataclasses.replace(spec, **ranks))
            again.start_old_policy()
            again.load(directory / "state")
            found["loaded"] = [t.full_tensor().clone() for t in again._saved_buffers]
            again.export(directory / "model")
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()


def run_updates(trainer: DiffusionTrainer, name: str) -> dict[str, Any]:
    trainer.start_old_policy()
    batch = make_batch(trainer, count=6)
    results = [trainer.train_step(batch, LOSSES[name]) for _ in range(2)]
    trainer.update_old_policy(0.5)
    return {
        "latents": np.stack([s.path.latents for s in batch.samples if s.path]),
        "losses": [result.loss for result in results],
        "weights": read_weights(trainer),
    }


SIZES: dict[str, dict[str, int]] = {"sd3": {}, "flux": {}, "wan": {"num_frames": 5}}
"""Sizes of the models of pipeline directories besides height and width."""


def family_batch(trainer: DiffusionTrainer, family: str, paths: Any = None) -> DiffusionBatch:
    """Return a batch of four samples of a pipeline's model: two pairs."""
    settings = dataclasses.replace(SDE, num_steps=3, guidance_scale=1.0 if family == "flux" else 1.5)
    if paths is None:
        requests = [SampleRequest(sample_id=str(i), prompt="ab"[i % 2 :], seed=i) for i in range(4)]
        paths = trainer.sample(requests, settings)
    else:
        settings = dataclasses.replace(settings, guidance_scale=1.0)
    return DiffusionBatch(
        samples=tuple(
            DiffusionSample(
                sample_id=path.request.sample_id,
                prompt=path.request.prompt,
                seed=7 + i // 2,
                unit=i // 2,
                path=dataclasses.replace(path, images=None),
                first_frame=path.request.first_frame,
                advantages=np.full(3, (-1.0) ** i, np.float32),
            )
            for i, path in enumerate(paths)
        ),
        settings=settings,
        micro_batch_size=4,
    )


def run_family(trainer: DiffusionTrainer, family: str) -> dict[str, Any]:
    """One update with every loss; each begins with the weights of the one before."""
    trainer.start_old_policy()
    batch, found = family_batch(trainer, family), {}
    for name, loss in LOSSES.items():
        result = trainer.train_step(batch, loss)
        found[name] = {"loss": result.loss, "grad_norm": result.grad_norm}
    return found


def run_family_rank(rank: int, directory: Path, spec: Any, family: str) -> None:
    """One of two ranks: one update with every loss."""
    init = f"file://{directory / 'meeting'}"
    trainer = DiffusionTrainer(dataclasses.replace(spec, rank=rank, world_size=2, init_method=init))
    found = run_family(trainer, family)
    if rank == 0:
        torch.save(found, directory / "found.pt")
    torch.distributed.destroy_process_group()
