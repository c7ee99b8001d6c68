"""What is moved between a device and main memory is neither read too early nor overwritten too soon."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from offload_ranks import OFFLOAD, RUNS, build, collect_state, differing
from streams import Stream, device_of_streams
from torch import Tensor
from training_helpers import make_batch

from roll.algorithms.losses import PolicyLoss
from roll.training.memory import activation_offload
from roll.training.memory.host_memory import HostMemory

HERE = torch.device("cpu")


def steps(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    backend = build(model, settings)
    results = [backend.train_step(make_batch(seed), PolicyLoss()) for seed in range(2)]
    return {"losses": [result.loss for result in results], **collect_state(backend)}


@pytest.mark.parametrize("run", ["plain", "bfloat16", "layers again", "8 bits", "adapters"])
@pytest.mark.integration
def test_offload_stream_steps_with_all_that_can_be_offloaded_have_no_race(tiny_model: Path, run: str) -> None:
    with (
        mock.patch.object(activation_offload, "MIN_OFFLOAD_BYTES", 1),
        mock.patch("roll.training.memory.adamw_8bit.load_native_library", lambda: None),
    ):
        expected = steps(tiny_model, RUNS[run])
        with device_of_streams() as streams:
            found = steps(tiny_model, RUNS[run] | OFFLOAD["both"])
            assert not streams.races
            assert streams.num_copies > 100
        assert not differing(found, expected)


def use(memory: HostMemory, weight: Tensor) -> None:
    """Everything that it does, one after the other."""
    taken: list[Tensor] = []
    memory.to_device(memory.to_host(weight * 2)).mul_(2)  # nothing but the copy needs the product's memory
    for number in range(6):
        memory.to_host_with_callback(weight * number, lambda copy: taken.append(copy + 1))
    memory.finish()
    source = torch.zeros_like(taken[0])
    memory.write(weight, source)
    source.add_(1)
    weight.mul_(2)
    assert len(taken) == 6


def test_offload_stream_main_memory_has_no_race() -> None:
    with device_of_streams() as streams:
        use(HostMemory(HERE), torch.ones(8, 8))
        assert not streams.races
        assert streams.num_copies == 1 + 1 + 6 + 1


def without_waiting(*_: Any) -> None:
    """In place of what makes somebody wait."""


@pytest.mark.parametrize(
    ("path", "race"),
    [
        ("torch.Tensor.record_stream", "memory of main is let go while side 1 uses it"),
        ("streams.Stream.wait_stream", "copy_ on side 1 does not wait for main"),
        ("streams.Event.synchronize", "add on host does not wait for side 1"),
    ],
)
def test_offload_stream_a_wait_that_is_left_out_is_found(path: str, race: str) -> None:
    with device_of_streams() as streams, mock.patch(path, without_waiting):
        use(HostMemory(HERE), torch.ones(8, 8))
        assert race in streams.races


def test_offload_stream_what_comes_back_waits_for_what_went_away() -> None:
    def only_away(stream: Stream, other: Stream) -> None:
        if stream.name != "main":
            wait(stream, other)

    wait = Stream.wait_stream
    with device_of_streams() as streams, mock.patch.object(Stream, "wait_stream", only_away):
        use(HostMemory(HERE), torch.ones(8, 8))
        assert "to on main does not wait for side 1" in streams.races


def test_offload_stream_what_is_copied_to_the_device_is_a_copy_of_its_own() -> None:
    def straight(memory: HostMemory, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    with device_of_streams() as streams, mock.patch.object(HostMemory, "write", straight):
        use(HostMemory(HERE), torch.ones(8, 8))
        assert streams.races == ["add_ on host does not wait for main"]
