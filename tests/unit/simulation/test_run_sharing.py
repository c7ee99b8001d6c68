"""`cluster.sharing: auto` of a run, with and without a calibrated workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.simulation.test_sharing import build

from roll.config.document import dump
from roll.config.load import load_config
from roll.config.rollout_run import RolloutRunConfig
from roll.errors import ConfigError
from roll.pipelines.colocation import explain_sharing_rule
from roll.simulation import run_sharing
from roll.simulation.run_sharing import build_run_simulation, resolve_run_sharing


@pytest.fixture(name="workload")
def fixture_workload(tmp_path: Path) -> str:
    """Returns the path of a workload, as a calibration writes it."""
    path = tmp_path / "workload.yaml"
    path.write_text(dump(build({"generation": 2, "switch_s": 2.0}).model_dump(mode="json")))
    return str(path)


def load(actor_train: str = "2-7", async_ratio: float = 1.0, **cluster: Any) -> RolloutRunConfig:
    mapping = {"actor_train": actor_train, "actor_infer": "0-7"}
    config = load_config(
        {
            "pipeline": "rlvr",
            "name": "shared",
            "model": "smollm2-135m-instruct",
            "algorithm": {"type": "grpo"},
            "data": [{"source": "arithmetic", "reward": "math"}],
            "inference": {"engine": "hf", "max_num_seqs": 16},
            "rollout": {
                "prompts_per_step": 64,
                "group_size": 4,
                "max_new_tokens": 4096,
                "scheduling": {"async_ratio": async_ratio},
            },
            "training": {"num_steps": 4},
            "cluster": {"type": "ray", "devices_per_node": 8, "device_mapping": mapping, **cluster},
        }
    )
    assert isinstance(config, RolloutRunConfig)
    return config


def test_run_sharing_takes_the_rule_with_the_shortest_simulated_step(workload: str) -> None:
    config = load(calibration=workload)
    resolved, line = resolve_run_sharing(config, accelerated=True)
    assert line.startswith(f"cluster.sharing auto: {resolved.cluster.sharing}, by the simulated times of a step (")
    assert line.endswith(f"with the costs of {workload}")
    assert (resolved.cluster.calibration, resolved.name) == (None, config.name)
    # The trainer's devices generate as well unless they are needed, so the rule that gives them back is not slower.
    assert resolved.cluster.sharing in ("elastic_overlap", "partial_overlap")
    assert explain_sharing_rule(load(sharing=resolved.cluster.sharing), accelerated=True) == ""


def test_run_sharing_simulates_the_placement_and_the_rollouts_of_the_run(workload: str) -> None:
    simulated = build_run_simulation(load("4-7"), workload)
    assert simulated is not None
    place = simulated.placement
    assert (place.generation, place.training, place.sharing, place.switch_s) == (8, 4, "auto", 2.0)
    assert (simulated.rollout.prompts_per_step, simulated.engine.max_num_seqs) == (64, 16)
    assert simulated.rollout.scheduling.async_ratio == 1.0
    everywhere = build_run_simulation(load("0-7"), workload)
    assert everywhere is not None and everywhere.placement.training == 0
    assert build_run_simulation(load("6-9", devices_per_node=10), workload) is None


def test_run_sharing_does_nothing_without_a_calibration_or_without_accelerators(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_sharing, "choose_sharing_rule", None)
    assert resolve_run_sharing(load(), accelerated=True)[1] == ""
    config = load(calibration=workload)
    assert resolve_run_sharing(config, accelerated=False) == (config, "")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"async_ratio": 0.0}, "colocated, because the run is synchronous"),
        ({}, "elastic_overlap, because the run is asynchronous, and 2 of 8 engines share none"),
        ({"actor_train": "0-7"}, "disaggregated, because every engine of this asynchronous run shares devices"),
    ],
)
def test_run_sharing_explains_the_rule_that_needs_no_simulation(config: dict[str, Any], line: str) -> None:
    assert explain_sharing_rule(load(**config), accelerated=True).startswith(f"cluster.sharing auto: {line}")
    assert explain_sharing_rule(load(**config), accelerated=False) == ""


def test_run_sharing_a_calibration_needs_the_rule_auto(workload: str) -> None:
    with pytest.raises(ConfigError, match="is used only with sharing auto, but sharing is colocated"):
        load(calibration=workload, sharing="colocated")
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        resolve_run_sharing(load(calibration="missing.yaml"), accelerated=True)
