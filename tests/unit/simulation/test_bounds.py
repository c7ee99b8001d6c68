"""ROLL Flash's bounds (arXiv 2510.11345) on simulated runs whose costs are constant, without sync time.

K slots generate, N samples are trained in a step, generating one takes g on average and L at most, an update takes d.

    P1   synchronous:    T <= N g / K + L
    P2   asynchronous:   T <= max{ N g / K + L / (alpha + 1),  d }

P1 is in test_run.py. P2 assumes that a sample may take alpha + 1 steps from its launch to its batch. Where freshness is
hard, it may not: a sample that begins under version v has to be ready for the update from v + alpha, so alpha + 1 steps
pass from its launch to the *end* of that update, which itself takes d. With answers of one length and a slot for each,
every scheduler that keeps the bound of freshness needs

    T >= (L + d) / (alpha + 1)                                                                              (1)

which P2 denies by up to a half (alpha = 1, d = L / 2). So P2 holds as published where d = 0; otherwise, for a whole
alpha, L + d takes the place of L. For any other alpha, with A = alpha rounded up, the samples of a step are launched no
later than at the take A steps before, and L / A takes the place of L / (alpha + 1):

    T <= max over 0 <= x <= 1 of   (1 - x) d + x D + W(x),   D = (L + d) / (alpha + 1)  or  L / A           (2)

W(x): the work of the longest share x of the samples, per step and slot. It is N g / K for x = 1; with answers of one
length it is x N g / K, so that an end of the interval is the worst, and (2) has P2's form: max{ N g / K + D, d }.

Proof of (2). Launches are served in their order, so a take at version k can happen once the first (k + 1) N samples are
done, and these were launched by the take at k - A (for a whole alpha: by the end of the update at k - A - 1). From any
later moment they take at most W / K + L, W being what is left of them to generate (Graham's argument), so

    take(k) <= max{ take(k - 1) + d,  take(k - A) + W / K + L }     or, with a whole alpha,  take(k - A - 1) + d + ...

Following the larger term back to the start gives d for some steps and L (+ d) for A (+ 1) of the others; the W of
different jumps are of different samples.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.simulation.run_helpers import steady

from roll.config.simulation import SimulationConfig
from roll.simulation.run import simulate
from roll.simulation.workload import Workload
from roll.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.integration

STEP_S = 0.01


def asynchronous(ratio: float, changes: dict[str, object]) -> SimulationConfig:
    """Generation beside training, with costs that depend on nothing."""
    common = {"placement.training": 1, "engine.recompute_on_update": False, "rollout.scheduling.async_ratio": ratio}
    return steady(common | changes)


def seconds_of_first(config: SimulationConfig, seed: int, num_groups: int) -> list[float]:
    """To generate each rollout of the groups that are launched first, alone."""
    workload = Workload(config, seed)
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)
    return [
        STEP_S
        * workload.count_answer_tokens(
            GenerationRequest(
                request_id=f"train-{draw}.{index}", token_ids=workload.draw(draw).token_ids, sampling=sampling
            )
        )
        for draw in range(num_groups)
        for index in range(config.rollout.group_size)
    ]


def latest_end(
    seconds: list[float], *, num_steps: int, batch: int, num_slots: int, ratio: float, update_s: float
) -> float:
    """(2) for a run of `num_steps` from its beginning, where a jump may cover fewer steps than elsewhere.

    A request joins an engine when its current step ends, so one step is added to each.
    """
    durations = sorted((duration + STEP_S for duration in seconds), reverse=True)
    work, longest = [0.0, *itertools.accumulate(durations)], durations[0]
    whole = ratio == int(ratio)
    covered = int(ratio) + 1 if whole else math.ceil(ratio)
    found = num_steps * update_s
    for jumps in range(1, num_steps + 1):
        steps_left = num_steps - 1 - covered * (jumps - 1)
        if steps_left < 0:
            break
        left = work[min(jumps * covered * batch, len(durations))] / num_slots
        updates = (jumps - 1 if whole else 0) + steps_left + 1
        found = max(found, jumps * longest + updates * update_s + left)
    return found


@given(
    ratio=st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    num_engines=st.integers(1, 4),
    slots=st.integers(1, 16),
    prompts=st.integers(1, 8),
    group=st.integers(1, 4),
    sigma=st.floats(0, 2.0),
    update_steps=st.integers(0, 400),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_simulation_bounds_asynchronous_runs_keep_the_bound(
    ratio, num_engines, slots, prompts, group, sigma, update_steps, seed
) -> None:
    update_s, num_steps = STEP_S * update_steps, 8
    config = asynchronous(
        ratio,
        {
            "num_steps": num_steps,
            "placement.generation": num_engines,
            "engine.max_num_seqs": slots,
            "rollout.prompts_per_step": prompts,
            "rollout.group_size": group,
            "answer_tokens": {"type": "lognormal", "median": 40, "sigma": sigma, "max": 2000},
            "training.duration": {"type": "fixed", "value": update_s},
        },
    )
    steps = simulate(config, seed=seed).steps
    took = math.fsum(step.total_s for step in steps)
    bound = latest_end(
        seconds_of_first(config, seed, num_steps * prompts),
        num_steps=num_steps,
        batch=prompts * group,
        num_slots=num_engines * slots,
        ratio=ratio,
        update_s=update_s,
    )
    assert took <= bound * (1 + 1e-9)
    # no ratio helps against the two terms without a tail: what the trainer, and what the engines have to do
    generated_s = STEP_S * sum(step.num_tokens for step in steps) / (num_engines * slots)
    assert took >= max(num_steps * update_s, generated_s) * (1 - 1e-9)
    assert max(step.max_staleness for step in steps) <= math.ceil(ratio)


def steady_step_s(ratio: float, *, answer: int, update_s: float, num_slots: int = 1000, prompts: int = 4) -> float:
    """Mean time of a step, of answers of one length, once the beginning is over."""
    config = asynchronous(
        ratio,
        {
            "num_steps": 76,
            "warmup_steps": 16,
            "placement.generation": 1,
            "engine.max_num_seqs": num_slots,
            "engine.max_batched_tokens": 8192,
            "rollout.prompts_per_step": prompts,
            "rollout.group_size": 1,
            "answer_tokens": {"type": "fixed", "value": answer},
            "training.duration": {"type": "fixed", "value": update_s},
        },
    )
    return simulate(config).step_s


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0, 4.0])
@pytest.mark.parametrize("update_s", [0.0, 1.0, 5.0, 20.0])
def test_simulation_bounds_alpha_divides_the_tail_alone(ratio: float, update_s: float) -> None:
    """Slots for all: N g / K is nothing, and (1) says what a hard bound of freshness allows at best."""
    longest = 10.0
    best = max((longest + update_s) / (ratio + 1), update_s)
    assert steady_step_s(ratio, answer=1000, update_s=update_s) == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(("ratio", "steps_ahead"), [(0.25, 1), (0.5, 1), (1.5, 2), (2.5, 3)])
@pytest.mark.parametrize("update_s", [1.0, 4.0, 12.0])
def test_simulation_bounds_a_broken_alpha_overlaps_all_of_training(
    ratio: float, steps_ahead: int, update_s: float
) -> None:
    step_s = steady_step_s(ratio, answer=1000, update_s=update_s)
    assert step_s == pytest.approx(max(10.0 / steps_ahead, update_s), rel=0.01)


def test_simulation_bounds_more_staleness_does_not_help_engines_without_a_free_slot() -> None:
    """4 answers of 10 s for one slot in each step: 40 s, whatever alpha is."""
    found = [steady_step_s(ratio, answer=1000, update_s=5.0, num_slots=1) for ratio in (1.0, 2.0, 4.0)]
    assert np.allclose(found, 40.0, rtol=0.01)


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_simulation_bounds_p2_as_published_denies_what_freshness_needs(ratio: float) -> None:
    longest, update_s = 10.0, 10.0 / (ratio + 1)
    published = max(0.0 + longest / (ratio + 1), update_s)
    assert steady_step_s(ratio, answer=1000, update_s=update_s) > 1.3 * published
    assert steady_step_s(ratio, answer=1000, update_s=0.0) <= longest / (ratio + 1) * 1.01
