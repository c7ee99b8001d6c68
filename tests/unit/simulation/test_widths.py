"""Simulated runs with engines of several widths on the same devices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from unit.simulation.engine_helpers import request, seed_tokens, settings

from roll.config.simulation import SimulationConfig
from roll.rollout.batch import Batch
from roll.rollout.engine_widths import EngineWidths
from roll.rollout.proxy import LLMProxy
from roll.simulation.batch import BatchLimits
from roll.simulation.clock import run
from roll.simulation.engine import SimulatedEngine
from roll.simulation.hardware import load_device, load_model_sizes
from roll.simulation.roles import SimulatedEngines
from roll.simulation.run import SimulatedRun, build_engine_settings, simulate
from roll.types import Generation, Group

pytestmark = pytest.mark.integration

WORKLOAD: dict[str, Any] = {
    "name": "widths",
    "num_steps": 8,
    "model": "qwen2.5-14b",
    "device": "h800",
    "placement": {"generation": 4},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 8192},
    "prompt_tokens": {"type": "fixed", "value": 200.0},
    "answer_tokens": {"type": "lognormal", "median": 300, "sigma": 0.5},
    "answer_growth": 20.0,
}


def build(tensor_parallel: Any, **changes: Any) -> SimulationConfig:
    engine = {"tensor_parallel": tensor_parallel, **changes.pop("engine", {})}
    return SimulationConfig.model_validate({**WORKLOAD, "engine": engine, **changes})


def count_tokens(run: SimulatedRun) -> int:
    return sum(step.num_tokens for step in run.steps)


def test_engine_widths_simulation_widens_the_engines_as_answers_grow() -> None:
    narrow, wide, both = simulate(build(1)), simulate(build(2)), simulate(build([1, 2]))
    assert [step.width for step in narrow.steps] == [1] * 8
    assert [step.width for step in wide.steps] == [2] * 8
    widths = [step.width for step in both.steps]
    assert widths == sorted(widths)  # answers only grow
    assert widths[0] == 1 and widths[-1] == 2
    assert count_tokens(narrow) == count_tokens(wide) == count_tokens(both)
    before = widths.index(2)
    for step, alone in zip(both.steps[:before], narrow.steps[:before], strict=True):
        assert step.total_s == pytest.approx(alone.total_s)
    assert sum(step.num_preempted for step in both.steps) < sum(step.num_preempted for step in narrow.steps)


def test_engine_widths_simulation_pays_for_a_switch_the_time_of_a_weight_sync() -> None:
    wide, both = simulate(build(2)), simulate(build([1, 2]))
    first = [step.width for step in both.steps].index(2)
    # The engines wake with the current weights; afterwards, the steps are those of wide engines.
    assert both.steps[first].total_s == pytest.approx(wide.steps[first].total_s + wide.steps[first].sync_s, rel=1e-6)
    for step, alone in zip(both.steps[first + 1 :], wide.steps[first + 1 :], strict=True):
        assert step.total_s == pytest.approx(alone.total_s, rel=1e-6)


def test_engine_widths_simulation_chooses_the_width_of_short_and_long_rounds_separately() -> None:
    """Only long rounds, whose answers are the longest, preempt requests."""
    run = simulate(
        build(
            [1, 2],
            num_steps=20,
            answer_growth=1.0,
            answer_tokens={"type": "lognormal", "median": 700, "sigma": 1.2},
            rollout={**WORKLOAD["rollout"], "scheduling": {"type": "tail_batching"}},
        )
    )
    kinds = {kind: {step.width for step in run.steps[10:] if step.kind == kind} for kind in ("short", "long")}
    assert kinds == {"short": {1}, "long": {2}}


def test_engine_widths_simulation_repeats_bit_for_bit() -> None:
    assert simulate(build([1, 2])).digest == simulate(build([1, 2])).digest


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_engine_widths_simulation_moves_requests_in_flight(ratio: float) -> None:
    rollout = {**WORKLOAD["rollout"], "scheduling": {"async_ratio": ratio}}
    run = simulate(build([1, 2], rollout=rollout, placement={"generation": 4, "training": 4}))
    assert {step.width for step in run.steps} == {1, 2}
    assert all(step.num_samples == 256 for step in run.steps)
    assert max(step.max_staleness for step in run.steps) <= 1


def test_engine_widths_simulation_wide_engines_have_more_room_for_the_cache() -> None:
    config, model, device = build([1, 2]), load_model_sizes("qwen2.5-14b"), load_device("h800")
    narrow, wide = (build_engine_settings(config, model, device, width).limits.kv_capacity for width in (1, 2))
    saved = model.weight_bytes / model.kv_bytes_per_token
    assert wide == pytest.approx(2 * narrow + saved, abs=2)


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        ({"tensor_parallel": [2, 1]}, {}, "must be ascending, and each width a multiple of the previous one, got"),
        ({"tensor_parallel": [2, 3]}, {}, "must be ascending, and each width a multiple"),
        ({"tensor_parallel": []}, {}, "must be a number of devices or a list of numbers"),
        ({"tensor_parallel": 0}, {}, "must be at least 1, got 0"),
        ({"tensor_parallel": [1, 8]}, {}, "placement.generation 4 must be a multiple of engine.tensor_parallel 8"),
        (
            {"tensor_parallel": [8, 16]},
            {"placement": {"generation": 16}},
            "an engine of 16 devices would span several machines of 8 devices: use widths up to 8",
        ),
        (
            {"tensor_parallel": [1, 2]},
            {"placement": {"generation": 4, "training": 2, "sharing": "stream_training"}},
            "cannot be combined with placement.sharing stream_training",
        ),
        ({"tensor_parallel": [1, 2]}, {"failures": [{"at_s": 1.0}]}, "cannot be combined with failures: set one width"),
    ],
)
def test_engine_widths_simulation_names_what_cannot_work(
    engine: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationConfig.model_validate({**WORKLOAD, "engine": engine, **changes})


def test_engine_widths_requests_move_to_engines_of_the_other_width_which_have_the_current_weights() -> None:
    capacities = {1: 100, 2: 1000}
    awake: list[set[str]] = []

    async def scenario() -> tuple[list[Generation], list[int], int]:
        by_engine = [
            settings(limits=BatchLimits(max_num_seqs=8, max_batched_tokens=64, kv_capacity=capacities[width]))
            for width in (1, 1, 2)
        ]
        engines = SimulatedEngines(by_engine, lambda r: seed_tokens(r) - r.sampling.position, [1, 1, 2])
        proxy = LLMProxy(engines, lambda engine: engines.send_weights(engine, 7))
        widths = EngineWidths(
            proxy, engines.list_ids_by_width(), num_requests=16, on_change=lambda *change: changes.append(change)
        )
        await widths.start()
        awake.append({engine.engine_id for engine in engines.list_awake()})
        running = [asyncio.create_task(proxy.generate(request(str(i), wanted=20))) for i in range(4)]
        await asyncio.sleep(0.1)  # 10 of 20 tokens
        # 16 requests of 13 tokens need 208 tokens of cache; the two engines of one device have 200.
        widths.on_batch(Batch(groups=[cast(Group, build_group(prompt=3, answer=10))]))
        await widths.before_round("")
        awake.append({engine.engine_id for engine in engines.list_awake()})
        found = await asyncio.gather(*running)
        versions = [cast(SimulatedEngine, engine).policy_version for engine in engines.engines]
        await proxy.close()
        await engines.close()
        return found, versions, widths.width

    def build_group(*, prompt: int, answer: int) -> Any:
        rollout = SimpleNamespace(token_ids=np.ones(answer, np.int32))
        return SimpleNamespace(draw=SimpleNamespace(token_ids=np.ones(prompt, np.int32)), rollouts=(rollout,))

    changes: list[tuple[int, ...]] = []
    results: list[Any] = []

    async def main() -> int:
        results.append(await scenario())
        return 0

    run(main(), seed=0)
    found, versions, width = results[0]
    assert width == 2 and changes == [(1, 2)]
    assert awake == [{"engine-0", "engine-1"}, {"engine-2"}]
    assert [len(each.token_ids) for each in found] == [20] * 4
    assert all(0 < (each.policy_versions == 0).sum() < 20 and set(each.policy_versions) == {0, 7} for each in found)
    assert versions == [0, 0, 7]
