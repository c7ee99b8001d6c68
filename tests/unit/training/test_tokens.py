"""Which tokens and heads go where, with one rank in place of a group: what every rank sends is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.training.parallel import tokens
from roll.training.parallel.tokens import TokenShard


def group(size: int, rank: int = 0, **more: Any) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank, **more)


def test_sequence_parallel_tokens_heads_that_are_fewer_than_ranks_go_to_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As attention's queries: the first half of the ranks has the first head of keys."""
    monkeypatch.setattr(tokens, "all_to_all", lambda parts, of: parts)
    states = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])  # three tokens, two heads
    sent = TokenShard(cp=group(4)).all_to_all_heads(states).view(4, 3)
    assert sent.tolist() == [[1, 3, 5], [1, 3, 5], [2, 4, 6], [2, 4, 6]]
    with pytest.raises(ValueError, match=r"\(2\) must be divisible by training\.parallel\.cp \(3\)"):
        TokenShard(cp=group(3)).all_to_all_heads(states)


def test_sequence_parallel_tokens_come_back_where_heads_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "all_to_all", lambda parts, of: parts)
    states = torch.arange(24.0).view(3, 4, 2)
    share = TokenShard(cp=group(2))
    assert torch.equal(share.all_to_all_tokens(share.all_to_all_heads(states)), states)


def test_sequence_parallel_tokens_all_heads_are_in_the_model_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """tp divides heads first, and cp those of a tp rank."""

    def gathered(own: Tensor, of: Any) -> Tensor:
        return torch.cat([own, own + of.step])

    monkeypatch.setattr(tokens, "all_gather", gathered)
    share = TokenShard(tp=group(2, step=2), cp=group(2, step=1))
    assert share.gather_heads(torch.tensor([0])).tolist() == [0, 1, 2, 3]


def test_sequence_parallel_tokens_all_tokens_are_in_the_row_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """cp divides tokens first, and tp those of a slice."""
    monkeypatch.setattr(tokens, "all_gather", lambda own, of: torch.cat([own, own + of.step]))
    share = TokenShard(tp=group(2, step=1), cp=group(2, step=2))
    assert share.gather_tokens(torch.tensor([0])).tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(tokens, "all_reduce_", lambda value, of: value * of.size())
    assert share.all_reduce_(torch.tensor(1)) == 4
