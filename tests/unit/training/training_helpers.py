"""Batches, trainers, and an independent reference that pads instead of packing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roll.config.model import ModelConfig
from roll.config.training import TrainingConfig
from roll.training.spec import TrainerSpec
from roll.types import ForwardOptions, TrainingBatch, TrainingSample

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_batch(
    seed: int = 0,
    *,
    groups: int = 4,
    group_size: int = 4,
    prompt: tuple[int, int] = (3, 12),
    response: tuple[int, int] = (1, 14),
    vocab: int = 260,
    temperature: float = 0.9,
) -> TrainingBatch:
    """Random groups. Every third response has a gap in its loss mask, as a multi-turn rollout has."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prefix = rng.integers(4, vocab, rng.integers(*prompt))
        for index in range(group_size):
            length = int(rng.integers(*response))
            tokens = np.concatenate([prefix, rng.integers(4, vocab, length)]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prefix)
            if index % 3 == 2 and length > 3:
                mask[len(prefix) + 1 : len(prefix) + 3] = False
            samples.append(
                TrainingSample(
                    sample_id=f"{group}.{index}",
                    unit=group,
                    prefix_length=len(prefix),
                    token_ids=tokens,
                    loss_mask=mask,
                    advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                    max_length=16,
                )
            )
    return TrainingBatch(samples=tuple(samples), temperature=temperature)


def branching_batch(
    seed: int = 0, *, units: int = 2, size: int = 8, grown: tuple[int, int] = (1, 12), temperature: float = 0.9
) -> TrainingBatch:
    """Units whose samples fork anywhere: within prompts, within tokens that others train, where another one ends.

    Three quarters of them are two samples of one rollout each.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for unit in range(units):
        known = [rng.integers(4, 260, rng.integers(3, 12)).astype(np.int32)]
        for index in range(size):
            before = known[rng.integers(len(known))]
            context = before[: rng.integers(2, len(before) + 1)]
            tokens = np.concatenate([context, rng.integers(4, 260, rng.integers(*grown))]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(context)
            if index % 2:  # trained tokens lie before the fork, too
                mask |= rng.random(len(tokens)) < 0.5
            mask[0] = False
            samples.append(
                TrainingSample(
                    sample_id=f"{unit}.{index}",
                    unit=unit,
                    sequence=f"{unit}/{index // 2}" if index % 8 < 6 else "",
                    prefix_length=len(context),
                    token_ids=tokens,
                    loss_mask=mask,
                    advantages=np.where(mask, rng.normal(size=len(tokens)), 0.0).astype(np.float32),
                    rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                    chunk_ids=np.where(mask, np.arange(len(tokens)) // 4, -1).astype(np.int32),
                    max_length=16,
                )
            )
            known.append(tokens)
        samples[-1] = dataclasses.replace(samples[-2], sample_id=samples[-1].sample_id)  # two that are equal
    return TrainingBatch(samples=tuple(samples), temperature=temperature)


def off_policy(batch: TrainingBatch, model: Any, seed: int = 0) -> TrainingBatch:
    """The same rollouts, made by policies near `model`: so ratios differ from 1 and some are clipped."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        current = [values.float().numpy() for values in reference_logprobs(model, batch)]
    samples = []
    for sample, values in zip(batch.samples, current, strict=True):
        shift, away = rng.normal(0, 0.3, (2, len(values)))
        ratio = np.exp(-shift)  # where it is next to a clipping edge, rounding decides on which side it falls
        shift[np.minimum(np.abs(ratio - 0.8), np.abs(ratio - 1.2)) < 1e-3] = 0.0
        old, ref = (np.where(sample.loss_mask, values + x, 0.0).astype(np.float32) for x in (shift, away))
        samples.append(dataclasses.replace(sample, old_logprobs=old, ref_logprobs=ref))
    return dataclasses.replace(batch, samples=tuple(samples))


def make_spec(model: Path, *, dtype: str = "float32", lora: Any = None, seed: int = 0, **training: Any) -> TrainerSpec:
    """A trainer of one rank on one thread; settings of `training` by keyword."""
    settings = {"num_steps": 10, "learning_rate": 1e-3, "max_grad_norm": 1e9, "num_threads": 1} | training
    return TrainerSpec(
        model_path=str(model),
        model=ModelConfig(path=str(model), dtype=dtype, lora=lora),  # type: ignore[arg-type]
        training=TrainingConfig(**settings),
        seed=seed,
    )


def reference_logprobs(model: Any, batch: TrainingBatch) -> list[torch.Tensor]:
    """Log-probs of every sample by the model's own eager forward pass over a padded batch."""
    longest = max(len(sample) for sample in batch.samples)
    ids = torch.zeros(len(batch.samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(batch.samples):
        ids[row, : len(sample)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        attention[row, : len(sample)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits
    table = torch.log_softmax(logits / batch.temperature, dim=-1)
    result = []
    for row, sample in enumerate(batch.samples):
        own = table[row, : len(sample) - 1].gather(1, ids[row, 1 : len(sample), None])[:, 0]
        result.append(torch.cat([own.new_zeros(1), own]))
    return result


def reference_loss(logprobs: list[torch.Tensor], batch: TrainingBatch, *, clip: float, kl: float) -> torch.Tensor:
    """GRPO as in the paper: a mean over sequences of a mean over tokens, PPO's clip, k3.

    The engine's probabilities are corrected for by a factor old / rollout, at most 2.
    """
    terms = []
    for values, sample in zip(logprobs, batch.samples, strict=True):
        tokens = np.flatnonzero(sample.loss_mask)
        if not len(tokens):
            continue
        new = values[torch.from_numpy(tokens)]

        def array(x: np.ndarray | None, like: torch.Tensor = new, tokens: np.ndarray = tokens) -> torch.Tensor:
            return like.detach() if x is None else torch.from_numpy(x[tokens]).to(like.dtype)

        advantage = array(sample.advantages)
        ratio = torch.exp(new - array(sample.old_logprobs))
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        objective = objective * torch.exp(array(sample.old_logprobs) - array(sample.rollout_logprobs)).clamp(max=2.0)
        if kl:
            gap = array(sample.ref_logprobs) - new
            objective = objective - kl * (gap.exp() - gap - 1)
        terms.append(objective.mean())
    return -torch.stack(terms).mean()


def grads_of(backend: Any) -> dict[str, torch.Tensor]:
    """The gradients of the step before, whole on every rank."""
    result = {}
    for name, parameter in backend.masters.parameters.items():
        grad = backend.masters.get_grad(name)
        if hasattr(parameter.grad, "full_tensor"):
            grad = parameter.grad.full_tensor()
        assert grad is not None, name
        result[name] = grad.detach().clone()
    return result


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """||found - expected|| / ||expected|| over all weights together."""
    assert found.keys() == expected.keys()
    difference = sum((found[n].double() - expected[n].double()).square().sum() for n in expected)
    return float((difference / sum(g.double().square().sum() for g in expected.values())).sqrt())


def logprobs_of(backend: Any, batch: TrainingBatch, *, adapter: bool = True) -> list[np.ndarray]:
    """Log-probs alone."""
    return backend.forward(batch, ["logprobs"], ForwardOptions(adapter=adapter))["logprobs"]


def values_of(backend: Any, batch: TrainingBatch) -> list[np.ndarray]:
    """Values alone."""
    return backend.forward(batch, ["values"])["values"]
