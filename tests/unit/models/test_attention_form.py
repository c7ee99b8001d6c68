"""How far back layers look, and queries that Llama 4 scales by their place, counted by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from roll.models import AttentionSpan, compute_position_scale


def test_model_attention_windows_and_chunks_by_hand() -> None:
    places = torch.arange(5)
    window, chunk = (
        reach.is_visible(places[:, None], places).int().tolist()
        for reach in (AttentionSpan(window=2), AttentionSpan(chunk=2))
    )
    assert window == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert chunk == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_model_attention_only_limits_that_hide_something_stay() -> None:
    assert AttentionSpan(window=4, chunk=3).limit_to(5) == AttentionSpan(window=4, chunk=3)
    assert AttentionSpan(window=4, chunk=3).limit_to(4) == AttentionSpan(chunk=3)
    assert AttentionSpan(window=4, chunk=3).limit_to(3) == AttentionSpan()


def test_model_attention_queries_are_scaled_by_their_place_in_their_text_and_not_in_the_row() -> None:
    """The model has scaled by 1 + a log(1 + floor((t + 1) / f)), with t counted along the row."""
    layer = SimpleNamespace(attn_temperature_tuning=True, use_rope=False, floor_scale=2, attn_scale=0.5)
    positions = torch.tensor([0, 1, 2, 0, 1, 5])
    found = compute_position_scale(layer, positions, torch.float64)
    assert found is not None and found.dtype == torch.float64
    one, two, three, four = (1 + 0.5 * math.log(1 + n) for n in range(4))
    by_row, by_text = [one, two, two, three, three, four], [one, two, two, one, two, four]
    torch.testing.assert_close(found * torch.tensor(by_row).double(), torch.tensor(by_text).double())
    assert compute_position_scale(SimpleNamespace(attn_temperature_tuning=True), positions, torch.float64) is None
    assert compute_position_scale(SimpleNamespace(use_rope=False), positions, torch.float64) is None
