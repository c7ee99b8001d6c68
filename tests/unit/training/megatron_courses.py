"""Several steps of the back-end `megatron` on one rank of several, beside `torch` on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_ranks import chosen_by_one_rank
from megatron_on_cpu import megatron_on_cpu
from peft import PeftModel
from training_helpers import logprobs_of, make_batch, make_spec, reference_logprobs, relative_error
from transformers import AutoModelForCausalLM

from roll.algorithms.losses import PolicyLoss
from roll.config.model import LoRAConfig
from roll.config.parallel import ParallelConfig
from roll.errors import ModelError
from roll.training import TorchBackend
from roll.types import TrainingBatch

LIMIT = 1e-5
SETTINGS = {"max_tokens_per_micro_batch": 60, "epsilon": 1.0, "learning_rate": 0.3, "weight_decay": 0.01}
"""AdamW then moves a weight by about its gradient, so small gradients count too."""
LORA = LoRAConfig(
    rank=4, alpha=6.0, rank_pattern={"q_proj": 2, "down_proj": 8}, alpha_pattern={"v_proj": 3.0}, loraplus_lr_ratio=4.0
)
VARIANTS = {
    "patterns and LoRA+": LORA,
    "rslora": LoRAConfig(rank=4, alpha=6.0, use_rslora=True),
    "few layers": LoRAConfig(rank=4, alpha=6.0, target_modules=["v_proj", "up_proj", "o_proj"]),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """The layout and the settings of a training run."""

    model: Path
    sizes: Mapping[str, int]
    lora: LoRAConfig | None = None
    is_skewed: bool = False
    """True if the last batch has recorded experts: all its tokens go to the first two."""
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run_courses(rank: int, directory: Path, courses: Mapping[str, Course], num_ranks: int) -> None:
    """Every course on one rank of several; the courses have the same layout, as the trainers of a process must."""
    with megatron_on_cpu():
        for name, course in courses.items():
            try:
                run_course(course, directory / "courses" / name, rank, num_ranks)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def run_course(course: Course, directory: Path, rank: int, num_ranks: int) -> None:
    """Train, save, resume and export, and compare every step with `torch`."""
    from roll.training.megatron.backend import MegatronBackend

    meeting = f"file://{directory.parents[1]}/meeting" if num_ranks > 1 else None
    settings = {"lora": course.lora, **SETTINGS, **course.training}

    def build() -> Any:
        spec = make_spec(course.model, backend="megatron", parallel=ParallelConfig(**course.sizes), **settings)
        return MegatronBackend(dataclasses.replace(spec, rank=rank, world_size=num_ranks, init_method=meeting))

    mine, other = build(), TorchBackend(make_spec(course.model, **settings))
    assert list(mine.full_weights.names) == list(other.masters.parameters)
    before = _read_trained(mine)
    assert relative_error(before, _read_torch(other)) == 0
    train_alike(mine, other, make_batch(0), make_batch(1))
    mine.save(directory / "saved")
    resumed, by_torch = build(), TorchBackend(make_spec(course.model, **settings))
    for backend in (resumed, by_torch):
        backend.load(directory / "saved")
    last = chosen_by_one_rank(make_batch(2), 2) if course.is_skewed else make_batch(2)
    train_alike(mine, other, last)
    train_alike(resumed, by_torch, last)
    after = _read_trained(mine)
    assert all(torch.equal(after[name], tensor) for name, tensor in _read_trained(resumed).items())
    moves = [
        {name: tensor - before[name] for name, tensor in weights.items()} for weights in (after, _read_torch(other))
    ]
    assert all(bool(move.any()) for name, move in moves[1].items() if ".k_proj.bias" not in name)
    assert (error := relative_error(*moves)) <= LIMIT, error
    streams = [{n: t for n, t in backend.weights() if t is not None} for backend in (mine, other)]
    if rank == 0:
        assert list(streams[0]) == list(streams[1])
        assert (error := relative_error(*streams)) <= LIMIT, error
    adapters = [{} if course.lora is None else dict(b.adapter_weights()) for b in (mine, other)]
    if rank == 0 and course.lora is not None:
        assert (error := relative_error(*adapters)) <= LIMIT, error
    switches = (True,) if course.lora is None else (True, False)
    mine_said, other_said = ([logprobs_of(b, make_batch(7), adapter=on) for on in switches] for b in (mine, other))
    for a, b in zip(mine_said, other_said, strict=True):
        assert max(abs(x - y).max() for x, y in zip(a, b, strict=True)) <= LIMIT
    if "experts" in other.network.outputs:
        chosen = [backend.forward(make_batch(7), ["experts"])["experts"] for backend in (mine, other)]
        assert all((x == y).all() for x, y in zip(*chosen, strict=True))
    mine.export(directory / "model")
    if rank == 0:
        check_export(course, directory, mine_said[0])


def train_alike(mine: Any, other: Any, *batches: TrainingBatch) -> None:
    """Steps with the same loss, gradient norm, metrics and log-probs."""
    for batch in batches:
        a, b = (backend.train_step(batch, PolicyLoss()) for backend in (mine, other))
        assert abs(a.loss - b.loss) <= LIMIT, (a.loss, b.loss)
        assert abs(a.grad_norm - b.grad_norm) <= LIMIT * b.grad_norm, (a.grad_norm, b.grad_norm)
        assert a.metrics == pytest.approx(b.metrics, rel=1e-4, abs=LIMIT)
        assert max(abs(x - y).max() for x, y in zip(a.logprobs, b.logprobs, strict=True)) <= LIMIT


def check_export(course: Course, directory: Path, expected: list[Any]) -> None:
    """The exported model, and the adapter on the base model, in transformers and peft."""
    models = {"model": AutoModelForCausalLM.from_pretrained(directory / "model", attn_implementation="eager")}
    if course.lora is not None:
        base = AutoModelForCausalLM.from_pretrained(course.model, dtype=torch.float32, attn_implementation="eager")
        models["adapter"] = PeftModel.from_pretrained(base, directory / "adapter")
    with torch.inference_mode():
        for name, model in models.items():
            for mine, found in zip(expected, reference_logprobs(model.eval(), make_batch(7)), strict=True):
                assert abs(mine - found.numpy()).max() <= LIMIT, name


def _read_trained(mine: Any) -> dict[str, torch.Tensor]:
    return {name: mine.full_weights.read_full(name).clone() for name in mine.full_weights.names}


def _read_torch(other: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: other.masters.get_full(name).clone() for name in other.masters.parameters}


def refuse_idle_stage(rank: int, directory: Path, model: Path) -> None:
    """The last of two stages has no adapters, which both of its ranks report."""
    with megatron_on_cpu():
        from roll.training.megatron.backend import MegatronBackend

        lora = LoRAConfig(target_modules=["layers.0.mlp.up_proj"])
        spec = make_spec(model, backend="megatron", parallel=ParallelConfig(pp=2), lora=lora)
        with pytest.raises(ModelError, match=r"pipeline stage 1 has no adapters, and training\.backend 'megatron'"):
            MegatronBackend(
                dataclasses.replace(spec, rank=rank, world_size=2, init_method=f"file://{directory}/meeting")
            )
