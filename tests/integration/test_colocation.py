"""Runs whose engines and trainers hand memory over: the same numbers, and nobody computes without what it needs."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from chaos.test_kill_pipelines import configuration
from recorded.runs import hashes
from worlds.tiny_model import write_tiny_model

import roll
from roll.errors import ConfigError, LossError
from roll.inference.hf import HFEngine
from roll.inference.vllm.description import VLLM_ENGINE
from roll.pipelines.stop import Interrupted
from roll.rollout.transitions import EngineTransitions
from roll.training import TorchBackend
from roll.training.offload import StateOffloader

BOTH = {"parameters", "optimizer"}
RUNS: dict[str, dict[str, Any]] = {
    "a reference": {"algorithm": {"kl": {"coefficient": 0.1}}},
    "critics": {"algorithm": {"type": "asy_ppo", "critic": {"learning_rate": 1e-2, "warmup_steps": 1}}},
    "adapters": {"model": {"lora": {"rank": 4}}, "algorithm": {"kl": {"coefficient": 0.1}}},
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Gives trainers a device that they can be moved from, and looks whether they compute on it."""
    counts: Counter[str] = Counter()

    def offload(self: StateOffloader, states: Collection[str]) -> None:
        counts["offload"] += 1
        away(self).update(states)

    def onload(self: StateOffloader, states: Collection[str]) -> None:
        away(self).difference_update(states)

    def away(offloader: StateOffloader) -> set[str]:
        return offloader.__dict__.setdefault("away", set())

    def needing(name: str, needed: Collection[str]) -> None:
        inner = getattr(TorchBackend, name)

        def checked(self: TorchBackend, *args: Any, **keys: Any) -> Any:
            offloaded = away(self._state_offloader)
            assert not offloaded & set(needed), f"{name} finds {offloaded} in main memory"
            counts[name] += 1
            return inner(self, *args, **keys)

        monkeypatch.setattr(TorchBackend, name, checked)

    monkeypatch.setattr(StateOffloader, "offload", offload)
    monkeypatch.setattr(StateOffloader, "onload", onload)
    for name in ("train_step", "save", "load", "export"):
        needing(name, BOTH)
    for name in ("forward", "measure", "weights"):
        needing(name, {"parameters"})
    for name in ("sleep", "wake", "start"):
        _counted(monkeypatch, name, counts)
    return counts


def _counted(monkeypatch: pytest.MonkeyPatch, name: str, counts: Counter[str]) -> None:
    inner = getattr(HFEngine, name)

    async def counted(self: HFEngine) -> None:
        counts[name] += 1
        await inner(self)

    monkeypatch.setattr(HFEngine, name, counted)


def config(directory: Path, source: Path, /, *, sharing: str = "colocated", **changes: Any) -> dict[str, Any]:
    base = {
        **tiny_config(source, num_steps=4),
        "output_dir": str(directory),
        "cluster": {"sharing": sharing},
    }
    for section, values in changes.items():
        base[section] = {**base.get(section, {}), **values}
    return base


def test_colocation_a_teacher_that_shares_the_students_device_hands_over_too(
    seen: Counter[str], tmp_path: Path, tiny_model: Path
) -> None:
    other = write_tiny_model(tmp_path / "teacher", seed=7)
    for name, sharing in (("with", "colocated"), ("without", "disaggregated")):
        asked = config(tmp_path / name, tiny_model, sharing=sharing)
        roll.train({**asked, "pipeline": "distill", "teacher": str(other), "distillation": {"mode": "reward"}})
    assert (seen["sleep"], seen["wake"]) == (6, 5)
    assert hashes(tmp_path / "with" / "run") == hashes(tmp_path / "without" / "run")


@pytest.mark.parametrize("name", ["sft_hand_over", "kto_adapters"])
def test_colocation_engines_that_answer_beside_a_run_on_examples_hand_over(
    name: str, seen: Counter[str], tmp_path: Path, tiny_model: Path
) -> None:
    """What a preference's loss must know before the update is asked of a policy that has its memory, too."""
    settings = configuration(name, tmp_path, tiny_model)
    for directory, sharing in (("with", "colocated"), ("without", "disaggregated")):
        roll.train({**settings, "output_dir": str(tmp_path / directory), "cluster": {"sharing": sharing}})
    assert seen["sleep"] > 0 and seen["measure"] > 0
    assert hashes(tmp_path / "with" / "run") == hashes(tmp_path / "without" / "run")


@pytest.mark.parametrize("kind", RUNS)
def test_colocation_a_run_is_the_same_bit_for_bit(
    kind: str, seen: Counter[str], tmp_path: Path, tiny_model: Path
) -> None:
    roll.train(config(tmp_path / "with", tiny_model, **RUNS[kind]))
    assert (seen["sleep"], seen["wake"]) == (6, 5)  # four steps, and the checkpoints of steps 2 and 4
    roll.train(config(tmp_path / "without", tiny_model, sharing="disaggregated", **RUNS[kind]))
    assert seen["sleep"] == 6
    assert hashes(tmp_path / "with" / "run") == hashes(tmp_path / "without" / "run")


def test_colocation_an_error_while_engines_sleep_saves_and_the_resumed_run_is_the_same(
    seen: Counter[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = TorchBackend.train_step

    def fails(self: TorchBackend, *args: Any) -> Any:
        if self.num_steps == 2:
            raise LossError("no such column")
        return inner(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, "train_step", fails)
        with pytest.raises(LossError):
            roll.train(config(tmp_path / "broken", tiny_model, checkpoint={"every_num_steps": 0}))
    assert seen["save"] == 1
    roll.resume(tmp_path / "broken" / "run")
    assert seen["load"] == 1
    roll.train(config(tmp_path / "whole", tiny_model, checkpoint={"every_num_steps": 0}))
    assert hashes(tmp_path / "broken" / "run") == hashes(tmp_path / "whole" / "run")


def test_colocation_a_signal_while_engines_answer_saves_and_the_resumed_run_is_the_same(
    seen: Counter[str], tmp_path: Path, tiny_model: Path
) -> None:
    def interrupt(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        roll.train(config(tmp_path / "broken", tiny_model, checkpoint={"every_num_steps": 0}), on_step=interrupt)
    assert (seen["save"], seen["sleep"], seen["wake"]) == (1, 4, 3)
    roll.resume(tmp_path / "broken" / "run")
    roll.train(config(tmp_path / "whole", tiny_model, checkpoint={"every_num_steps": 0}))
    assert hashes(tmp_path / "broken" / "run") == hashes(tmp_path / "whole" / "run")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_colocation_ranks_and_engines_in_processes_of_their_own_hand_over_too(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("ray")
    where = {"type": "ray", "device_mapping": {"actor_train": "0-1", "actor_infer": "0-1"}}
    for name, sharing in (("with", "colocated"), ("without", "disaggregated")):
        roll.train(config(tmp_path / name, tiny_model, cluster={**where, "sharing": sharing}))
    with_it, without = (hashes(tmp_path / name / "run") for name in ("with", "without"))
    assert with_it == without


@pytest.mark.parametrize("moment", ["sleep", "generate"])
def test_colocation_an_engine_that_dies_is_replaced_in_its_turn(
    moment: str, seen: Counter[str], tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, starts, wakes = getattr(HFEngine, moment), HFEngine.start, EngineTransitions.reacquire
    asleep = False

    async def dies(self: HFEngine, *args: Any) -> Any:
        nonlocal asleep
        asleep = moment == "sleep"
        if seen["train_step"] == 1 + (moment == "generate") and seen["start"] == 1:
            self._mark_dead("a test ends it")
        return await inner(self, *args)

    async def wake(self: EngineTransitions, engine_ids: Collection[str]) -> None:
        nonlocal asleep
        asleep = False
        await wakes(self, engine_ids)

    async def start(self: HFEngine) -> None:
        assert not asleep or seen["start"] == 0
        await starts(self)

    monkeypatch.setattr(HFEngine, moment, dies)
    monkeypatch.setattr(EngineTransitions, "reacquire", wake)
    monkeypatch.setattr(HFEngine, "start", start)
    roll.train(config(tmp_path / "dies", tiny_model))
    assert seen["start"] == 2
    monkeypatch.undo()
    roll.train(config(tmp_path / "lives", tiny_model, sharing="disaggregated"))
    both = [hashes(tmp_path / name / "run") for name in ("dies", "lives")]
    assert all(both[0][name] == both[1][name] for name in both[0] if name.startswith(("rollouts", "weights", "ledger")))


def test_colocation_on_a_cpu_nothing_is_handed_over_unless_it_is_asked_for(
    seen: Counter[str], tmp_path: Path, tiny_model: Path
) -> None:
    roll.train(config(tmp_path, tiny_model, sharing="auto", training={"num_steps": 1}))
    assert seen["offload"] == seen["sleep"] == 0


def test_colocation_what_cannot_hand_over_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.sharing partial_overlap requires engines that continue to generate"
    ):
        roll.train(config(tmp_path, tiny_model, sharing="partial_overlap", rollout={"scheduling": {"async_ratio": 1}}))
    apart = {"type": "ray", "device_mapping": {"actor_train": 0, "actor_infer": 1}, "sharing": "colocated"}
    with pytest.raises(ConfigError, match="no trainer shares a device with engines"):
        roll.train(config(tmp_path, tiny_model, cluster=apart))
    vllm = replace(VLLM_ENGINE, library=None, capabilities=replace(VLLM_ENGINE.capabilities, can_sleep=False))
    monkeypatch.setattr("roll.inference.vllm.description.VLLM_ENGINE", vllm)
    asked = config(tmp_path, tiny_model, inference={"engine": "vllm"})
    (problem,) = roll.check(asked).problems
    assert "vLLM cannot release its memory on a CPU" in problem
    with pytest.raises(ConfigError, match=re.escape(problem)):
        roll.train(asked)
