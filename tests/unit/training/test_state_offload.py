"""What DeepSpeed is asked to move between a device and main memory, and what is moved beside it.

Its engine is a stand-in here, which does what DeepSpeed 0.19 does: it moves what is named, and takes back all at once.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Collection
from typing import Any

import pytest
import torch

from roll.training.deepspeed.state_offload import ZeroStateOffloader
from roll.training.deepspeed.zero_weights import ZeroWeights

AWAY = torch.device("meta")


class Kind(enum.Enum):
    optim_states = 1
    hp_params = 2
    lp_params = 3
    lp_grads = 4
    contiguous_grad_buffer = 5


class Engine:
    """At stage 3 it refuses to move the states of any AdamW but its own."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.optimizer = types.SimpleNamespace(offloaded_states=set[Kind]())

    def offload_states(self, include: Collection[Kind]) -> None:
        if self.stage == 3:
            assert not {Kind.optim_states, Kind.hp_params} & set(include), "only for DeepSpeed FusedAdam"
        self.optimizer.offloaded_states |= set(include)

    def reload_states(self) -> None:
        self.optimizer.offloaded_states.clear()


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module: Any = types.ModuleType("offload_config")
    module.OffloadStateTypeEnum = Kind
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.offload_config", module)


class Part:
    """In place of a tensor: one that is on a host may not be given the data of one without any."""

    def __init__(self) -> None:
        self.data = torch.ones(4)


def spread_over(part: Any) -> ZeroWeights:
    spread = ZeroWeights.__new__(ZeroWeights)
    moments = {key: torch.zeros(4) for key in ("exp_avg", "exp_avg_sq")}
    spread._flat = [part]
    spread._adamw = types.SimpleNamespace(state={part: {"step": torch.tensor(3.0), **moments}})
    return spread


@pytest.mark.parametrize("stage", [1, 3])
def test_state_offload_a_sync_brings_weights_alone_to_the_device_and_a_step_all(stage: int) -> None:
    """In the order of a run: trainers step aside, weights are synced, engines answer, trainers come back."""
    engine = Engine(stage)
    lending = ZeroStateOffloader(engine, spread_over(Part()), moves_states=stage == 3)
    everything = set(Kind) if stage == 1 else {Kind.lp_params, Kind.lp_grads, Kind.contiguous_grad_buffer}
    zero = engine.optimizer
    lending.offload(["optimizer"])
    assert zero.offloaded_states == everything - {Kind.lp_params}
    lending.onload(["parameters"], AWAY)
    assert zero.offloaded_states == everything - {Kind.lp_params}
    lending.offload(["parameters"])
    assert zero.offloaded_states == everything
    lending.onload(["parameters", "optimizer"], AWAY)
    assert not zero.offloaded_states


def test_state_offload_masters_and_moments_are_moved_where_deepspeed_refuses() -> None:
    part: Any = Part()
    spread = spread_over(part)
    lending = ZeroStateOffloader(Engine(3), spread, moves_states=True)
    lending.onload(["parameters"], AWAY)
    assert part.data.device.type == "cpu"
    lending.onload(["optimizer"], AWAY)  # the same objects, elsewhere
    held = spread._adamw.state[part]
    assert {tensor.device for tensor in (part.data, held["exp_avg"], held["exp_avg_sq"])} == {AWAY}
    assert float(held["step"]) == 3.0
