"""Simulated devices of several classes with prices, and domains that prefer a class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.simulation.run_helpers import merged
from unit.simulation.test_costs import CHIP

from roll.config.document import dump
from roll.config.simulation import SimulationConfig
from roll.errors import ConfigError
from roll.simulation.plan_sources import read_plan_source
from roll.simulation.recorded import build_workload
from roll.simulation.report import render_results, simulate_variants
from roll.simulation.run import simulate

FREE: dict[str, Any] = {"type": "fixed", "value": 0}


@pytest.fixture(name="build")
def fixture_build(tmp_path: Path) -> Any:
    """Returns a function that builds a run on the classes `fast` and `slow`, whose engine steps take 10 and 20 ms."""
    for name, step_s in (("fast", 0.01), ("slow", 0.02)):
        quick = {"flops": 1e21, "memory_bandwidth": 1e21, "memory_bytes": 1e12, "request_overhead_s": 0.0}
        fields = CHIP.model_dump(exclude={"name"}, exclude_none=True) | quick | {"step_overhead_s": step_s}
        (tmp_path / f"{name}.yaml").write_text(dump(fields))

    def build(changes: dict[str, Any] | None = None) -> SimulationConfig:
        tree: dict[str, Any] = {
            "name": "classes",
            "num_steps": 1,
            "model": "qwen3-8b",
            "device": "h800",
            "placement": {"generation": 2, "training": 1},
            "rollout": {"prompts_per_step": 8, "group_size": 2, "max_new_tokens": 1000},
            "prompt_tokens": {"type": "fixed", "value": 1},
            "answer_tokens": {"type": "fixed", "value": 100},
            "training": {"duration": FREE, "sync_s": 0.0},
            "device_classes": {
                "fast": {"devices": "0,2", "price_per_hour": 4.0, "device": str(tmp_path / "fast.yaml")},
                "slow": {"devices": "1", "price_per_hour": 1.0, "device": str(tmp_path / "slow.yaml")},
            },
            "domains": {
                "long": {"answer_tokens": {"type": "fixed", "value": 500}, "device_class": "fast"},
                "short": {"device_class": "slow"},
            },
        }
        return SimulationConfig.model_validate(merged(tree, changes or {}))

    return build


def test_device_classes_simulation_domains_run_on_their_classes(build: Any) -> None:
    # One prefill and the rest of the tokens: 500 steps of 10 ms, while the short answers take 100 steps of 20 ms.
    assert simulate(build()).step_s == pytest.approx(5.0, rel=0.02)
    swapped = build({"domains.long.device_class": "slow", "domains.short.device_class": "fast"})
    assert simulate(swapped).step_s == pytest.approx(10.0, rel=0.02)


def test_device_classes_simulation_a_domain_spills_over_when_its_class_is_full(build: Any) -> None:
    # One slot for each engine: long answers also run on the slow engine, but every answer is generated.
    run = simulate(build({"engine": {"max_num_seqs": 1}}))
    assert run.steps[0].num_samples == 16
    alone = run.steps[0].num_tokens * 0.01
    assert run.step_s < 0.9 * alone


def test_device_classes_simulation_cost_of_a_step(build: Any) -> None:
    config = build({"num_seeds": 1, "variants": {"affinity": {}, "none": {"domains.short.device_class": None}}})
    assert config.price_per_hour == 9.0  # two fast devices and a slow one
    results = simulate_variants(config)
    assert results.compute_step_cost("affinity") == pytest.approx(5.0 * 9.0 / 3600, rel=0.02)
    shown = render_results(results)
    assert "cost of a step" in shown
    assert "cost of a step" not in render_results(simulate_variants(build({"device_classes": {}, "domains": {}})))


def test_device_classes_simulation_unequal_prices_are_marked(build: Any) -> None:
    cheaper = build().model_dump(mode="json")["device_classes"]
    cheaper["slow"]["price_per_hour"] = 0.1  # 8.1 instead of 9, a tenth less
    results = simulate_variants(build({"variants": {"base": {}, "cheap": {"device_classes": cheaper}}}))
    assert results.describe_unequal_work("base") == ""
    assert results.describe_unequal_work("cheap") == "devices that cost 10% less"


def test_device_classes_simulation_domains_are_drawn_by_their_weights(build: Any) -> None:
    workload = build_workload(build({"domains.long.weight": 3.0}), seed=0)
    names = [workload.draw(number).prompt.domain for number in range(4000)]
    assert names.count("long") / len(names) == pytest.approx(0.75, abs=0.03)  # 4 standard errors


def test_device_classes_simulation_domains_have_their_own_turns(build: Any) -> None:
    latency = {"type": "fixed", "value": 30.0}
    config = build({"domains.short.environment": {"num_turns": 3, "latency": latency}})
    # Three turns of 100 tokens on the slow class, with 30 s after each; long answers have one turn and no latency.
    assert simulate(config).step_s == pytest.approx(3 * (2.0 + 30.0), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_classes.slow.devices": "2"}, "device 2 is in the device_classes fast and slow"),
        ({"device_classes.slow.price_per_hour": None}, "device_classes.slow has no price_per_hour"),
        ({"device_classes.slow.devices": "1,7"}, "contains device 7, but placement has only 3 devices, 0 to 2"),
        ({"placement.generation": 3}, "device 3 of 4 belongs to no class"),
        (
            {"placement": {"generation": 1, "training": 2}},
            "trainer's devices 1-2 belong to the classes slow and fast",
        ),
        (
            {"placement": {"generation": 2, "training": 1}, "engine": {"tensor_parallel": 2}},
            "engine 0 has the devices 0, 1 of the classes fast and slow",
        ),
        ({"domains.long.device_class": "fats"}, "'fats' is not a class in device_classes. Did you mean 'fast'"),
        ({"device_classes": {}}, "but the run has no device classes"),
        ({"rollout.scheduling": {"type": "batch"}}, "domains.long prefers a device class"),
    ],
)
def test_device_classes_simulation_invalid_combinations_have_one_message(
    build: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(changes)


def test_device_classes_simulation_is_not_planned(build: Any, tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(dump(build().model_dump(mode="json")))
    with pytest.raises(ConfigError, match="has device_classes, which `roll plan` does not support"):
        read_plan_source(str(path))
