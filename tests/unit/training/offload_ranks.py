"""What ranks with and without offload do in their processes for `test_offload.py`; each compares its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from training_helpers import make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend
from roll.training.memory import activation_offload
from roll.training.memory.host_memory import HostMemory
from roll.training.packing import blocks

OFFLOAD: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": True},
    "activations": {"offload_activations": True},
    "both": {"offload_optimizer": True, "offload_activations": True},
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "layers again": {"activation_checkpointing": True, "tiled_mlp_tokens": 8},
    "8 bits": {"optimizer": "adamw_8bit", "dtype": "bfloat16"},
    "adapters": {"lora": LoRAConfig(rank=2, dropout=0.1), "activation_checkpointing": True},
    "adapters over 4 bits": {"lora": LoRAConfig(rank=2, base="nf4"), "dtype": "bfloat16"},
}
SETTINGS = {"max_tokens_per_micro_batch": 60, "max_grad_norm": 0.5, "weight_decay": 0.1}
"""Several micro-batches, and gradients that are clipped."""


@contextlib.contextmanager
def apart() -> Iterator[list[int]]:
    """A device whose memory is not the host's: what moves is copied, however small. Gives the sizes of what left."""
    left: list[int] = []

    def away(_: HostMemory, tensor: torch.Tensor) -> torch.Tensor:
        left.append(tensor.nbytes)
        return tensor.clone()

    with (
        mock.patch.object(HostMemory, "to_host", away),
        mock.patch.object(HostMemory, "to_device", lambda _, tensor: tensor.clone()),
        mock.patch.object(activation_offload, "MIN_OFFLOAD_BYTES", 1),
        mock.patch.object(blocks, "MIN_SHARED_TOKENS", 2),
    ):
        yield left


def build(model: Path, settings: Mapping[str, Any], **ranks: Any) -> TorchBackend:
    return TorchBackend(dataclasses.replace(make_spec(model, **{**SETTINGS, **settings}), **ranks))


def three_steps(backend: TorchBackend) -> dict[str, Any]:
    """Losses, norms, and all that a checkpoint would hold of this rank's weights and moments."""
    results = [backend.train_step(make_batch(seed), PolicyLoss()) for seed in range(3)]
    return {"losses": [(r.loss, r.grad_norm) for r in results], **collect_state(backend)}


def collect_state(backend: TorchBackend) -> dict[str, Any]:
    found = {f"weight/{n}": backend.masters.get_local(n).clone() for n in backend.masters.parameters}
    for name, moments in backend.optimizer.get_moments().items():
        found |= {f"{label}/{name}": moment.clone() for label, moment in moments.items()}
    return found | {n: t.detach().clone() for n, t in backend.weights() if t is not None}


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    assert found.keys() == expected.keys()
    same = {
        n: torch.equal(a, expected[n]) if isinstance(a, torch.Tensor) else a == expected[n] for n, a in found.items()
    }
    return [name for name, is_same in same.items() if not is_same]


def run_rank(
    rank: int, directory: Path, model: Path, layouts: Mapping[str, dict[str, int]], runs: Mapping[str, Any], num: int
) -> None:
    """Every run under every layout; a state passes from offloaded to not, and back."""
    ranks = {"rank": rank, "world_size": num, "init_method": f"file://{directory / 'meeting'}"}
    for layout, parallel in layouts.items():
        for name, run in runs.items():
            settings = {**run, "parallel": ParallelConfig(**parallel)}
            with apart() as left:
                plain = build(model, settings, **ranks)
                expected = three_steps(plain)
                assert not left
                for ways, offload in OFFLOAD.items():
                    backend = build(model, {**settings, **offload}, **ranks)
                    wrong = differing(three_steps(backend), expected)
                    assert not wrong, f"{layout}, {name}, {ways}: {wrong[:3]}"
                    assert left, f"{layout}, {name}, {ways}: nothing left the device"
                    left.clear()
                check_checkpoints(directory / f"{layout} {name}", plain, backend)
    torch.distributed.destroy_process_group()


def check_checkpoints(directory: Path, plain: TorchBackend, offloaded: TorchBackend) -> None:
    """Each takes what the other saved, and both go on alike."""
    for source, target in ((offloaded, plain), (plain, offloaded)):
        path = directory / ("offloaded" if source is offloaded else "plain")
        source.save(path)
        source.train_step(make_batch(3), PolicyLoss())
        target.load(path)
        target.train_step(make_batch(3), PolicyLoss())
        wrong = differing(collect_state(target), collect_state(source))
        assert not wrong, wrong[:3]
