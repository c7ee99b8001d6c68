"""Measured pace: curves from answers, and the requests that a router sends to slow and to fast engines."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.rollout.test_proxy import engine, proxy_of, request, within
from unit.simulation.run_helpers import steady

from roll.rollout import Router
from roll.rollout.pace import (
    HALF_LIFE,
    TOLERANCE,
    UNMEASURED,
    AnswerLatency,
    AnswerSums,
    PaceCurve,
    PaceMeter,
    estimate_pace_curves,
    fit_pace_curve,
)
from roll.rollout.routing import RoutingPolicy
from roll.simulation.run import simulate
from roll.types import Generation

CAPACITY = 16
ANSWERS = st.builds(
    AnswerLatency,
    num_tokens=st.integers(0, 10**6),
    seconds=st.floats(0, 1e6),
    mean_requests=st.floats(0, 10**4),
)


def answer(token_s: float, num_tokens: int = 100, mean_requests: float = 4.0) -> AnswerLatency:
    return AnswerLatency(num_tokens=num_tokens, seconds=token_s * num_tokens, mean_requests=mean_requests)


def meter_of(num_answers: int = 10, **token_s: float) -> PaceMeter:
    """Meter of engines that have given `num_answers` answers each, with these times per token."""
    meter = PaceMeter()
    for name in token_s:
        meter.add(name)
    for _ in range(num_answers):
        for name, seconds in token_s.items():
            meter.record(name, answer(seconds), CAPACITY)
    return meter


def router_of(policy: RoutingPolicy = "measured_pace", **token_s: float) -> Router:
    """Router of engines with `CAPACITY` slots, which has measured these times per token."""
    router = Router(policy, max_kv_used=1.0)
    for name in token_s:
        router.add(engine(name, CAPACITY))  # type: ignore[arg-type]
    for _ in range(10):
        for name, seconds in token_s.items():
            router.record_latency(name, answer(seconds))
    return router


def count_choices(router: Router, num_requests: int) -> Counter[str]:
    chosen = [router.acquire_slot() for _ in range(num_requests)]
    return Counter(each.engine_id for each in chosen if each is not None)


# ---- curves


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 64), ANSWERS), max_size=60))
def test_pace_curves_are_finite_positive_and_increasing_after_any_answers(
    answers: list[tuple[str, int, AnswerLatency]],
) -> None:
    meter = PaceMeter()
    for name in "abc":
        meter.add(name)
    for name, capacity, each in answers:
        meter.record(name, each, capacity)
    curves = meter.estimate_curves()
    assert curves.keys() == set("abc")
    for curve in curves.values():
        assert math.isfinite(curve.compute_token_s(1.0))
        assert curve.idle_s > 0 and curve.slope_s > 0


@given(st.floats(1e-4, 1.0), st.floats(0.1, 4.0), st.lists(st.floats(0.0, 1.0), min_size=8, max_size=30))
def test_pace_a_curve_through_exact_answers_is_found(idle_s: float, relative: float, uses: list[float]) -> None:
    uses = [*uses, 0.0, 1.0]
    curve, sums = PaceCurve(idle_s, relative * idle_s), AnswerSums()
    for use in uses:
        seconds = 100 * curve.compute_token_s(use)
        sums += AnswerSums(1.0, 100.0, seconds, 100 * use, 100 * use * use, seconds * use)
    found = fit_pace_curve(sums, curve)
    assert found.compute_token_s(0.5) == pytest.approx(curve.compute_token_s(0.5), rel=1e-6)
    assert found.slope_s == pytest.approx(curve.slope_s, rel=1e-6)


@given(st.lists(st.floats(1.0, 1.2), min_size=1, max_size=6))
def test_pace_engines_that_are_about_equally_fast_are_not_distinguished(factors: list[float]) -> None:
    curves = meter_of(**{f"e{i}": 0.01 * factor for i, factor in enumerate(factors)}).estimate_curves()
    assert set(curves.values()) == {UNMEASURED}


def test_pace_without_answers_all_engines_have_the_same_curve() -> None:
    assert set(estimate_pace_curves({"a": AnswerSums(), "b": AnswerSums()}).values()) == {UNMEASURED}
    assert estimate_pace_curves({}) == {}


def test_pace_an_engine_without_answers_is_as_fast_as_the_others_on_average() -> None:
    meter = meter_of(100, fast=0.01, slow=0.03)
    meter.add("new")
    times = {name: curve.compute_token_s(0.25) for name, curve in meter.estimate_curves().items()}
    assert times["fast"] == pytest.approx(0.01, rel=0.15) and times["slow"] == pytest.approx(0.03, rel=0.1)
    assert times["new"] == pytest.approx((times["fast"] + times["slow"]) / 2, rel=0.1)


def test_pace_a_busy_engine_is_not_taken_for_a_slow_one() -> None:
    """Both engines take 10 ms per token, and 10 ms more when full; one of them is always full."""
    meter, rng = PaceMeter(), random.Random(0)
    for name in ("light", "full"):
        meter.add(name)
    for _ in range(50):
        for name, requests in (("light", rng.uniform(1, 8)), ("full", 16.0)):
            token_s = 0.01 + 0.01 * requests / CAPACITY
            meter.record(name, answer(token_s, mean_requests=requests), CAPACITY)
    assert set(meter.estimate_curves().values()) == {UNMEASURED}


def test_pace_an_engine_that_recovers_is_found_after_its_own_answers_and_after_those_of_others() -> None:
    for own_answers in (True, False):
        meter = meter_of(a=0.01, b=0.01, c=0.03)
        assert len(set(meter.estimate_curves().values())) == 2
        for _ in range(8 * HALF_LIFE):
            for name in ("a", "b", "c") if own_answers else ("a", "b"):
                meter.record(name, answer(0.01), CAPACITY)
        assert set(meter.estimate_curves().values()) == {UNMEASURED}


def test_pace_weights_of_many_answers_stay_finite() -> None:
    meter = meter_of(a=0.01, b=0.02)
    for _ in range(60 * HALF_LIFE):
        meter.record("a", answer(0.01), CAPACITY)
        meter.record("b", answer(0.02), CAPACITY)
    curves = meter.estimate_curves()
    assert curves["b"].compute_token_s(0.25) == pytest.approx(2 * curves["a"].compute_token_s(0.25), rel=0.1)


# ---- routing


def test_pace_a_slow_engine_gets_fewer_requests_and_the_policy_least_loaded_ignores_that() -> None:
    assert count_choices(router_of(a=0.01, b=0.01, c=0.02), 24)["c"] in range(1, 5)
    assert count_choices(router_of("least_loaded", a=0.01, b=0.01, c=0.02), 24)["c"] == 8


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-4, 10.0), min_size=1), st.integers(0, 80))
def test_pace_no_engine_is_idle_while_another_has_two_requests(token_s: dict[str, float], num_requests: int) -> None:
    router = router_of(**token_s)
    chosen = count_choices(router, num_requests)
    assert chosen.total() == min(num_requests, CAPACITY * len(token_s))
    assert max(chosen.values(), default=0) <= 1 or set(chosen) == set(token_s)


@given(
    st.lists(st.tuples(st.integers(0, 7), st.floats(1.0, 1.2)), max_size=120),
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.booleans(),
)
def test_pace_routing_to_equal_engines_is_that_of_least_loaded(
    moves: list[tuple[int, float]], capacities: list[int], sessions: bool
) -> None:
    routers = [Router("measured_pace", 1.0), Router("least_loaded", 1.0)]
    for router in routers:
        for i, capacity in enumerate(capacities):
            router.add(engine(f"e{i}", capacity))  # type: ignore[arg-type]
    running: list[str] = []
    for kind, factor in moves:
        if kind < 5:
            session = f"s{kind}" if sessions else ""
            first, second = (router.acquire_slot(session) for router in routers)
            assert (first and first.engine_id) == (second and second.engine_id)
            if first is not None:
                running.append(first.engine_id)
        elif running:
            name = running.pop(kind % len(running))
            for router in routers:
                router.record_latency(name, answer(0.01 * factor))
                router.release_slot(name)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 1.0)), max_size=80), st.lists(st.integers(1, 9), min_size=1))
def test_pace_no_slot_is_free_while_a_request_waits(moves: list[tuple[bool, float]], capacities: list[int]) -> None:
    router = Router("measured_pace", 1.0)
    for i, capacity in enumerate(capacities):
        router.add(engine(f"e{i}", capacity))  # type: ignore[arg-type]
    running: list[str] = []
    for takes, token_s in moves:
        if takes:
            chosen = router.acquire_slot()
            assert (chosen is None) == (len(running) == sum(capacities))
            running += [chosen.engine_id] if chosen is not None else []
        elif running:
            name = running.pop(len(moves) % len(running))
            router.record_latency(name, answer(token_s * (1 + int(name[1:]))))
            router.release_slot(name)


def test_pace_a_session_stays_at_its_engine_unless_another_is_much_less_loaded() -> None:
    router = router_of(a=0.01, b=0.01, c=0.03)
    chosen = router.acquire_slot("s")
    assert chosen is not None and chosen.engine_id == "a"
    count_choices(router, 4)
    assert (chosen := router.acquire_slot("s")) is not None and chosen.engine_id == "a"
    while router.count_requests("a") < 12:
        router._entries["a"].num_requests += 1
    assert (chosen := router.acquire_slot("s")) is not None and chosen.engine_id == "b"


def test_pace_a_replacement_is_measured_again_and_an_engine_that_wakes_is_not() -> None:
    router = router_of(a=0.01, b=0.01, c=0.03)
    slow = router._entries["c"].engine
    router.disable("c")
    router.add(slow)
    assert router._entries["c"].curve.idle_s > router._entries["a"].curve.idle_s
    router.add(engine("c", CAPACITY))  # type: ignore[arg-type]
    assert router._entries["c"].curve.compute_token_s(0.25) < 0.012 or router._entries["c"].curve == UNMEASURED


# ---- the times of answers


def test_pace_the_time_of_an_answer_does_not_include_pauses_and_counts_the_requests_beside_it() -> None:
    answers: list[AnswerLatency] = []

    async def main() -> list[Generation]:
        router = Router()
        router.record_latency = lambda engine_id, answer: answers.append(answer)  # type: ignore[method-assign]
        proxy = proxy_of(engine("a"))
        proxy._fleet.get_connection("a")._on_answer = router.record_latency
        tasks = [asyncio.create_task(proxy.generate(request(str(i)))) for i in range(3)]
        await asyncio.sleep(2.5)
        await proxy.suspend("keep")
        await asyncio.sleep(500.0)
        await proxy.resume()
        return await asyncio.gather(*tasks)

    assert len(within(main())) == 3
    assert [each.num_tokens for each in answers] == [8] * 3
    assert all(each.seconds == pytest.approx(8.0, abs=1.5) for each in answers)
    assert all(each.mean_requests == pytest.approx(3.0, abs=0.1) for each in answers)


# ---- whole runs

RUN: dict[str, Any] = {
    "placement.generation": 4,
    "engine.max_num_seqs": 64,
    "rollout.prompts_per_step": 16,
    "num_steps": 5,
    "warmup_steps": 1,
}


def compute_step_s(changes: dict[str, Any], routing: RoutingPolicy) -> list[float]:
    run = simulate(steady(RUN | changes | {"rollout.scheduling.routing": routing}), seed=4)
    return [step.total_s for step in run.steps]


def test_pace_equal_engines_are_as_fast_as_with_least_loaded_routing() -> None:
    assert compute_step_s({}, "measured_pace") == compute_step_s({}, "least_loaded")


def test_pace_one_engine_of_four_at_half_speed_delays_a_step_less() -> None:
    slow = {"failures": [{"type": "slowdown", "engine": 1, "at_s": 0.0, "duration_s": 1e6, "factor": 2.0}]}
    assert 1.2 * sum(compute_step_s(slow, "measured_pace")) < sum(compute_step_s(slow, "least_loaded"))


def test_pace_a_step_is_as_fast_as_before_when_a_slow_engine_has_recovered() -> None:
    calm = compute_step_s({}, "measured_pace")
    failure = {"type": "slowdown", "engine": 1, "at_s": 0.0, "duration_s": sum(calm) / 2, "factor": 4.0}
    changes = {"failures": [failure], "num_steps": 12, "warmup_steps": 9}
    after, expected = (
        compute_step_s(changes, "measured_pace"),
        compute_step_s(changes | {"failures": []}, "least_loaded"),
    )
    assert sum(after) == pytest.approx(sum(expected), rel=0.1)


def test_pace_tolerance_is_larger_than_the_difference_of_equal_engines_in_a_run() -> None:
    """Answers of long-tailed lengths: the times per token of four equal engines differ by less than the tolerance."""
    changes = {"engine.step_s": None, "num_steps": 3}
    assert compute_step_s(changes, "measured_pace") == compute_step_s(changes, "least_loaded")
    assert TOLERANCE < 1.5
