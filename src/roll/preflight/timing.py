"""The duration of a training step on this machine, measured with a model of the same shape but few layers.

steps on 1 layer and on 8 in turn, of random weights ──► seconds per layer, and for the rest ──► seconds for all layers

The models take turns, so that other load of the machine is not attributed to a layer. Runs in a separate process that
is not a worker pool's: a worker would run the user's script again.
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

__all__ = ["StepTime", "is_timeable", "step_time"]

FEW, MORE = 1, 8
"""Layers of the two models."""
FEWEST = 4
"""A model with at most this many layers is timed as quickly as it is estimated."""
REPEATS = 4
"""Number of timed steps of each model, after one that is not counted; the fastest counts."""
MOST_BYTES = 4 * 2**30
"""Maximum memory of both models, including training state: 16 bytes for a weight."""


class StepTime(NamedTuple):
    """Seconds on one rank."""

    learn_s: float
    """Forward and backward pass over the batch."""
    optimizer_s: float
    """Optimizer step."""
    measure_s: float
    """A forward pass over the batch without a gradient."""

    def plus(self, other: StepTime, share: float) -> StepTime:
        """Return this time plus `share` times the difference from this to `other`."""
        return StepTime(*(mine + share * (more - mine) for mine, more in zip(self, other, strict=True)))


def is_timeable(sizes: ModelDescription) -> bool:
    """Return whether a few layers of the model fit into memory next to everything else."""
    outside = 2 * sizes.vocab_size * sizes.hidden_size
    layer = max(sizes.num_parameters - outside, 0) // sizes.num_layers
    return sizes.num_layers > FEWEST and 16 * (2 * outside + (FEW + MORE) * layer) <= MOST_BYTES


def step_time(spec: TrainerSpec, num_layers: int, batch: TrainingBatch, loss: str) -> StepTime:
    """Measure a step of one rank on this machine, in a separate process.

    Args:
        spec: specification of the trainer.
        num_layers: number of layers of its model.
        batch: a training batch, as in a step.
        loss: import path of the loss.

    Raises:
        ChildProcessError: the process failed; the message has its last output.
    """
    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        asked, said = Path(directory) / "asked", Path(directory) / "said"
        asked.write_bytes(pickle.dumps((spec, batch, loss)))
        command = [sys.executable, "-P", "-m", __name__, str(asked), str(said)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True)
        if done.returncode != 0:
            last = done.stderr.strip().rpartition("\n")[2]
            raise ChildProcessError(f"trying one ended with exit code {done.returncode}{last and ': '}{last}")
        few, more = (StepTime(*times) for times in json.loads(said.read_text()))
    return few.plus(more, (num_layers - FEW) / (MORE - FEW))


def _time_both(spec: TrainerSpec, batch: TrainingBatch, path: str) -> list[StepTime]:
    """Measure the step time with few layers and with more."""
    loss: Any = import_object(path)
    backends = [_shallow(spec, number) for number in (FEW, MORE)]
    found: list[list[StepTime]] = [[], []]
    for _ in range(1 + REPEATS):
        for backend, times in zip(backends, found, strict=True):
            step = backend.train_step(batch, loss)
            began = time.perf_counter()
            backend.measure(batch, loss)
            learn_s, optimizer_s = step.timings_s["forward_backward"], step.timings_s["optimizer"]
            times.append(StepTime(learn_s, optimizer_s, time.perf_counter() - began))
    return [StepTime(*map(min, zip(*times[1:], strict=True))) for times in found]


def _shallow(spec: TrainerSpec, num_layers: int) -> TorchBackend:
    from roll.training.backend import TorchBackend

    with tempfile.TemporaryDirectory(prefix="roll-check-") as directory:
        _write_shallow(Path(spec.model_path), Path(directory), num_layers, spec.model.dtype)
        return TorchBackend(replace(spec, model_path=directory))


def _write_shallow(source: Path, target: Path, num_layers: int, dtype: str) -> None:
    """Write a model like the one in `source`, with fewer layers and random weights, as an HF directory."""
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


def _main(asked: str, said: str) -> None:
    Path(said).write_text(json.dumps(_time_both(*pickle.loads(Path(asked).read_bytes()))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
