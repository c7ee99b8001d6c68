"""What any train back-end is asked for `test_contract.py`, through `roll.protocols.TrainBackend` alone.

Every scenario builds its trainers with `build`, so one back-end's answers can be compared with another's: of one rank
or of several, of micro-batches or whole batches. It returns plain values, on every rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from critic_helpers import VALUE_LOSS, valued
from megatron_on_cpu import megatron_on_cpu
from test_reward_model import batch_of
from training_helpers import branching_batch, make_batch, make_spec

from roll.algorithms.losses import BradleyTerryLoss, PolicyAndValueLoss, PolicyLoss
from roll.config.model import LoRAConfig
from roll.errors import TrainingDivergedError, UnsupportedError
from roll.protocols import TrainBackend
from roll.training.packing import blocks
from roll.types import ForwardOptions, LossInputs, LossOutputs, LossRequirements, StepResult, TrainingBatch

Build = Callable[..., TrainBackend]
"""`build(**settings)`: a trainer; `role` and what else a `TrainerSpec` has, and settings of `training`."""

OFF_POLICY = PolicyLoss(kl_coefficient=0.1)
PLAIN = {"epsilon": 1.0, "learning_rate": 1.0}
"""AdamW's first step then moves each weight by -g / (|g| + 1): weights tell of gradients, also of small ones."""
COURSE = {
    "epsilon": 1e-3,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "schedule": "cosine",
    "warmup_steps": 2,
}
LORA = LoRAConfig(rank=2, alpha=6.0)
SPEC = ("role", "value_head_learning_rate", "holds_reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a scenario runs."""

    model: Path
    directory: Path
    """Shared by the ranks; `by torch` in it was saved by the back-end `torch` on one rank, after one step."""
    off_policy: TrainingBatch
    rank: int = 0


def weights_of(backend: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights() if tensor is not None}


def course(backend: TrainBackend, seeds: tuple[int, ...], loss: Any = None) -> list[StepResult]:
    return [backend.train_step(make_batch(seed), loss or PolicyLoss()) for seed in seeds]


def nan_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs.sum() * float("nan"))


def infinite_loss(inputs: LossInputs) -> LossOutputs:
    """Whose gradients are finite."""
    return LossOutputs(loss=inputs.logprobs.sum() + float("inf"))


nan_loss.needs = infinite_loss.needs = LossRequirements()


def one_step(build: Build, place: Place) -> dict[str, Any]:
    backend = build(**PLAIN)
    return {"result": backend.train_step(place.off_policy, OFF_POLICY), "weights": weights_of(backend)}


def accumulated(build: Build, place: Place) -> dict[str, Any]:
    """The units of a batch in two calls behind one update; gradients that are scaled; and others that are discarded."""
    batch = place.off_policy
    half = len({s.unit for s in batch.samples}) // 2
    parts = [[s for s in batch.samples if (s.unit < half) is first] for first in (True, False)]
    first, second = (dataclasses.replace(batch, samples=tuple(samples)) for samples in parts)
    backend = build(**PLAIN)
    try:
        results = [backend.forward_backward(first, OFF_POLICY, batch.counts)]
    except UnsupportedError as error:
        return {"raised": str(error)}
    results.append(backend.forward_backward(second, OFF_POLICY, batch.counts, last=True))
    update, weights = backend.optim_step(), weights_of(backend)
    scaled = build(**PLAIN)
    scaled.forward_backward(make_batch(7), PolicyLoss())
    scaled.discard_gradients()
    scaled.forward_backward(batch, OFF_POLICY, batch.counts + batch.counts, last=True)
    scaled_update = scaled.optim_step(scale=2.0)
    return {
        "results": results,
        "updates": [update, scaled_update],
        "weights": [weights, weights_of(scaled)],
    }


def checkpointed_step(build: Build, place: Place) -> dict[str, Any]:
    backend = build(activation_checkpointing=True, **PLAIN)
    return {"result": backend.train_step(place.off_policy, OFF_POLICY), "weights": weights_of(backend)}


def several_steps(build: Build, place: Place) -> dict[str, Any]:
    backend = build(**COURSE)
    return {"results": course(backend, (0, 1, 2, 3)), "weights": weights_of(backend)}


def little_work(build: Build, place: Place) -> dict[str, Any]:
    """One sample: a second rank has none."""
    backend, batch = build(**PLAIN), make_batch(3)
    result = backend.train_step(dataclasses.replace(batch, samples=batch.samples[:1]), PolicyLoss())
    return {"results": [result, *course(backend, (4,))], "weights": weights_of(backend)}


def branching(build: Build, place: Place) -> dict[str, Any]:
    with mock.patch.object(blocks, "MIN_SHARED_TOKENS", 2):
        backend = build(**PLAIN)
        result = backend.train_step(branching_batch(), PolicyLoss(ratio_level="sequence"))
    return {"result": result, "weights": weights_of(backend)}


def not_finite(build: Build, place: Place) -> dict[str, Any]:
    backend = build(max_nonfinite_steps=2, **COURSE)
    results = course(backend, (0,))
    before = weights_of(backend)
    skipped = [course(backend, (1,), loss)[0].stepped for loss in (nan_loss,)]
    results += course(backend, (2,))
    middle = weights_of(backend)
    skipped += [course(backend, (1,), infinite_loss)[0].stepped]
    same = [middle, weights_of(backend)]
    try:
        course(backend, (1,), nan_loss)
        raised = ""
    except TrainingDivergedError as error:
        raised = str(error)
    results += course(backend, (3,))
    return {
        "results": results,
        "skipped": skipped,
        "raised": raised,
        "unchanged": [all(torch.equal(same[0][n], same[1][n]) for n in same[0]), bool(before) == (place.rank == 0)],
        "weights": weights_of(backend),
    }


def with_adapters(build: Build, place: Place) -> dict[str, Any]:
    backend = build(lora=LORA, **COURSE)
    results = course(backend, (0, 1, 2))
    asked = {
        on: backend.forward(make_batch(5), ["logprobs"], ForwardOptions(adapter=on))["logprobs"] for on in (True, False)
    }
    backend.export(place.directory / "lora" / "model")
    written = sorted(p.name for p in (place.directory / "lora").iterdir()) if place.rank == 0 else []
    return {"results": results, "weights": weights_of(backend), "logprobs": asked, "written": written}


def asking(build: Build, place: Place) -> dict[str, Any]:
    """Questions change nothing, whatever is asked between steps."""
    backend, batch = build(value_head_learning_rate=0.1, **COURSE), valued(make_batch(1))
    loss = PolicyAndValueLoss(policy=PolicyLoss(), value=VALUE_LOSS, coefficient=0.3)
    results, said = [], []
    for _ in range(2):
        results.append(backend.measure(batch, loss))
        results.append(backend.train_step(batch, loss))
        said.append(backend.forward(batch, ["logprobs", "values", "top_logprobs"], ForwardOptions(num_top=3)))
    return {"results": results, "said": said, "weights": weights_of(backend)}


def divergence(build: Build, place: Place) -> dict[str, Any]:
    backend = build(holds_reference=True, **COURSE)
    results = course(backend, (0, 1, 2), PolicyLoss(kl_coefficient=0.2, kl_estimator="full"))
    return {"results": results, "weights": weights_of(backend)}


def critic(build: Build, place: Place) -> dict[str, Any]:
    backend, batches = build(role="critic", **COURSE), [valued(make_batch(seed), seed) for seed in range(3)]
    results = [backend.train_step(batch, VALUE_LOSS) for batch in batches]
    values = backend.forward(batches[0], ["values"])["values"]
    return {"results": results, "weights": weights_of(backend), "values": values}


def reward_model(build: Build, place: Place) -> dict[str, Any]:
    backend, batch = build(role="reward_model", **COURSE), batch_of(place.model)
    results = [backend.train_step(batch, BradleyTerryLoss()) for _ in range(3)]
    return {"results": results, "weights": weights_of(backend)}


def frozen(build: Build, place: Place) -> dict[str, Any]:
    backend = build(role="reference")
    try:
        course(backend, (0,))
        raised = ""
    except UnsupportedError as error:
        raised = str(error)
    return {"logprobs": backend.forward(make_batch(2), ["logprobs"])["logprobs"], "raised": raised}


def state(build: Build, place: Place) -> dict[str, Any]:
    """Two steps, saved before them, in the background where that can be; once more from what was saved, in a new
    trainer; and from what torch saved."""
    first, settings = build(**COURSE), {**COURSE}
    course(first, (0,))
    first.save(place.directory / "saved", background=True)
    straight = {"results": course(first, (1, 2)), "weights": weights_of(first)}
    written = first.is_save_written(wait=True)
    torch.rand(3)
    again = build(**settings)
    course(again, (5,))  # nothing of it is left
    again.load(place.directory / "saved")
    resumed = {"results": course(again, (1, 2)), "weights": weights_of(again)}
    again.load(place.directory / "by torch")
    return {
        "written": written,
        "straight": straight,
        "resumed": resumed,
        "from torch": {"results": course(again, (1, 2)), "weights": weights_of(again)},
    }


def export(build: Build, place: Place) -> dict[str, Any]:
    backend = build(**COURSE)
    course(backend, (0,))
    backend.export(place.directory / "export")
    backend.offload(["parameters", "optimizer"])
    backend.onload(["parameters", "optimizer"])
    return {"weights": weights_of(backend), "results": course(backend, (1,))}


SCENARIOS: dict[str, Callable[[Build, Place], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        one_step,
        accumulated,
        checkpointed_step,
        several_steps,
        little_work,
        branching,
        not_finite,
        with_adapters,
        asking,
        divergence,
        critic,
        reward_model,
        frozen,
        state,
        export,
    )
}


def perform(rank: int, num_ranks: int, backend: str, settings: dict[str, Any], place: Place) -> None:
    """Every scenario on one rank; writes down what was found, and what was raised."""
    with megatron_on_cpu() if "megatron" in backend else contextlib.nullcontext():
        _perform(rank, num_ranks, backend, settings, place)


def _perform(rank: int, num_ranks: int, backend: str, settings: dict[str, Any], place: Place) -> None:
    module, _, name = backend.partition(":")
    kind = getattr(importlib.import_module(module), name)
    if "deepspeed" in module:
        starting = importlib.import_module("roll.training.deepspeed.initialize")
        starting.PERSISTENT_NUMEL = 50  # type: ignore[attr-defined]  # else a tiny model's weights all stay whole
    meeting = f"file://{place.directory / 'meeting'}" if num_ranks > 1 else None
    built: list[TrainBackend] = []

    def build(**own: Any) -> TrainBackend:
        spec = make_spec(place.model, **settings, **{n: v for n, v in own.items() if n not in SPEC})
        where = {"rank": rank, "world_size": num_ranks, "init_method": meeting}
        built.append(kind(dataclasses.replace(spec, **where, **{n: v for n, v in own.items() if n in SPEC})))
        return built[-1]

    place = dataclasses.replace(place, rank=rank)
    found = {}
    for scenario_name, scenario in SCENARIOS.items():
        np.random.seed(rank)
        found[scenario_name] = scenario(build, place)
    torch.save(found, place.directory / f"found-{rank}.pt")
    built[-1].close()
