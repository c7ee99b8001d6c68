"""Sampling, against numbers computed by hand or in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.inference.hf_requests import draw_uniforms
from roll.inference.hf_sampling import Sampler
from roll.inference.inversion import BLOCK_SIZE
from roll.types import SamplingParams


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **changes)


def draw(logits: list[list[float]], uniforms: list[float], *settings: SamplingParams) -> tuple[list[int], list[float]]:
    result = Sampler().sample(torch.tensor(logits), settings, np.array(uniforms))
    return result.tokens.tolist(), result.logprobs.tolist()


QUARTERS = [math.log(0.5), math.log(0.25), math.log(0.125), math.log(0.125)]
"""Probabilities 1/2, 1/4, 1/8, 1/8; cumulative 0.5, 0.75, 0.875, 1."""


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.87, 2), (0.88, 3), (0.999999, 3)],
)
def test_hf_sampling_a_uniform_number_picks_the_token_whose_share_it_falls_into(uniform: float, token: int) -> None:
    tokens, logprobs = draw([QUARTERS], [uniform], params())
    assert tokens == [token]
    assert logprobs == pytest.approx([QUARTERS[token]], abs=1e-6)


def test_hf_sampling_each_row_has_its_own_number_and_settings() -> None:
    tokens, _ = draw([QUARTERS] * 3, [0.9, 0.6, 0.9], params(), params(), params(temperature=0.0))
    assert tokens == [3, 1, 0]


def test_hf_sampling_temperature_divides_the_logits() -> None:
    # Temperature 1/2 squares probabilities: 16/22, 4/22, 1/22, 1/22.
    tokens, logprobs = draw([QUARTERS] * 2, [16.5 / 22, 15.5 / 22], params(temperature=0.5), params(temperature=0.5))
    assert tokens == [1, 0]
    assert logprobs == pytest.approx([math.log(4 / 22), math.log(16 / 22)], abs=1e-6)


def test_hf_sampling_greedy_takes_the_highest_and_reports_log_probs_of_temperature_one() -> None:
    tokens, logprobs = draw([[0.0, 3.0, 1.0]], [0.99], params(temperature=0.0, top_k=1))
    assert tokens == [1]
    assert logprobs == pytest.approx([3 - math.log(1 + math.e**3 + math.e)], abs=1e-6)


def test_hf_sampling_a_choice_among_few_tokens_weighs_each_of_them_alone() -> None:
    # Of 1/2, 1/4, 1/8, 1/8 the last three share 1/2 among themselves: 1/2, 1/4, 1/4.
    choose = params(choices=(3, 1, 2))
    result = Sampler().sample(
        torch.tensor([QUARTERS] * 3),
        [choose, params(), params(temperature=0.0, choices=(2, 1))],
        np.array([0.9, 0.1, 0]),
    )
    assert result.tokens.tolist() == [3, 0, 1]
    assert np.exp(result.logprobs) == pytest.approx([1 / 4, 1 / 2, 2 / 3], abs=1e-6)
    assert sorted(result.choices) == [0, 2]
    assert np.exp(result.choices[0]) == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=1e-6)
    assert np.exp(result.choices[2]) == pytest.approx([1 / 3, 2 / 3], abs=1e-6)


def test_hf_sampling_top_k_keeps_the_highest_and_renormalises() -> None:
    # Of 1/2, 1/4, 1/8, 1/8 the best two stay: 2/3, 1/3.
    tokens, logprobs = draw([QUARTERS] * 2, [0.66, 0.67], params(top_k=2), params(top_k=2))
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(2 / 3), math.log(1 / 3)], abs=1e-6)


def test_hf_sampling_top_k_keeps_all_that_tie_with_the_last() -> None:
    # The third and the fourth tie, so top_k = 3 keeps all four.
    tokens, logprobs = draw([QUARTERS], [0.99], params(top_k=3))
    assert tokens == [3] and logprobs == pytest.approx([math.log(1 / 8)], abs=1e-6)


def test_hf_sampling_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # 0.5 < 0.6 ≤ 0.75: the best two stay, 2/3 and 1/3.
    tokens, logprobs = draw([QUARTERS] * 2, [0.66, 0.99], params(top_p=0.6), params(top_p=0.6))
    assert tokens == [0, 1]
    assert logprobs == pytest.approx([math.log(2 / 3), math.log(1 / 3)], abs=1e-6)


def test_hf_sampling_top_p_keeps_the_likeliest_token_however_small_it_is() -> None:
    tokens, logprobs = draw([QUARTERS], [0.99], params(top_p=1e-9))
    assert tokens == [0] and logprobs == [0.0]


def test_hf_sampling_top_p_counts_within_what_top_k_left() -> None:
    # top_k = 2 leaves 2/3 and 1/3; 0.6 is reached by the first alone. Over all tokens it would take two.
    tokens, logprobs = draw([QUARTERS], [0.99], params(top_k=2, top_p=0.6))
    assert tokens == [0] and logprobs == [0.0]


def test_hf_sampling_one_rows_filter_leaves_the_others_alone() -> None:
    tokens, logprobs = draw([QUARTERS] * 2, [0.99, 0.99], params(top_k=1), params())
    assert tokens == [0, 3]
    assert logprobs == pytest.approx([0.0, math.log(1 / 8)], abs=1e-6)


def test_hf_sampling_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="not finite"):
        draw([[0.0, float("nan")]], [0.5], params())


def test_hf_sampling_padding_rows_may_hold_anything() -> None:
    logits = torch.tensor([QUARTERS, [float("nan")] * 4])
    assert Sampler().sample(logits, [params()], np.array([0.6])).tokens.tolist() == [1]


def test_hf_sampling_a_sampler_forgets_the_step_before() -> None:
    sampler = Sampler()
    sampler.sample(torch.zeros(4, BLOCK_SIZE + 9), [params(top_k=1)] * 4, np.full(4, 0.5))
    assert sampler.sample(torch.tensor([QUARTERS]), [params()], np.array([0.99])).tokens.tolist() == [3]
    flat = sampler.sample(torch.zeros(2, 4), [params()] * 2, np.array([0.99, 0.1]))
    assert flat.tokens.tolist() == [3, 0] and flat.logprobs.tolist() == pytest.approx([-math.log(4)] * 2, abs=1e-6)


@given(
    vocab=st.integers(2, 3 * BLOCK_SIZE),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    top_k=st.sampled_from([0, 1, 5, 10_000]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 1e-300])),
)
@settings(max_examples=200, deadline=None)
def test_hf_sampling_token_and_log_prob_agree_with_a_float64_reference(
    vocab: int, seed: int, spread: float, top_k: int, top_p: float, uniform: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    result = Sampler().sample(torch.from_numpy(logits)[None], [params(top_k=top_k, top_p=top_p)], np.array([uniform]))
    token, logprob = int(result.tokens[0]), float(result.logprobs[0])

    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    if top_k:
        probabilities[logits < np.sort(logits)[::-1][min(top_k, vocab) - 1]] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        if np.abs(before - top_p).min() < 1e-6:
            return  # the cut is within rounding of a boundary
        cut = order[before >= top_p]
        probabilities[cut[cut != order[0]]] = 0
        probabilities /= probabilities.sum()
    cumulative = np.cumsum(probabilities)
    assert probabilities[token] > 0
    assert cumulative[token] - probabilities[token] - 1e-5 <= uniform <= cumulative[token] + 1e-5
    assert logprob == pytest.approx(math.log(probabilities[token]), abs=2e-5)


def test_hf_sampling_frequencies_follow_the_probabilities() -> None:
    rows = 64
    counts = np.zeros(4)
    sampler = Sampler()
    numbers = np.stack([draw_uniforms(seed, 200) for seed in range(rows)])
    for step in range(200):
        result = sampler.sample(torch.tensor([QUARTERS] * rows), [params()] * rows, numbers[:, step])
        counts += np.bincount(result.tokens, minlength=4)
    expected = np.array([0.5, 0.25, 0.125, 0.125]) * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-squared, 3 degrees of freedom, p = 0.001
