"""What ranks of every layout do in their processes for `test_parallel.py`; rank 0 writes down what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from critic_helpers import VALUE_LOSS, valued
from training_helpers import grads_of, logprobs_of, make_batch, make_spec, relative_error, values_of

from roll.algorithms.correction import Correction
from roll.algorithms.losses import AttentionCreditLoss, DistillationLoss, PolicyAndValueLoss, PolicyLoss
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.training import TorchBackend
from roll.training.engine_weights import build_engine_weights
from roll.training.precision import Precision
from roll.types import AttentionRange, BatchCounts, Divergence, ForwardOptions, TrainingBatch

DOUBLE = Precision(compute=torch.float64, master=torch.float64)
LORA = LoRAConfig(rank=2, use_rslora=True, rank_pattern={"q_proj|q_a_proj": 3})
FULL = PolicyLoss(correction=Correction(upper=None), entropy_coefficient=0.3, kl_coefficient=0.2, kl_estimator="full")
BOTH = PolicyAndValueLoss(policy=FULL, value=VALUE_LOSS, coefficient=0.5)
RANGE = AttentionRange(window=4, horizon=(2, 7))

LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2, tp 2": {"tp": 2},
    "pp 2, cp 2": {"pp": 2, "cp": 2},
}
MORE: dict[str, dict[str, int]] = {
    "dp 2, cp 2": {"cp": 2},
    "pp 2, dp 2": {"pp": 2},
    "pp 2, tp 2": {"pp": 2, "tp": 2},
    "pp 2, replicas 2": {"pp": 2, "dp_replicate": 2},
    "cp 2, tp 2": {"cp": 2, "tp": 2},
    "replicas 2, dp 2": {"dp_replicate": 2},
    "cp 4": {"cp": 4},
    "replicas 2, tp 2": {"dp_replicate": 2, "tp": 2},
    "replicas 2, cp 2": {"dp_replicate": 2, "cp": 2},
}
PARTS: dict[str, dict[str, int]] = {
    "pp 2 vpp 2, dp 2": {"pp": 2, "vpp": 2},
    "pp 2 vpp 2, tp 2": {"pp": 2, "vpp": 2, "tp": 2},
    "pp 2 vpp 2, cp 2": {"pp": 2, "vpp": 2, "cp": 2},
    "pp 2, tp 2 again": {"pp": 2, "tp": 2},
}
"""Of a model of more layers."""
AGAIN = ("pp again", "pp once more", "pp 2, tp 2 again")
"""Layouts through which a state passes, and that do nothing besides."""
NUM_RANKS = 4


def whole_grads(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """The gradients of the step before, of all stages."""
    return backend.ranks.merge_stages(grads_of(backend))


def compute_norms_in_double() -> Any:
    """Compute Llama's norms in float64: transformers computes them in float32, which rounds gradients at 1e-7."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon))

    return mock.patch.object(LlamaRMSNorm, "forward", forward)


def accumulate_by_unit(backend: TorchBackend, batch: TrainingBatch, loss: Any, factor: float = 3.3) -> None:
    """Update with the gradients of one unit after the other, which divide by the counts of the batch x `factor`."""
    counts = BatchCounts(**{name: count * factor for name, count in dataclasses.asdict(batch.counts).items()})
    for unit in sorted({sample.unit for sample in batch.samples}, reverse=True):
        own = tuple(sample for sample in batch.samples if sample.unit == unit)
        backend.forward_backward(dataclasses.replace(batch, samples=own), loss, counts)
    backend.optim_step(scale=factor)


def in_codes(backend: TorchBackend) -> dict[str, torch.Tensor]:
    """What engines get of a policy whose linear weights travel as int8; empty on ranks other than 0."""
    spec = dataclasses.replace(backend.spec, quantization="int8")
    return {name: tensor.clone() for name, tensor in build_engine_weights(backend, spec) if tensor is not None}


def work(
    model: Path, batch: TrainingBatch, parallel: Mapping[str, int], *, deep: bool = False, **ranks: Any
) -> dict[str, Any]:
    """Three updates, and what comes of them: the same calls, alone or as one of several ranks.

    A `deep` model has several stages of its own, in one of which are adapters.
    """

    def build(
        role: str = "policy",
        *,
        lora: Any = None,
        precision: Any = DOUBLE,
        activation_checkpointing: bool = False,
        **more: Any,
    ) -> TorchBackend:
        settings: dict[str, Any] = {
            "max_tokens_per_micro_batch": 60,
            "activation_checkpointing": activation_checkpointing,
        }
        settings["tiled_mlp_tokens"] = 8 if lora else None
        spec = make_spec(model, lora=lora, parallel=ParallelConfig(**parallel), **settings)
        return TorchBackend(dataclasses.replace(spec, role=role, **more, **ranks), precision=precision)  # type: ignore[arg-type]

    found: dict[str, Any] = {}
    policy = build(holds_reference=True)
    one = dataclasses.replace(batch, samples=batch.samples[:1])
    for name, own in (("plain", batch), ("again", make_batch(2)), ("idle", one)):
        result = policy.train_step(own, FULL)
        found[name] = {"result": result, "grads": whole_grads(policy)}
    found["logprobs"] = logprobs_of(policy, batch)
    found["sharp"] = logprobs_of(policy, dataclasses.replace(batch, temperature=1e-6))  # exp of such logits overflows
    top = policy.forward(batch, ["top_logprobs"], ForwardOptions(num_top=3))["top_logprobs"]
    found["top"] = [each.logprobs for each in top]
    found["weights"] = {name: tensor for name, tensor in policy.weights() if tensor is not None}
    found["codes"] = in_codes(policy)
    if parallel.get("pp", 1) == 1:  # of several stages none sees all layers that credit looks at
        credited = policy.train_step(make_batch(3), AttentionCreditLoss(loss=FULL, range=RANGE))
        found["credited"] = {"result": credited, "grads": whole_grads(policy)}

    adapted = build(lora=LORA)
    result = adapted.train_step(batch, FULL)
    found["lora"] = {"result": result, "grads": whole_grads(adapted)}
    found["adapter"] = {name: tensor.clone() for name, tensor in adapted.adapter_weights() if tensor is not None}

    for name, lora in (("streamed", None), ("streamed lora", LORA)):
        with compute_norms_in_double():  # also while tensor parallelism wraps the norms
            plain, streamed = (build(lora=lora, holds_reference=lora is None) for _ in range(2))
            plain.train_step(batch, FULL)
            accumulate_by_unit(streamed, batch, FULL)
        found[name] = relative_error(whole_grads(streamed), whole_grads(plain))

    two_headed = build(holds_reference=True, value_head_learning_rate=1e-3)
    result = two_headed.train_step(valued(batch), BOTH)
    found["two heads"] = {"result": result, "grads": whole_grads(two_headed)}

    critic = build("critic")
    result = critic.train_step(valued(batch), VALUE_LOSS)
    found["critic"] = {"result": result, "grads": whole_grads(critic)}
    found["values"] = values_of(critic, batch)
    if deep:
        half = build(precision=Precision.from_name("bfloat16"))
        result = half.train_step(batch, PolicyLoss())
        found["bfloat16"] = {"result": result, "grads": whole_grads(half)}
        taught = build(teachers=(str(model),), activation_checkpointing=True)
        taught.train_step(make_batch(2), PolicyLoss())
        result = taught.train_step(batch, DistillationLoss(divergence=Divergence(kind="jsd")))
        found["taught"] = {"result": result, "grads": whole_grads(taught)}
        found["measured"] = taught.measure(batch, DistillationLoss())
        few = build(lora=LoRAConfig(rank=2, target_modules=["layers.2.mlp.up_proj"]))
        few.train_step(batch, FULL)
        found["few adapters"] = {name: tensor for name, tensor in few.weights() if tensor is not None}
        found["without adapters"] = logprobs_of(few, batch, adapter=False)
    return found


def run_rank(
    rank: int,
    directory: Path,
    model: Path,
    batch: TrainingBatch,
    layouts: Mapping[str, Any],
    num: int,
    also: Callable[[Path, Mapping[str, Any]], None] | None = None,
) -> None:
    """Every layout in turn, as one of several ranks; then a state passes from one layout to the next."""
    ranks = {"rank": rank, "world_size": num, "init_method": f"file://{directory / 'meeting'}"}
    before: Path = directory / "saved by one"
    for name, parallel in layouts.items():
        if name not in AGAIN:
            found = work(model, batch, parallel, deep=num == parallel.get("pp"), **ranks)
            if rank in (0, num - 1):
                torch.save(found, directory / f"{name}-{rank}.pt")
        spec = make_spec(model, parallel=ParallelConfig(**parallel))
        backend = TorchBackend(dataclasses.replace(spec, **ranks), precision=DOUBLE)
        backend.load(before)
        backend.train_step(batch, PolicyLoss())
        before = directory / f"saved under {name}"
        backend.save(before)
        backend.export(directory / f"export under {name}")
    if also is not None:
        also(directory, ranks)
    torch.distributed.destroy_process_group()
