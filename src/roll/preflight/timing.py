"""How long a training step will take here: measured on a model of the same shape with few layers.

steps on 1 layer and on 3, of random weights ──► seconds per layer, and for the rest ──► seconds for all layers
"""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.registry import import_object

if TYPE_CHECKING:
    from roll.models import ModelDescription
    from roll.training import TrainerSpec
    from roll.types import TrainingBatch

__all__ = ["StepTime", "can_be_timed", "step_time"]

FEW, MORE = 1, 3
"""Layers of the two models."""
REPEATS = 3
"""Timed steps of each, after one that is not counted; the fastest counts."""
MOST_BYTES = 4 * 2**30
"""That the larger of the two may take, with what training keeps: 16 bytes for a weight."""


class StepTime(NamedTuple):
    """Seconds on one rank."""

    learn_s: float
    """Forward and backward pass over the batch."""
    optimizer_s: float
    """The optimiser's step."""
    measure_s: float
    """A forward pass over the batch without a gradient."""

    def plus(self, other: StepTime, share: float) -> StepTime:
        """This, and so many times what is between this and the other."""
        return StepTime(*(mine + share * (more - mine) for mine, more in zip(self, other, strict=True)))


def can_be_timed(sizes: ModelDescription) -> bool:
    """Whether a few layers of the model fit into memory beside everything else."""
    outside = 2 * sizes.vocab_size * sizes.hidden_size
    layer = max(sizes.num_parameters - outside, 0) // sizes.num_layers
    return sizes.num_layers > MORE and 16 * (outside + MORE * layer) <= MOST_BYTES


def step_time(spec: TrainerSpec, num_layers: int, batch: TrainingBatch, loss: str) -> StepTime:
    """Time a step of one rank on this machine, in a process of its own.

    Args:
        spec: of the trainer.
        num_layers: of its model.
        batch: as a step has it.
        loss: import path of what it learns by.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        few, more = process.map(_timed, (spec, spec), (FEW, MORE), (batch, batch), (loss, loss))
    return few.plus(more, (num_layers - FEW) / (MORE - FEW))


def _timed(spec: TrainerSpec, num_layers: int, batch: TrainingBatch, path: str) -> StepTime:
    from roll.training.backend import TorchBackend

    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        _write_shallow(Path(spec.model_path), Path(directory), num_layers, spec.model.dtype)
        backend = TorchBackend(replace(spec, model_path=directory))
    loss: Any = import_object(path)
    found: list[StepTime] = []
    for _ in range(1 + REPEATS):
        step = backend.train_step(batch, loss)
        began = time.perf_counter()
        backend.measure(batch, loss)
        found.append(
            StepTime(
                learn_s=step.timings_s["forward_backward"],
                optimizer_s=step.timings_s["optimizer"],
                measure_s=time.perf_counter() - began,
            )
        )
    return StepTime(*map(min, zip(*found[1:], strict=True)))


def _write_shallow(source: Path, target: Path, num_layers: int, dtype: str) -> None:
    """A model like the one in `source`, with fewer layers and random weights, as an HF directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(target)
    for file in source.iterdir():  # the tokenizer's, above all
        if file.suffix in (".json", ".txt", ".model", ".jinja") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
