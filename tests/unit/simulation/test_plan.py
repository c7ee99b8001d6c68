"""Plans: what fits, what limits, and when asynchrony does not help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.simulation.run_helpers import steady

from roll.errors import ConfigError
from roll.simulation import plan_search
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.memory import estimate_memory
from roll.simulation.plan_report import render_plan
from roll.simulation.planner import make_plan
from roll.simulation.run import simulate

pytestmark = pytest.mark.integration

SMALL = {
    "placement.generation": 8,
    "engine": {"max_num_seqs": 32, "restart_s": 0.0},
    "rollout": {"prompts_per_step": 16, "group_size": 4, "max_new_tokens": 8192},
    "training": {"passes": 4.0},
}
LONG_TAIL = SMALL | {"answer_tokens": {"type": "quantiles", "points": [[0.5, 300], [0.99, 8000]], "max": 8192}}


def test_plan_a_long_tail_and_costly_training_are_worth_overlapping() -> None:
    plan = make_plan(steady(LONG_TAIL | {"training": {"passes": 40.0}}))
    assert plan.no_gain_reason == ""
    assert plan.best.config.rollout.scheduling.async_ratio > 0
    assert plan.best.step_s < 0.8 * plan.synchronous.step_s
    assert plan.best.step_s <= plan_search.MAX_SLOWDOWN * min(c.step_s for c in plan.candidates)
    assert "asynchrony helps" in render_plan(plan)


def test_plan_an_asynchronous_plan_is_compared_with_batches_split_into_updates_of_equal_staleness() -> None:
    plan = make_plan(steady(LONG_TAIL | {"training": {"passes": 40.0}}))
    assert plan.split is not None
    updates = plan.split.config.training.num_updates
    assert updates == 1 + plan.best.config.rollout.scheduling.async_ratio
    assert plan.split.config.rollout.prompts_per_step == 16 * updates
    assert plan.split.step_s < plan.synchronous.step_s
    gain = plan.split.step_s / plan.best.step_s
    assert f"at equal staleness, it is {gain:.2f} times as fast" in render_plan(plan)


def test_plan_equal_answers_without_training_gain_nothing_from_asynchrony() -> None:
    """The engines of the synchronous plan are full, so that further requests do not make them faster."""
    equal = SMALL | {
        "answer_tokens": {"type": "fixed", "value": 500},
        "engine": {"max_num_seqs": 8, "restart_s": 0.0},
    }
    plan = make_plan(steady(equal | {"training": {"passes": 0.1, "overhead_s": 0.0, "sync_s": 0.0}}))
    assert "a step of the best split is predicted to take at least" in plan.no_gain_reason
    assert plan.best.config.placement.is_colocated
    assert "asynchrony does not help" in render_plan(plan)


def test_plan_divisions_that_train_longer_than_a_whole_step_are_not_simulated() -> None:
    """Training takes nearly all of a step, so that any part of the devices needs longer than all of a step."""
    plan = make_plan(steady(LONG_TAIL | {"training": {"passes": 4000.0}}))
    assert all(candidate.config.placement.is_colocated for candidate in plan.candidates)
    assert "of 8 devices training alone would take" in plan.no_gain_reason
    assert "asynchrony does not help" in render_plan(plan)


def test_plan_wide_engines_are_found_where_one_device_cannot_hold_the_model() -> None:
    plan = make_plan(
        steady(LONG_TAIL | {"model": "qwen2.5-32b", "placement.generation": 16, "engine.memory_share": 0.8})
    )
    assert all(c.config.engine.width >= 2 for c in plan.candidates)
    assert {role.role for role in plan.memory} == {"actor_train", "actor_infer"}


def test_plan_what_fits_nowhere_says_how_much_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"no plan for qwen2\.5-32b fits 1 x a100 \(synchronous, TP 1:"):
        make_plan(steady(LONG_TAIL | {"model": "qwen2.5-32b", "device": "a100", "placement.generation": 1}))


def test_plan_memory_by_hand() -> None:
    config = steady(SMALL | {"engine": {"tensor_parallel": 2, "kv_capacity": 100_000}})
    train, engine = estimate_memory(config, load_model_sizes("qwen3-8b"), load_device("h800"))
    assert train.parts["weights"] == 8_190_000_000 * 4 // 8
    assert train.parts["optimizer"] == 8_190_000_000 * 12 // 8
    # of the vocabulary's matrix the gradient, and that in float32: more than the 10 bytes a weight of one of 36 layers
    assert train.parts["gathered weights"] == (2 + 4) * 151_936 * 4096
    assert engine.parts["weights"] == 8_190_000_000
    # 36 layers x 2 x 8 heads x 128 x 2 bytes = 147,456 bytes a token, half of it on each of two devices
    assert engine.parts["KV cache"] == 100_000 * 147_456 // 2


def test_plan_a_trainer_of_one_device_has_a_copy_to_compute_with_and_gathers_nothing() -> None:
    train, _ = estimate_memory(
        steady(SMALL | {"placement.generation": 1}), load_model_sizes("smollm2-135m"), load_device("h800")
    )
    assert train.parts["weights"] == 134_500_000 * (4 + 2)
    assert "gathered weights" not in train.parts


def test_plan_the_limit_is_named() -> None:
    plan = make_plan(steady(LONG_TAIL | {"training": {"passes": 400.0}}))
    assert plan.synchronous.bottleneck == "training"
    plan = make_plan(steady(SMALL | {"training": {"passes": 0.0, "overhead_s": 0.0, "sync_s": 500.0}}))
    assert plan.synchronous.bottleneck == "weight sync"


@pytest.mark.parametrize(
    ("slow", "limit"),
    [
        ({"reward": {"latency": {"type": "fixed", "value": 500.0}}}, "rewards"),
        ({"environment": {"num_turns": 2, "latency": {"type": "fixed", "value": 250.0}}}, "environments"),
        ({}, "generation throughput"),
    ],
)
def test_plan_engines_that_wait_for_others_are_not_called_the_limit(slow: dict[str, Any], limit: str) -> None:
    """Answers of 400 tokens take seconds; what comes after them takes 500 s."""
    few = SMALL | {"answer_tokens": {"type": "fixed", "value": 400}, "engine": {"step_s": 0.01, "max_num_seqs": 4}}
    plan = make_plan(steady(few | {"training": {"passes": 0.0, "overhead_s": 0.0, "sync_s": 0.0}} | slow))
    assert plan.synchronous.bottleneck == limit
    assert (plan.synchronous.busy_share < 0.1) == bool(slow)
    assert not slow or "keeps its engines busy" not in plan.no_gain_reason


LARGE = LONG_TAIL | {
    "placement.generation": 64,
    "rollout": {"prompts_per_step": 64, "group_size": 4, "max_new_tokens": 8192},
    "training": {"passes": 40.0},
}


def test_plan_large_plans_are_compared_in_part_and_recommended_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[tuple[int, int]] = []

    def shorter(config):
        simulated.append((config.placement.num_devices, config.rollout.prompts_per_step // config.training.num_updates))
        return simulate(config)

    monkeypatch.setattr(plan_search, "simulate", shorter)
    plan = make_plan(steady(LARGE))
    assert all(devices == prompts for devices, prompts in simulated), "devices and prompts in the same proportion"
    assert (32, 32) in simulated and simulated.count((64, 64)) < len(simulated) / 2
    assert plan.best.divisor == plan.synchronous.divisor == 1
    assert plan.best.config.placement.num_devices == 64
    role = next(role for role in plan.memory if role.role == "actor_train")
    assert role.count == plan.best.config.placement.num_training_devices, "memory is that of the whole plan"
    assert "about " in render_plan(plan)


def test_plan_a_gain_above_the_bound_is_explained_by_what_generation_cost() -> None:
    plan = make_plan(steady(LONG_TAIL | {"training": {"passes": 40.0}}))
    gain = plan.synchronous.step_s / plan.best.step_s
    for bound, explained in ((gain / 2, True), (gain * 2, False)):
        text = render_plan(replace(plan, gain_bound=bound, best=replace(plan.best, busy_share=0.01)))
        assert f"with the costs of the synchronous plan, the theoretical bound is {bound:.2f} times as fast" in text
        assert ("less time on the same answers" in text) is explained
