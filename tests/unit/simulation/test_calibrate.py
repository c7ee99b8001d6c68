"""Measured engines: the step log, the fit, shared prefixes, and `roll simulate --calibrate`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.simulation.engine_helpers import drive, request, timed
from unit.simulation.test_costs import CHIP, TOY

from roll.cli.main import run
from roll.config.load import dump_config
from roll.config.pipelines.rlvr import RLVRConfig
from roll.config.simulation import load_simulation
from roll.errors import ConfigError, DataError
from roll.inference.step_log import StepLog
from roll.simulation.batch import BatchLimits
from roll.simulation.calibrate import build_measured_device
from roll.simulation.costs import EngineCosts, compute_engine_costs, interpolate
from roll.simulation.engine import EngineSettings
from roll.simulation.fit import fit_engine
from roll.simulation.hardware import load_device
from roll.simulation.prefixes import PrefixCache
from roll.tracking import RunDirectory, Tracker
from roll.tracking.rollout_trace import trace_engine_steps
from roll.types import EngineStepSpan, Group, Message, Prompt, PromptDraw, RewardResult, Rollout

CURVE = ((0.0, 0.010), (4.0, 0.012), (16.0, 0.036))
MEASURED = EngineCosts(
    overhead_s=9, weights_s=9, token_s=0.001, communication_s=9, request_s=9, context_s=1e-6, pair_s=0, curve=CURVE
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stretch(requests: int, *, steps: int = 1, started: int = 0, prefilled: int = 0, context: float = 0, seconds: float):
    return EngineStepSpan(
        began_s=0.0, duration_s=seconds, num_steps=steps, num_decoding=requests - started, num_started=started,
        num_prefilled=prefilled, context_tokens=context,
    )  # fmt: skip


# ---- what engines tell


def test_simulation_calibrate_steps_that_only_decode_for_as_many_requests_are_one_stretch() -> None:
    clock = Clock()
    log = StepLog(clock, wall_clock=lambda: 1000.0)
    log.begin()
    for seconds, decoding, started, context in [(0.5, 0, 2, 20), (0.1, 2, 0, 22), (0.2, 2, 0, 24), (0.3, 1, 0, 13)]:
        clock.now += seconds
        log.record_step(num_decoding=decoding, num_started=started, num_prefilled=10 * started, context_tokens=context)
    first, both, last = log.take()
    assert (first.began_s, first.num_started, first.num_prefilled, first.duration_s) == (1000.0, 2, 20, 0.5)
    assert (both.began_s, both.num_steps, both.num_decoding, both.context_tokens) == (1000.5, 2, 2, 23)
    assert both.duration_s == pytest.approx(0.3)
    assert (last.num_steps, last.num_decoding) == (1, 1)
    assert log.take() == []


def test_simulation_calibrate_time_in_which_an_engine_stood_still_belongs_to_no_step() -> None:
    clock = Clock()
    log = StepLog(clock, wall_clock=lambda: 0.0)
    log.record_step(num_decoding=1, num_started=0, num_prefilled=0, context_tokens=1)  # its beginning is not known
    clock.now = 100.0
    log.begin()
    clock.now = 100.25
    log.record_step(num_decoding=1, num_started=0, num_prefilled=0, context_tokens=1)
    assert [found.duration_s for found in log.take()] == [0.25]


def test_simulation_calibrate_steps_beside_the_scoring_of_sequences_are_left_out() -> None:
    clock = Clock()
    log = StepLog(clock, wall_clock=lambda: 0.0)
    log.begin()
    for seconds in (0.5, 0.25):
        clock.now += seconds
        with log.pause_recording() if seconds == 0.5 else nullcontext():
            log.record_step(num_decoding=1, num_started=0, num_prefilled=0, context_tokens=1)
    assert [(found.began_s, found.duration_s) for found in log.take()] == [(0.5, 0.25)]


# ---- costs


def test_simulation_calibrate_a_measured_step_by_hand() -> None:
    assert MEASURED.compute_decode_s(10) == pytest.approx(0.012 + 6 / 12 * 0.024)
    assert MEASURED.compute_decode_s(28) == pytest.approx(0.036 + 12 / 12 * 0.024)  # the last line goes on
    # 3 decode beside 1 that prefills 21 tokens, of which the last one counts as its request: 4 requests, 20 tokens
    assert MEASURED.compute_step_s(3, 21, 1000, 0.0, 1) == pytest.approx(0.012 + 20 * 0.001 + 1000 * 1e-6)
    assert interpolate(((5.0, 0.3),), 70) == 0.3


def test_simulation_calibrate_a_device_that_was_measured_with_another_model_is_refused() -> None:
    fit = fit_engine([stretch(4, steps=50, seconds=1.0)])
    found = build_measured_device(CHIP, TOY, 1, fit)
    assert compute_engine_costs(TOY, found, 1).compute_decode_s(4) == pytest.approx(0.02)
    with pytest.raises(ConfigError, match="was measured with toy on 1"):
        compute_engine_costs(TOY, found, 2)


def test_simulation_calibrate_a_malformed_measurement_is_refused(tmp_path: Path) -> None:
    values = yaml.safe_load((Path(load_device.__code__.co_filename).parent / "devices.yaml").read_text())["cpu"]
    measured = {"model": "toy", "tensor_parallel": 1, "prefill_token_s": 0, "context_token_s": 0}
    for curve, what in [
        ([[4, 0.1], [2, 0.2]], "ascending"),
        ([], "ascending"),
        ([[1]], "missing key 'measured.curve.0.1'"),
    ]:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(values | {"measured": measured | {"curve": curve}}))
        with pytest.raises(ConfigError, match=what):
            load_device(str(path))


# ---- the fit


@settings(max_examples=25, deadline=None)
@given(
    rises=st.lists(st.floats(0, 0.01), min_size=5, max_size=5),
    context_s=st.floats(0, 1e-5),
    prefill_s=st.floats(0, 1e-2),
    seed=st.integers(0, 1000),
)
def test_simulation_calibrate_a_model_of_the_same_form_is_found_again(
    rises: list[float], context_s: float, prefill_s: float, seed: int
):
    knots = np.array([0, 2, 8, 16, 32])
    heights = np.cumsum([0.02, *rises[1:]])
    random = np.random.default_rng(seed)
    stretches = []
    for _ in range(400):
        requests, steps = int(random.integers(1, 33)), int(random.integers(1, 30))
        started = int(random.integers(0, requests + 1)) if random.random() < 0.3 else 0
        steps, prefilled = (1, started * int(random.integers(2, 60))) if started else (steps, 0)
        context = float(random.integers(10, 4000))
        seconds = steps * (np.interp(requests, knots, heights) + context * context_s)
        seconds += max(0, prefilled - started) * prefill_s
        stretches.append(
            stretch(requests, steps=steps, started=started, prefilled=prefilled, context=context, seconds=seconds)
        )
    fit = fit_engine(stretches)
    assert fit.fitted_s == pytest.approx(fit.measured_s, rel=0.01)
    assert fit.step_error < 0.02
    for requests in (3, 12, 30):
        expected = np.interp(requests, knots, heights) + 1000 * context_s
        found = interpolate(fit.curve, requests) + 1000 * fit.context_token_s
        assert found == pytest.approx(expected, rel=0.05)


def test_simulation_calibrate_the_curve_never_falls_also_where_noise_says_so() -> None:
    fit = fit_engine([stretch(2, steps=40, seconds=4.0), stretch(10, steps=40, seconds=2.0)])
    heights = [seconds for _, seconds in fit.curve]
    assert heights == sorted(heights) and heights[0] >= 0
    assert fit.curve[-1][0] == 10


def test_simulation_calibrate_stretches_that_something_else_disturbed_are_left_out() -> None:
    calm = [stretch(requests, steps=10, seconds=0.1) for requests in range(1, 21) for _ in range(5)]
    fit = fit_engine([*calm, stretch(7, seconds=0.5), stretch(12, seconds=3.0)])
    assert fit.num_dropped == 2 and fit.num_steps == 1000
    assert [seconds for _, seconds in fit.curve] == pytest.approx([0.01] * len(fit.curve))


def test_simulation_calibrate_too_few_steps_are_refused() -> None:
    with pytest.raises(DataError, match="at least 20 recorded engine steps, got 3"):
        fit_engine([stretch(2, steps=3, seconds=1.0)])


# ---- shared prefixes


def test_simulation_calibrate_whole_blocks_that_came_before_need_not_be_computed() -> None:
    cache = PrefixCache(4)
    first = np.arange(10, dtype=np.int32)
    assert cache.add_prompt(first) == 0
    assert cache.add_prompt(first) == 8
    assert cache.add_prompt(np.concatenate([first[:5], first])) == 4  # the second block differs
    assert cache.add_prompt(first[:8]) == 4  # the last token is always computed
    cache.clear()
    assert cache.add_prompt(first) == 0


def test_simulation_calibrate_a_second_request_of_a_prompt_prefills_only_what_is_its_own() -> None:
    costs = EngineCosts(overhead_s=0, weights_s=0, token_s=1, communication_s=0, request_s=0, context_s=0, pair_s=0)
    limits = BatchLimits(max_num_seqs=4, max_batched_tokens=64, kv_capacity=1000)

    async def scenario(engine) -> list[float]:
        one = await timed(engine, request("one", prompt=10, wanted=1))
        two = await timed(engine, request("two", prompt=10, wanted=1))
        return [one[0], two[0]]

    assert drive(scenario, EngineSettings(costs=costs, limits=limits, prefix_block=4)) == [10, 12]
    assert drive(scenario, EngineSettings(costs=costs, limits=limits)) == [10, 20]


# ---- a run


def write_run(tmp_path: Path, tiny_model: Path) -> Path:
    """A run directory as a run leaves it: an engine whose steps take 10 ms and 1 ms for each request."""
    config = RLVRConfig.model_validate(
        {
            "name": "real", "output_dir": str(tmp_path), "model": {"path": str(tiny_model)},
            "data": [{"source": "arithmetic", "reward": "math"}],
            "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 40},
            "training": {"num_steps": 3},
            "tracking": {"console": "quiet", "tensorboard": False},
        }
    )  # fmt: skip
    clock = Clock()
    log = StepLog(clock, wall_clock=lambda: 1.8e9)

    class Engine:
        take_steps = staticmethod(log.take)

    with (
        RunDirectory.create(config.run_dir, dump_config(config)) as directory,
        Tracker(directory, config, num_steps=config.training.num_steps) as tracker,
    ):
        for step in (1, 2, 3):
            log.begin()
            for requests in (4, 3, 2, 1):
                for _ in range(20):
                    clock.now += 0.010 + 0.001 * requests
                    log.record_step(num_decoding=requests, num_started=0, num_prefilled=0, context_tokens=0)
            clock.now += 60.0
            with tracker.spans.step(step):
                trace_engine_steps([Engine(), object()], tracker.spans.add_event)
                tracker.log_rollouts(step, [group(step, draw) for draw in (0, 1)], {})
                tracker.log_step(step, {"time/train_s": 9.0 if step == 1 else 2.0, "time/sync_s": 0.5})
    return config.run_dir


def group(step: int, draw: int) -> Group:
    prompt = Prompt(uid=f"{draw}", domain="arithmetic", messages=(Message(role="user", content="?"),))
    drawn = PromptDraw(draw_id=10 * step + draw, prompt=prompt, token_ids=np.arange(5, dtype=np.int32))
    rollouts = [
        Rollout(
            draw_id=drawn.draw_id, index=index, prompt=prompt, prompt_token_ids=drawn.token_ids,
            token_ids=np.ones(20 + index, np.int32), logprobs=np.zeros(20 + index, np.float32),
            policy_versions=np.zeros(20 + index, np.int32), finish_reason="stop", text="1",
            reward=RewardResult(value=float(index), duration_s=0.25),
        )
        for index in (0, 1)
    ]  # fmt: skip
    return Group(draw=drawn, rollouts=tuple(rollouts))


def test_simulation_calibrate_a_run_becomes_a_workload_that_takes_as_long(
    tmp_path: Path, tiny_model: Path, capsys
) -> None:
    path = write_run(tmp_path, tiny_model)
    assert run(["simulate", "--calibrate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "240 engine steps in 3.0 s" in shown and "sync: 0.5 s" in shown
    workload = path / "calibration" / "workload.yaml"
    config = load_simulation(workload)
    found = load_device(config.device)
    assert found.measured is not None
    costs = [interpolate(found.measured.curve, requests) for requests in (1, 2, 3, 4)]
    assert costs == pytest.approx([0.011, 0.012, 0.013, 0.014], rel=1e-3)
    assert run(["simulate", str(workload), f"output_dir={tmp_path / 'out'}", "--no-trace"]) == 0
    results = json.loads((tmp_path / "out" / "real-calibrated" / "results.json").read_text())
    steps = results["variants"]["as written"]["runs"][0]["steps"]
    assert [s["train_s"] for s in steps] == pytest.approx([2.0, 2.0], rel=0.05)
    assert [s["sync_s"] for s in steps] == pytest.approx([0.5, 0.5], rel=0.01)
    # the first of 4 answers ends after 20 or 21 tokens of 14 ms, then the only reward worker takes 4 x 0.25 s
    assert all(1.28 - 0.001 < s["wait_s"] < 1.294 + 0.001 for s in steps)


def test_simulation_calibrate_what_cannot_be_calibrated_says_why(tmp_path: Path, tiny_model: Path, capsys) -> None:
    path = write_run(tmp_path, tiny_model)
    (path / "trace.json").write_text("[]")
    assert run(["simulate", "--calibrate", str(path)]) == 2
    assert "contains no engine steps" in capsys.readouterr().err
    assert run(["simulate", "--calibrate", str(tmp_path / "nowhere")]) == 2
    assert run(["simulate"]) == 2
    assert run(["simulate", "file.yaml", "--calibrate", str(path)]) == 2
