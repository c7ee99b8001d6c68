"""A request that moves between vLLM engines gets the tokens of one that does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds.migration import build_requests, count_differences

from roll.inference import build_engine
from roll.inference.vllm.continuation import skip_random_numbers

sys.path.append(str(Path(__file__).parent))
from test_vllm_engine import log, make_spec, model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

__all__ = ["log", "model"]  # fixtures


async def test_vllm_migration_200_requests_that_move_three_times_get_the_same_tokens(model: Path, log: Path) -> None:
    engine = build_engine(replace(make_spec(model, log), max_num_seqs=64))
    await engine.start()
    try:
        assert await count_differences([engine], build_requests(200, 24)) == 0
    finally:
        await engine.close()


@pytest.mark.gpu
def test_vllm_migration_a_generator_on_a_gpu_skips_the_numbers_of_earlier_tokens() -> None:
    vocab = 50_000
    drawn, skipped = (torch.Generator("cuda").manual_seed(3) for _ in range(2))
    for _ in range(7):
        torch.empty(vocab, device="cuda").exponential_(generator=drawn)
    skip_random_numbers(skipped, 7, vocab)
    following = [torch.empty(vocab, device="cuda").exponential_(generator=one) for one in (drawn, skipped)]
    torch.testing.assert_close(following[0], following[1], rtol=0, atol=0)
