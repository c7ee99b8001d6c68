"""Estimates the duration of a training step on this machine, by timing models of the same shape with few layers.

steps of models with 1 and with 8 layers, random weights ──► seconds per layer, and for the rest ──► the whole model

The models are timed alternately, so that other load on the machine affects both equally. The timing runs in a separate
process, not in a worker pool, because a worker would run the user's script again.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from roll.registry import import_object

if TYPE_CHECKING:
    from roll.models import ModelDescription
    from roll.training import TrainerSpec
    from roll.training.backend import TorchBackend
    from roll.types import TrainingBatch

__all__ = ["StepTime", "can_measure_step_time", "measure_step_time"]

NUM_FEW_LAYERS, NUM_MORE_LAYERS = 1, 8
"""Numbers of layers of the two models whose steps are timed."""
MAX_UNTIMED_LAYERS = 4
"""Maximum number of layers of a model that gets no estimate, because timing the model itself takes no longer."""
NUM_REPEATS = 4
"""Number of timed steps of each model, after a warm-up step; the fastest is used."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Maximum memory of both models, including training state: 16 bytes for a weight."""


class StepTime(NamedTuple):
    """The times of the parts of a training step on one rank, in seconds."""

    learn_s: float
    """Forward and backward pass over the batch."""
    optimizer_s: float
    """Optimizer step."""
    measure_s: float
    """A forward pass over the batch without a gradient."""

    def interpolate(self, other: StepTime, weight: float) -> StepTime:
        """Return `self + weight * (other - self)` for each part; a `weight` above 1 extrapolates beyond `other`."""
        return StepTime(*(mine + weight * (more - mine) for mine, more in zip(self, other, strict=True)))


def can_measure_step_time(sizes: ModelDescription) -> bool:
    """Return whether `measure_step_time` supports a model; it must have enough layers, and smaller copies must fit into
    memory.
    """
    outside = 2 * sizes.vocab_size * sizes.hidden_size
    layer = max(sizes.num_parameters - outside, 0) // sizes.num_layers
    return (
        sizes.num_layers > MAX_UNTIMED_LAYERS
        and 16 * (2 * outside + (NUM_FEW_LAYERS + NUM_MORE_LAYERS) * layer) <= MAX_MEMORY_BYTES
    )


def measure_step_time(spec: TrainerSpec, num_layers: int, batch: TrainingBatch, loss: str) -> StepTime:
    """Estimate the time of a training step of one rank on this machine.

    Copies of the model with few layers are timed in a separate process, and the times are extrapolated.

    Args:
        spec: specification of the trainer.
        num_layers: number of layers of the trainer's model.
        batch: a training batch, as in a step.
        loss: import path of the loss.

    Raises:
        ChildProcessError: the process failed; the message has its last output.
    """
    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        request_file, result_file = Path(directory) / "request", Path(directory) / "result"
        request_file.write_bytes(pickle.dumps((spec, batch, loss)))
        command = [sys.executable, "-P", "-m", __name__, str(request_file), str(result_file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True)
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ChildProcessError(f"the timed step failed with exit code {done.returncode}{last and ': '}{last}")
        few, more = (StepTime(*times) for times in json.loads(result_file.read_text()))
    # Time is linear in the number of layers, so the difference of the two models is the time of the additional layers.
    return few.interpolate(more, (num_layers - NUM_FEW_LAYERS) / (NUM_MORE_LAYERS - NUM_FEW_LAYERS))


def _time_few_and_more_layers(spec: TrainerSpec, batch: TrainingBatch, path: str) -> list[StepTime]:
    """Measure the step times of a copy with few layers and of a copy with more layers; return them in this order."""
    loss: Any = import_object(path)
    backends = [_build_shallow_model(spec, number) for number in (NUM_FEW_LAYERS, NUM_MORE_LAYERS)]
    # The models take turns, so that other load of the machine affects both equally.
    found: list[list[StepTime]] = [[], []]
    for _ in range(1 + NUM_REPEATS):
        for backend, times in zip(backends, found, strict=True):
            step = backend.train_step(batch, loss)
            began = time.perf_counter()
            backend.measure(batch, loss)
            learn_s, optimizer_s = step.timings_s["forward_backward"], step.timings_s["optimizer"]
            times.append(StepTime(learn_s, optimizer_s, time.perf_counter() - began))
    # The first step compiles kernels and allocates. The minimum is least affected by other processes.
    return [StepTime(*map(min, zip(*times[1:], strict=True))) for times in found]


def _build_shallow_model(spec: TrainerSpec, num_layers: int) -> TorchBackend:
    from roll.training.backend import TorchBackend

    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        _write_shallow_model(Path(spec.model_path), Path(directory), num_layers, spec.model.dtype)
        return TorchBackend(replace(spec, model_path=directory))


def _write_shallow_model(source: Path, target: Path, num_layers: int, dtype: str) -> None:
    """Write a copy of the model in `source` to `target`, with `num_layers` layers and random weights."""
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
    for file in source.iterdir():  # mainly the tokenizer's files
        if file.suffix in (".json", ".txt", ".model", ".jinja") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def _main(request_file: str, result_file: str) -> None:
    Path(result_file).write_text(json.dumps(_time_few_and_more_layers(*pickle.loads(Path(request_file).read_bytes()))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
