"""Batches of every preset for a real (tiny) model, and their gradient by a padded pass; what two ranks do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import PROMPT, random_attempts
from critic_helpers import valued
from pipeline_helpers import algorithm_of, take_step
from training_helpers import grads_of, make_batch, make_spec, values_of

from roll.config.algorithm import AlgorithmConfig
from roll.config.model import LoRAConfig
from roll.pipelines.learning.losses import build_policy_loss
from roll.protocols import LossFn
from roll.training import TorchBackend
from roll.types import AttentionStatistics, LossInputs, SequenceAttention, TrainingBatch, TrainingSample

VOCAB = 260
STILL = {"learning_rate": 1e-30}
"""A step that moves nothing, so that one back-end serves all presets."""
ALONE = {"share_prefix": False, "max_tokens_per_micro_batch": 1}
"""A micro-batch for each sample."""


def algorithm(name: str) -> AlgorithmConfig:
    """The preset with KL penalty and entropy bonus, so that their terms are there too."""
    return algorithm_of(name, kl={"coefficient": 0.1}, entropy={"coefficient": 0.01})


def loss_of(name: str) -> LossFn:
    return build_policy_loss(algorithm(name))


def batch_of(name: str, model: Any, seed: int = 3) -> TrainingBatch:
    """Conversations of random tokens, near the model's policy; an expert's among them for IPA."""
    attempts = random_attempts(seed, "multi_turn", critics=2 if name == "asy_ppo" else 1)
    if name == "ipa":
        attempts = [replace(a, expert=True, reward=1.0) if a.index == 0 else a for a in attempts]
    batch = take_step(algorithm(name), attempts).batch
    rng = np.random.default_rng(seed)
    prompts = {s.unit: rng.integers(4, VOCAB, PROMPT).astype(np.int32) for s in batch.samples}
    samples = []
    for sample in batch.samples:
        own = rng.integers(4, VOCAB, len(sample) - PROMPT).astype(np.int32)
        samples.append(replace(sample, token_ids=np.concatenate([prompts[sample.unit], own])))
    batch = replace(batch, samples=tuple(samples), temperature=0.9)
    with torch.no_grad():
        current = [logprobs.numpy() for logprobs, _ in padded_pass(model, batch)]
    samples = []
    for sample, values in zip(batch.samples, current, strict=True):
        near = {
            array: np.where(sample.loss_mask, values + rng.normal(0, 0.2, len(values)), 0.0).astype(np.float32)
            for array in ("old_logprobs", "ref_logprobs", "rollout_logprobs")
        }
        samples.append(replace(sample, **near))
    return replace(batch, samples=tuple(samples))


def padded_pass(model: Any, batch: TrainingBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-prob and entropy [L] at every token of every sample, by the model's own forward pass over padded rows."""
    longest = max(len(s) for s in batch.samples)
    ids = torch.zeros(len(batch.samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(batch.samples):
        ids[row, : len(sample)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        attention[row, : len(sample)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits.double() / batch.temperature
    table = torch.log_softmax(logits, dim=-1)
    result = []
    for row, sample in enumerate(batch.samples):
        own = table[row, : len(sample) - 1]
        logprobs = own.gather(1, ids[row, 1 : len(sample), None])[:, 0]
        entropy = -(own.exp() * own).sum(-1)
        zero = own.new_zeros(1)
        result.append((torch.cat([zero, logprobs]), torch.cat([zero, entropy])))
    return result


def padded_gradient(model: Any, batch: TrainingBatch, loss: LossFn) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of all weights, with the loss computed over the whole batch at once in float64."""
    model.zero_grad()
    passed = padded_pass(model, batch)
    counted = [(s, p) for s, p in zip(batch.samples, passed, strict=True) if s.loss_mask.any()]
    places = [torch.from_numpy(np.flatnonzero(s.loss_mask)) for s, _ in counted]
    outputs = loss(_inputs(batch, [s for s, _ in counted], [p for _, p in counted], places))
    outputs.loss.backward()
    return outputs.loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _inputs(
    batch: TrainingBatch,
    samples: Sequence[TrainingSample],
    passed: Sequence[tuple[torch.Tensor, torch.Tensor]],
    places: Sequence[torch.Tensor],
) -> LossInputs:
    def column(name: str) -> torch.Tensor:
        parts = [torch.from_numpy(getattr(s, name))[at] for s, at in zip(samples, places, strict=True)]
        return torch.cat(parts).double()

    lengths = torch.tensor([len(at) for at in places])
    chunks, offset = [], 0
    for sample, at in zip(samples, places, strict=True):
        own = [0] * len(at) if sample.chunk_ids is None else sample.chunk_ids[at.numpy()].tolist()
        known = sorted(set(own))
        chunks += [offset + known.index(c) for c in own]
        offset += len(known)
    bonus = [np.ones(len(s), np.bool_) if s.entropy_mask is None else s.entropy_mask for s in samples]
    return LossInputs(
        logprobs=torch.cat([p[0][at] for p, at in zip(passed, places, strict=True)]),
        entropy=torch.cat([p[1][at] for p, at in zip(passed, places, strict=True)]),
        entropy_mask=torch.cat([torch.from_numpy(b)[at] for b, at in zip(bonus, places, strict=True)]),
        old_logprobs=column("old_logprobs"),
        rollout_logprobs=column("rollout_logprobs"),
        behavior_logprobs=column("behavior_logprobs") if samples[0].behavior_logprobs is not None else None,
        ref_logprobs=column("ref_logprobs"),
        advantages=column("advantages"),
        expert=torch.tensor([s.expert for s in samples]).repeat_interleave(lengths),
        attention=tuple(SequenceAttention(s.attention, s.loss_mask) for s in samples if s.attention) or None,
        sequence_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        sequence_lengths=lengths.double(),
        chunk_ids=torch.tensor(chunks),
        num_tokens=float(batch.num_loss_tokens),
        num_expert_tokens=float(sum(int(s.loss_mask.sum()) for s in batch.samples if s.expert)),
        num_sequences=float(batch.num_sequences),
        num_units=float(batch.num_units),
        max_lengths=torch.tensor([s.max_length for s in samples]).double(),
    )


def disturbed(batch: TrainingBatch, seed: int) -> TrainingBatch:
    """Other numbers wherever the loss does not look, and other tokens after the last one that it counts."""
    rng = np.random.default_rng(seed)
    samples = []
    for sample in batch.samples:
        outside = ~sample.loss_mask
        changed: dict[str, Any] = {
            name: np.where(outside, 1e6 * rng.normal(size=len(sample)), getattr(sample, name)).astype(np.float32)
            for name in ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
        }
        if sample.chunk_ids is not None:
            changed["chunk_ids"] = np.where(outside, 77, sample.chunk_ids).astype(np.int32)
        if sample.attention is not None:
            noise = np.where(outside, 100 * rng.normal(size=len(sample)), 0.0).astype(np.float32)
            found = sample.attention
            changed["attention"] = AttentionStatistics(waad=found.waad + noise, fai=found.fai - noise)
        if sample.entropy_mask is not None:
            changed["entropy_mask"] = sample.entropy_mask ^ outside
        last = int(np.flatnonzero(sample.loss_mask)[-1]) if sample.loss_mask.any() else sample.prefix_length - 1
        after = np.arange(len(sample)) > last
        changed["token_ids"] = np.where(after, rng.integers(4, VOCAB, len(sample)), sample.token_ids).astype(np.int32)
        samples.append(replace(sample, **changed))
    return replace(batch, samples=tuple(samples))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step for a back-end, which must find the same on one rank and on two."""

    batch: TrainingBatch
    loss: LossFn
    backend: str
    """Of `BACKENDS`."""


BACKENDS: dict[str, dict[str, Any]] = {
    "packed": {"max_tokens_per_micro_batch": 40},
    "alone": ALONE,
    "all outputs": {**ALONE, "holds_reference": True, "value_head_learning_rate": 0.01},
    "adapters": {**ALONE, "lora": LoRAConfig(rank=2), "value_head_learning_rate": 0.01},
    "critic": {**ALONE, "role": "critic"},
}


WITH_VALUES = ("all outputs", "adapters")


def backend_of(kind: str, model: Path, **ranks: Any) -> TorchBackend:
    given = dict(BACKENDS[kind])
    own = {k: given.pop(k) for k in ("holds_reference", "value_head_learning_rate", "role") if k in given}
    return TorchBackend(replace(make_spec(model, **STILL, **given), **own, **ranks))


def idle_case(name: str, batch: TrainingBatch) -> Case:
    """An odd number of samples, each a micro-batch of its own, so that one of two ranks idles at last; with value head,
    entropy and full divergence beside the preset's own loss.
    """
    few = [s for s in batch.samples if s.loss_mask.any()][:3]
    few = few[: 3 if len(few) > 2 else 1]
    few[0] = replace(few[0], expert=False)  # whose tokens teach a critic too
    everything = algorithm_of(
        name,
        advantage={"estimator": "gae", "mean": "none", "std": "none", "whiten": "none"},
        critic={"shared": True, "num_critics": 1, "drop_agreed": 0.0, "value_clip": 0.5},
        entropy={"coefficient": 0.01, "drop_divergent": 0.0},
        kl={"coefficient": 0.1, "estimator": "full", "apply_to": "loss"},
    )
    batch = valued(replace(batch, samples=tuple(few)))
    return Case(batch=batch, loss=build_policy_loss(everything), backend="all outputs")


def run_rank(rank: int, directory: Path, model: Path, cases: dict[str, Case]) -> None:
    """One of two ranks, over all given cases; rank 0 writes down losses and gradients."""
    ranks = {"rank": rank, "world_size": 2, "init_method": f"file://{directory / 'meeting'}"}
    backends = {kind: backend_of(kind, model, **ranks) for kind in BACKENDS}
    found = {}
    for name, case in cases.items():
        result = backends[case.backend].train_step(case.batch, case.loss)
        found[name] = result.loss, result.metrics, grads_of(backends[case.backend])
    values = {kind: values_of(backends[kind], make_batch(5)) for kind in WITH_VALUES}
    if rank == 0:
        torch.save((found, values), directory / "found.pt")
    backends["packed"].close()


def loss_inputs_of_batch(
    batch: TrainingBatch,
    logprobs: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    entropy: Sequence[np.ndarray],
) -> LossInputs:
    """Of a whole batch, from arrays [L] of each sample; what a sample does not bring is the current one."""
    at = [torch.from_numpy(np.flatnonzero(s.loss_mask)) for s in batch.samples]
    kept = [i for i in range(len(at)) if len(at[i])]
    places = [at[i] for i in kept]
    samples = []
    for i in kept:
        s, own = batch.samples[i], logprobs[i]
        old = s.old_logprobs if s.old_logprobs is not None else own
        known = s.behavior_logprobs if s.behavior_logprobs is not None else np.full(len(s), np.nan, np.float32)
        behavior = np.where(np.isnan(known), old, known)
        ref = s.ref_logprobs if s.ref_logprobs is not None else own
        samples.append(replace(s, old_logprobs=old, behavior_logprobs=behavior, ref_logprobs=ref))
    passed = [(torch.from_numpy(logprobs[i]).double(), torch.from_numpy(entropy[i]).double()) for i in kept]
    inputs = _inputs(batch, samples, passed, places)

    def column(arrays: Sequence[np.ndarray | None]) -> torch.Tensor:
        parts = [np.zeros(len(batch.samples[i]), np.float32) if (a := arrays[i]) is None else a for i in kept]
        return torch.cat([torch.from_numpy(p)[place] for p, place in zip(parts, places, strict=True)]).double()

    return replace(
        inputs,
        logprobs=inputs.logprobs.requires_grad_(),
        values=column(values).requires_grad_(),
        old_values=column([s.old_values for s in batch.samples]),
        returns=column([s.returns for s in batch.samples]),
    )
