"""How vLLM's tokens are drawn on a CPU: the distribution, the random numbers, and the buffer that is kept."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.inference.vllm.continuation import skip_random_numbers
from roll.inference.vllm.kernels import TokenSampler


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), vocab=st.sampled_from([3, 255, 256, 257, 700]), seed=st.integers(0, 1000))
def test_vllm_sampling_a_token_is_the_first_whose_cumulative_probability_exceeds_the_rows_number(
    rows: int, vocab: int, seed: int
) -> None:
    logits = torch.randn(rows, vocab, generator=seeded(seed)) * 5
    tokens, logprobs = TokenSampler().draw(logits.clone(), {row: seeded(row) for row in range(rows)})
    torch.testing.assert_close(logprobs, logits.double().log_softmax(-1).float(), atol=1e-5, rtol=1e-5)
    numbers = torch.stack([torch.rand(1, dtype=torch.float64, generator=seeded(row)) for row in range(rows)])
    totals = logits.double().softmax(-1).cumsum(-1)
    before = torch.where(tokens > 0, totals.gather(-1, (tokens[:, None] - 1).clamp_min(0))[:, 0], 0.0)
    assert (before <= numbers[:, 0] + 1e-6).all()
    assert (totals.gather(-1, tokens[:, None]) >= numbers - 1e-6).all()


def test_vllm_sampling_rows_without_a_generator_use_the_processes_own_numbers() -> None:
    logits = torch.zeros(2000, 4)
    torch.manual_seed(0)
    tokens, _ = TokenSampler().draw(logits, {})
    assert tokens.bincount(minlength=4).tolist() == pytest.approx([500] * 4, abs=80)  # four standard deviations


def test_vllm_sampling_what_is_ruled_out_is_never_drawn() -> None:
    logits = torch.full((300, 520), -math.inf)
    logits[:, 517] = -3.0
    tokens, logprobs = TokenSampler().draw(logits, {})
    assert tokens.unique().tolist() == [517]
    assert logprobs[:, 517].tolist() == [0.0] * 300
    assert logprobs[0, 0] == -math.inf


def test_vllm_sampling_nothing_is_left_of_earlier_steps() -> None:
    """Of more rows, and of a larger vocabulary in as many blocks."""
    drawing = TokenSampler()
    for rows, vocab in [(4, 400), (2, 300), (3, 300), (1, 400)]:
        tokens, _ = drawing.draw(torch.zeros(rows, vocab), {row: seeded(row) for row in range(rows)})
        numbers = [float(torch.rand((), dtype=torch.float64, generator=seeded(row))) for row in range(rows)]
        assert tokens.tolist() == [int(number * vocab) for number in numbers]


def test_vllm_sampling_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone() -> None:
    logits = torch.zeros(2, 10)
    logits[0, 3] = math.nan
    tokens, logprobs = TokenSampler().draw(logits, {1: seeded(5)})
    assert 0 <= int(tokens[0]) < 10
    assert logprobs[0].isnan().all()
    assert tokens[1] == int(torch.rand((), dtype=torch.float64, generator=seeded(5)) * 10)


def test_vllm_sampling_a_continued_request_skips_the_numbers_of_earlier_tokens() -> None:
    uninterrupted, continued = seeded(3), seeded(3)
    for _ in range(37):
        TokenSampler().draw(torch.zeros(1, 8), {0: uninterrupted})
    skip_random_numbers(continued, 37, 8)
    assert torch.equal(uninterrupted.get_state(), continued.get_state())
