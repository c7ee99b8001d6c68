"""Whole simulated runs: bounds from theory, equal seeds, failures, staleness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from unit.simulation.run_helpers import steady, workload

from roll.errors import ConfigError
from roll.simulation.run import simulate

pytestmark = pytest.mark.integration

STEP_S = 0.01


@given(
    num_engines=st.integers(1, 6),
    slots=st.integers(1, 24),
    prompts=st.integers(1, 12),
    group=st.integers(1, 8),
    sigma=st.floats(0, 2.5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_simulation_run_a_synchronous_step_keeps_the_bound_of_list_scheduling(
    num_engines, slots, prompts, group, sigma, seed
) -> None:
    """ROLL Flash's P1 (Graham 1966): Q rollouts of mean g and longest L on K slots take at most (Q/K) g + L.

    It holds because nobody waits at one engine while another has a free slot.
    """
    config = steady(
        {
            "placement.generation": num_engines,
            "engine.max_num_seqs": slots,
            "rollout.prompts_per_step": prompts,
            "rollout.group_size": group,
            "answer_tokens": {"type": "lognormal", "median": 40, "sigma": sigma, "max": 3000},
        }
    )
    (step,) = simulate(config, seed=seed).steps
    assert step.num_samples == prompts * group
    bound = STEP_S * (step.num_tokens / (num_engines * slots) + step.longest)
    assert STEP_S * step.longest * (1 - 1e-9) <= step.wait_s <= bound * (1 + 1e-9)


def test_simulation_run_one_slot_takes_exactly_the_sum() -> None:
    (step,) = simulate(steady({"placement.generation": 1, "engine.max_num_seqs": 1})).steps
    assert step.wait_s == pytest.approx(STEP_S * step.num_tokens, rel=1e-12)


def test_simulation_run_the_same_seed_does_the_same_and_another_does_not(tmp_path: Path) -> None:
    config = workload(tmp_path, {"num_steps": 3, "reward.latency": {"type": "normal", "mean": 1, "std": 1}})
    first, again, other = simulate(config, seed=5), simulate(config, seed=5, trace=True), simulate(config, seed=6)
    assert first.digest == again.digest
    assert first.steps == again.steps
    assert other.digest != first.digest


def test_simulation_run_equal_runs_write_equal_traces_that_a_viewer_can_pair(tmp_path: Path) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        simulate(workload(tmp_path, {"num_steps": 2}), seed=1, trace=True).recorder.write(tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    events = json.loads(texts[0])
    opened = sorted((e["id"], e["name"]) for e in events if e["ph"] == "b")
    assert opened == sorted((e["id"], e["name"]) for e in events if e["ph"] == "e")
    assert {name for _, name in opened} == {"queued", "generating", "rewarding", "accepted"}
    assert sum(e["ph"] == "n" and e["name"] == "trained" for e in events) == 2 * 16


def test_simulation_run_a_dead_engine_is_replaced_and_every_rollout_is_trained() -> None:
    calm = simulate(steady({"num_steps": 2})).steps
    failing = simulate(
        steady(
            {
                "num_steps": 2,
                "engine.restart_s": 3.0,
                "failures": [
                    {"type": "death", "engine": 0, "at_s": 0.205},
                    {"type": "stall", "engine": 1, "at_s": 0.3, "duration_s": 2.0},
                ],
            }
        )
    ).steps
    assert [(s.num_samples, s.num_tokens) for s in failing] == [(s.num_samples, s.num_tokens) for s in calm]
    assert failing[0].wait_s > calm[0].wait_s + 1


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_simulation_run_asynchrony_keeps_its_bound_and_is_no_slower(ratio: float, mode: str) -> None:
    common = {"num_steps": 6, "placement.training": 2, "training.duration": {"type": "fixed", "value": 1.0}}
    synchronous = simulate(steady(common), seed=3)
    ahead = simulate(
        steady(common | {"rollout.scheduling.async_ratio": ratio, "rollout.scheduling.pause_mode": mode}), seed=3
    )
    assert all(step.max_staleness <= -(-ratio // 1) for step in ahead.steps)
    assert sum(step.num_samples for step in ahead.steps) == 6 * 16
    assert ahead.step_s < synchronous.step_s


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_simulation_run_interrupted_answers_end_as_long_as_if_nothing_had_happened(mode: str) -> None:
    config = steady(
        {
            "num_steps": 5,
            "placement.training": 1,
            "answer_tokens": {"type": "fixed", "value": 333},
            "training.duration": {"type": "fixed", "value": 0.2},
            "rollout.scheduling.async_ratio": 2.0,
            "rollout.scheduling.pause_mode": mode,
        }
    )
    steps = simulate(config, seed=2).steps
    assert [(step.num_samples, step.num_tokens, step.longest) for step in steps] == [(16, 16 * 333, 333)] * 5
    assert max(step.max_staleness for step in steps) >= 1


def test_simulation_run_environments_in_step_wait_for_the_slowest_of_every_turn() -> None:
    turns = {"num_turns": 5, "latency": {"type": "normal", "mean": 10, "std": 5}, "observation_tokens": 3}
    base = {"engine.max_num_seqs": 16, "answer_tokens": {"type": "fixed", "value": 2}}
    alone = simulate(steady(base | {"environment": turns})).steps[0]
    together = simulate(steady(base | {"environment": turns | {"lockstep": True}})).steps[0]
    assert alone.num_tokens == together.num_tokens == 16 * (5 * 2 + 4 * 3)
    assert together.wait_s > 1.2 * alone.wait_s


@pytest.mark.parametrize("async_ratio", [0.0, 1.0])
def test_simulation_run_environments_in_step_do_not_wait_for_groups_that_are_over(async_ratio: float) -> None:
    changes = {
        "environment": {"num_turns": 3, "latency": {"type": "normal", "mean": 10, "std": 5}, "lockstep": True},
        "answer_tokens": {"type": "fixed", "value": 2},
        "reward.solve_rate": {"type": "empirical", "values": [0, 0.5, 0.5, 1]},
        "reward.filter_groups": True,
        "rollout.scheduling.async_ratio": async_ratio,
        "num_steps": 4,
    }
    if async_ratio:
        changes["placement.training"] = 1
    run, again = simulate(steady(changes)), simulate(steady(changes))
    assert all(step.num_samples == 16 for step in run.steps)
    assert sum(step.num_filtered for step in run.steps) > 4
    assert run.digest == again.digest


def test_simulation_run_filtered_groups_are_replaced() -> None:
    rates = {"type": "empirical", "values": [0, 0.5, 0.5, 1]}
    filtering = {"reward.solve_rate": rates, "reward.filter_groups": True, "num_steps": 4}
    steps = simulate(steady(filtering)).steps
    assert all(step.num_samples == 16 for step in steps)
    assert sum(step.num_filtered for step in steps) > 4


def test_simulation_run_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(66 GB\) does not fit on 1 x h800 .*raise engine.tensor_parallel"):
        simulate(workload(tmp_path, {"model": "qwen2.5-32b", "engine": {"memory_share": 0.8}}))


def test_simulation_run_answers_longer_than_the_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit into an engine's KV cache of 50,000 tokens"):
        simulate(steady({"engine.kv_capacity": 50_000}))


def test_simulation_run_other_processes_and_hash_seeds_do_exactly_the_same() -> None:
    tests = Path(__file__).parents[2]
    found = set()
    for hash_seed in ("0", "1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "unit.simulation.digests"]
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().split())) == 3


STREAMED = {
    "placement.generation": 1,
    "placement.training": 1,
    "engine.max_num_seqs": 1,
    "rollout.prompts_per_step": 8,
    "rollout.group_size": 1,
    "answer_tokens": {"type": "fixed", "value": 200},
    "training.duration": None,
    "training.overhead_s": 0.0,
    "rollout.scheduling.stream_training": True,
}
"""One answer after the other, each of 2 s, so that each is trained while the next one is generated."""


def test_simulation_run_streamed_gradients_leave_only_the_last_group_to_train() -> None:
    (plain,) = simulate(steady(STREAMED | {"rollout.scheduling.stream_training": False})).steps
    (streamed,) = simulate(steady(STREAMED)).steps
    assert plain.wait_s == pytest.approx(16.0)
    assert plain.train_s > 0
    assert streamed.total_s == pytest.approx(16.0 + plain.train_s / 8)
    assert streamed.num_tokens == plain.num_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement.training": 0}, "set placement.training"),
        ({"training.num_updates": 2}, "set training.num_updates to 1"),
        ({"training.duration": {"type": "fixed", "value": 1}}, "remove training.duration"),
    ],
)
def test_simulation_run_streamed_gradients_need_a_trainer_whose_time_depends_on_tokens(changes, message) -> None:
    with pytest.raises(ValidationError, match=message):
        steady(STREAMED | changes)


def test_simulation_run_answers_grow_by_the_configured_factor() -> None:
    """Prompt i of 20 has answers of 100 x 10^(i / 20) tokens; a step of 4 prompts trains on 4 x 2 answers."""
    config = steady(
        {
            "answer_tokens": {"type": "fixed", "value": 100},
            "answer_growth": 10.0,
            "num_steps": 5,
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 10_000},
        }
    )
    found = [step.num_tokens for step in simulate(config).steps]
    assert found == [2 * sum(round(100 * 10 ** (i / 20)) for i in range(4 * step, 4 * step + 4)) for step in range(5)]
