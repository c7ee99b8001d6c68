"""`sharing: auto`: the rule with the shortest simulated step."""

from __future__ import annotations

from typing import Any

import pytest
from unit.simulation.test_sharing import build

from roll.config.simulation import SimulationConfig
from roll.simulation import sharing_choice
from roll.simulation.report import render_results, simulate_variants
from roll.simulation.run import simulate
from roll.simulation.sharing_choice import choose_sharing_rule, resolve_sharing, shrink

pytestmark = pytest.mark.integration


def build_auto(training: int = 6, async_ratio: float = 1.0, **changes: Any) -> SimulationConfig:
    place = {"generation": 8, "training": training, "sharing": "auto", "switch_s": changes.pop("switch_s", 2.0)}
    return build(place, async_ratio=async_ratio, **changes)


@pytest.mark.parametrize(("training", "async_ratio"), [(6, 1.0), (6, 0.0), (2, 2.0)])
def test_sharing_choice_is_the_fastest_rule_of_the_scaled_down_run(training: int, async_ratio: float) -> None:
    config = build_auto(training, async_ratio)
    choice = choose_sharing_rule(config)
    expected = {"colocated", "stream_training"} if not async_ratio else {"colocated", "partial_overlap"}
    assert expected <= set(choice.step_s)
    times = {rule: simulate(shrink(config).with_changes({"placement.sharing": rule})).step_s for rule in choice.step_s}
    assert choice.step_s == times  # deterministic
    assert times[choice.rule] <= 1.01 * min(times.values())


def test_sharing_choice_keeps_the_first_rule_unless_another_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self, step_s: float) -> None:
            self.step_s = step_s

    def choose(**seconds: float) -> str:
        monkeypatch.setattr(sharing_choice, "simulate", lambda config: Run(seconds[config.placement.sharing]))
        return choose_sharing_rule(build_auto()).rule

    assert choose(elastic_overlap=100.5, partial_overlap=100, colocated=100) == "elastic_overlap"
    assert choose(elastic_overlap=102, partial_overlap=100.5, colocated=100) == "colocated"
    assert choose(elastic_overlap=102, partial_overlap=100, colocated=101) == "partial_overlap"


def test_sharing_choice_without_alternatives_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_choice, "simulate", None)
    choice = choose_sharing_rule(build_auto(training=0))
    assert (choice.rule, choice.describe()) == ("colocated", "colocated, the only rule for this placement")
    assert choose_sharing_rule(build_auto(async_ratio=0.0), can_stream=False).rule == "colocated"
    assert choose_sharing_rule(build_auto(async_ratio=0.0, num_updates=2)).rule == "colocated"


def test_sharing_choice_scales_large_runs_down() -> None:
    config = build_auto().with_changes(
        {"placement.generation": 64, "placement.training": 48, "rollout.prompts_per_step": 512}
    )
    small = shrink(config)  # 2048 rollouts on 64 engines: a sixteenth of both
    assert (small.placement.generation, small.placement.training) == (4, 3)
    assert (small.rollouts_per_step, small.num_steps, small.warmup_steps) == (128, 5, 2)
    # A sixteenth and an eighth of 6 devices would be rounded to one, which is 1.33 to 2.67 times as many.
    few = shrink(config.with_changes({"placement.training": 6}))
    assert (few.placement.generation, few.placement.training, few.rollouts_per_step) == (11, 1, 340)
    # 28 of 32 devices: an eighth would leave the other 4 engines with half an engine, and a quarter with one.
    most = shrink(config.with_changes({"placement.generation": 32, "placement.training": 28}))
    assert (most.placement.generation, most.placement.training) == (8, 7)


def test_sharing_choice_is_reported() -> None:
    config = build_auto().model_copy(update={"variants": {"auto": {}}, "num_steps": 3, "num_seeds": 1})
    shown = render_results(simulate_variants(config))
    (line,) = (line for line in shown.splitlines() if line.startswith("auto: "))
    assert "placement.sharing auto: " in line
    assert "by the simulated times of a step (elastic_overlap" in line
    given = build({"generation": 8, "training": 6, "sharing": "partial_overlap"}, async_ratio=1.0)
    assert resolve_sharing(given) == (given, "")


def test_sharing_simulation_of_a_trainer_on_some_of_the_devices() -> None:
    every, some = (
        simulate(build({"generation": 8, "training": count, "sharing": "colocated"})).steps for count in (0, 4)
    )
    # All engines generate in both, and half of the devices train: the work beyond the overhead of 1 s takes twice as
    # long.
    assert [step.wait_s for step in some] == pytest.approx([step.wait_s for step in every], rel=0.01)
    for half, whole in zip(some, every, strict=True):
        assert half.train_s - 1 == pytest.approx(2 * (whole.train_s - 1), rel=0.01)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"generation": 8, "training": 8, "sharing": "auto"}, "got training 8: set training to less than 8"),
        ({"generation": 8, "training": 8, "sharing": "colocated"}, "got training 8: set training to less than 8"),
        ({"generation": 8, "training": 0, "sharing": "disaggregated"}, "requires devices that only train"),
    ],
)
def test_sharing_simulation_rejects_rules_without_their_devices(placement: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(placement)
