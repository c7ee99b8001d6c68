"""Ranks on a host send each other parts, and hold one gathered bucket at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gathering_ranks import RANKS, part_of, run_rank, share_of
from transformers import LlamaConfig, LlamaForCausalLM
from worlds.ranks import run_ranks
from worlds.tiny_model import write_tiny_model

pytestmark = pytest.mark.integration

WORDS, HIDDEN, INNER, LAYERS = 3072, 48, 96, 3
ENDS = WORDS * HIDDEN * 4
"""Bytes of the embeddings, and of the projection."""
LAYER = (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * INNER + 2 * HIDDEN) * 4


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    model = write_tiny_model(directory / "model")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, tie_word_embeddings=False, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(model)
    run_ranks(run_rank, (directory, model), RANKS)
    return [torch.load(directory / f"found-{rank}.pt", weights_only=False) for rank in range(RANKS)]


def test_weight_gather_every_rank_has_the_parts_of_all(found: list[dict[str, Any]]) -> None:
    expected = torch.cat([part_of(rank) for rank in range(RANKS)])
    for own in found:
        assert torch.equal(own["gathered"], expected)
        assert torch.equal(own["in place"], expected)


def test_weight_gather_every_rank_has_its_part_of_the_sum(found: list[dict[str, Any]]) -> None:
    expected = torch.stack([share_of(rank) for rank in range(RANKS)]).sum(0)
    assert torch.equal(torch.cat([own["total"] for own in found]), expected)


def test_weight_gather_the_first_rank_has_rows_that_do_not_divide_evenly(found: list[dict[str, Any]]) -> None:
    assert torch.equal(found[0]["by first"], torch.arange(8.0).view(4, 2))
    assert not any(own["by first"].numel() for own in found[1:])


def test_weight_gather_a_step_holds_one_bucket_beside_its_share(found: list[dict[str, Any]]) -> None:
    """At the end, the gradient of the embeddings and the buffer in which it is added up; that of the projection, a
    layer's, and all gathered weights are gone by then."""
    activations = 2 * LAYER
    for own in found:
        held = own["held"]
        assert held["peak"] - held["after"] <= 2 * ENDS + activations


def test_weight_gather_a_weight_is_whole_on_the_first_rank_alone(found: list[dict[str, Any]]) -> None:
    assert ENDS <= found[0]["held"]["sync"] <= ENDS + LAYER
    assert all(own["held"]["sync"] < LAYER for own in found[1:])
