"""What ranks that divide a mixture's experts do in their processes, and one rank alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES
from parallel_ranks import DOUBLE, LORA, NUM_RANKS, in_codes, whole_grads
from test_architectures import InFull
from training_helpers import logprobs_of, make_batch, make_spec

from roll.algorithms.losses import PolicyLoss
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend
from roll.types import TrainingBatch

LOSS = PolicyLoss(entropy_coefficient=0.3)
ONE: dict[str, dict[str, int]] = {
    "dp 2, tp 2, ep 2": {"tp": 2, "ep": 2},
    "pp 2 vpp 2, ep 2": {"pp": 2, "vpp": 2, "ep": 2},
}
MORE: dict[str, dict[str, int]] = {
    "ep 4": {"ep": 4},
    "dp 4, ep 2": {"ep": 2},
    "replicas 2, ep 2": {"dp_replicate": 2, "ep": 2},
    "cp 2, ep 4": {"cp": 2, "ep": 4},
    "cp 2, tp 2, ep 2": {"cp": 2, "tp": 2, "ep": 2},
    "tp 2, ep 4": {"tp": 2, "ep": 4},
    "pp 2, ep 2": {"pp": 2, "ep": 2},
}
EVENED: dict[str, dict[str, float]] = {
    "qwen3-moe": {"router_aux_loss": 0.3},
    "gpt-oss": {"router_aux_loss": 0.3},
    "deepseek-v3": {"router_bias_rate": 0.01},
    "glm4-moe": {"router_bias_rate": 0.01},
}
FAMILIES_OF_EXPERTS = ("qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3", "gpt-oss", "glm4-moe", "phi-moe")


def chosen_by_one_rank(batch: TrainingBatch, num_layers: int) -> TrainingBatch:
    """All tokens go to the first two experts: one rank has all of the work, and another none."""
    samples = (
        dataclasses.replace(s, experts=np.tile(np.array([1, 0], dtype=np.int16), (len(s), num_layers, 1)))
        for s in batch.samples
    )
    return dataclasses.replace(batch, samples=tuple(samples))


def build(model: Path, parallel: Mapping[str, int], *, lora: Any = None, **ranks: Any) -> TorchBackend:
    """One rank's trainer."""
    settings = {"max_tokens_per_micro_batch": 60, "parallel": ParallelConfig(**parallel), **ranks.pop("training", {})}
    return TorchBackend(dataclasses.replace(make_spec(model, lora=lora, **settings), **ranks), precision=DOUBLE)


def steps(name: str, model: Path, parallel: Mapping[str, int], *, brief: bool = False, **ranks: Any) -> dict[str, Any]:
    """Updates and what comes of them: the same calls, alone or as one of several ranks."""
    with InFull():
        policy = build(model, parallel, training=EVENED.get(name, {}), **ranks)
        found: dict[str, Any] = {"codes": in_codes(policy) if name == "qwen3-moe" else {}}
        one = make_batch(1)
        batches = {"plain": make_batch(0), "idle": dataclasses.replace(one, samples=one.samples[:1])}
        if name != "phi-moe":  # whose router's choice cannot be replayed
            batches["skewed"] = chosen_by_one_rank(make_batch(2), policy.network.routing.num_layers)
        if brief:
            del batches["plain"]
        else:
            batches["last"] = make_batch(3)
        for step, batch in batches.items():
            result = policy.train_step(batch, LOSS)
            found[step] = {"result": result, "grads": whole_grads(policy)}
        if "skewed" in batches:
            said = policy.forward(batches["skewed"], ["logprobs", "experts"])["experts"]
            assert all(
                (s.experts[:-1] == own[:-1]).all() for s, own in zip(batches["skewed"].samples, said, strict=True)
            )
        found["logprobs"] = logprobs_of(policy, make_batch(4))
        found["weights"] = {key: tensor for key, tensor in policy.weights() if tensor is not None}
        if brief:
            return found
        adapted = build(model, parallel, lora=LORA, **ranks)
        result = adapted.train_step(make_batch(5), LOSS)
        found["lora"] = {"result": result, "grads": whole_grads(adapted)}
    saving = build(model, parallel, training={"activation_checkpointing": True}, **ranks)  # in other threads: float32
    result = saving.train_step(make_batch(5), LOSS)
    found["recomputed"] = {"result": result, "grads": whole_grads(saving)}
    return found


def run_rank(rank: int, directory: Path, families: Mapping[str, Any]) -> None:
    """Every family in its layouts, as one of four ranks; a state passes from one to the next and back to one rank."""
    meeting = {"rank": rank, "world_size": NUM_RANKS, "init_method": f"file://{directory / 'meeting'}"}
    for name, layouts in families.items():
        run_layouts(directory, name, layouts, meeting)
    torch.distributed.destroy_process_group()


def run_layouts(directory: Path, name: str, layouts: Mapping[str, Any], ranks: Mapping[str, Any]) -> None:
    """One family's part of `run_rank`."""
    before = directory / f"{name} saved by one"
    for layout, parallel in layouts.items():
        found = steps(name, directory / name, parallel, **ranks)
        if ranks["rank"] == 0:
            torch.save(found, directory / f"{name} {layout}.pt")
        with InFull():
            backend = build(directory / name, parallel, **ranks)
            backend.load(before)
            backend.train_step(make_batch(6), LOSS)
        before = directory / f"{name} saved under {layout}"
        backend.save(before)
        backend.export(directory / f"{name} export under {layout}")


def run_briefly(directory: Path, ranks: Mapping[str, Any]) -> None:
    """Few layouts for every run of the tests, in processes that are there already."""
    for layout, parallel in ONE.items():
        found = steps("qwen3-moe", directory / "qwen3-moe", parallel, brief=True, **ranks)
        if ranks["rank"] == 0:
            torch.save(found, directory / f"qwen3-moe {layout}.pt")


def prepare(directory: Path, name: str, model: Path) -> None:
    """What `run_layouts` goes on from, by one rank."""
    assert FAMILIES[name].moe
    with InFull():
        alone = build(model, {})
        alone.train_step(make_batch(6), LOSS)
    alone.save(directory / f"{name} saved by one")
