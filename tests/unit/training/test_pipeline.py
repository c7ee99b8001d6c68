"""Layers in stages: the order of work, who has which layers, and models that cannot be cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.errors import ModelError
from roll.models import load_causal_lm
from roll.training.attention import register_attention
from roll.training.packable import check_stages
from roll.training.parallel.pipeline import order
from roll.training.parallel.tokens import WHOLE
from roll.training.policy import PolicyNetwork
from roll.training.stages import cut, layers_by_stage


def _words(num: int, num_later: int) -> str:
    return " ".join(f"{'F' if forward else 'B'}{i}" for forward, i in order(num, num_later, backward=True))


def test_a_stage_is_ahead_by_the_stages_that_follow() -> None:
    assert _words(4, 2) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _words(4, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _words(4, 0) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert _words(1, 3) == "F0 B0"
    assert list(order(3, 2, backward=False)) == [(True, 0), (True, 1), (True, 2)]


@given(num=st.integers(1, 9), stages=st.integers(1, 6))
def test_stages_wait_for_each_other_no_longer_than_they_must(num: int, stages: int) -> None:
    """Forward and backward of one unit of time each: all is done after 2 (micro-batches + stages - 1)."""
    queues = [list(order(num, stages - 1 - s, backward=True)) for s in range(stages)]
    done: dict[tuple[int, bool, int], int] = {}
    free = [0] * stages
    while any(queues):
        moved = False
        for s, queue in enumerate(queues):
            if not queue:
                continue
            forward, i = queue[0]
            before = (s - 1, True, i) if forward else (s + 1, False, i)
            if 0 <= before[0] < stages and before not in done:
                continue
            assert forward or (s, True, i) in done
            free[s] = done[s, forward, i] = max(free[s], done.get(before, 0)) + 1
            queue.pop(0)
            moved = True
        assert moved, "stages wait for each other"
    assert max(free) == 2 * (num + stages - 1)
    assert len(done) == 2 * num * stages


def test_the_vocabulary_is_weighed_in_layers() -> None:
    assert layers_by_stage(30, 2, 8.0) == [19, 11]
    assert layers_by_stage(30, 4, 8.0) == [9, 9, 10, 2]
    assert layers_by_stage(5, 2, 0.0) == [2, 3]
    assert layers_by_stage(4, 4, 100.0) == [1, 1, 1, 1]


@given(more=st.integers(0, 6), stages=st.integers(2, 4), projection=st.floats(0, 9))
def test_no_other_cut_has_a_faster_slowest_stage(more: int, stages: int, projection: float) -> None:
    counts = layers_by_stage(stages + more, stages, projection)

    def slowest(counts: Any) -> float:
        return max(count + projection * (i == stages - 1) for i, count in enumerate(counts))

    every = itertools.product(range(1, more + 2), repeat=stages)
    assert sum(counts) == stages + more
    assert slowest(counts) == min(slowest(own) for own in every if sum(own) == stages + more)


@pytest.fixture(name="model")
def _model(tiny_model: Path) -> Any:
    return load_causal_lm(tiny_model, torch.float32, attention=register_attention())


def test_layers_that_need_more_than_hidden_states_are_refused(model: Any) -> None:
    check_stages(model.model, [1])
    first, last = model.model.layers[0], model.model.layers[-1]
    kept: list[torch.Tensor] = []
    first.register_forward_hook(lambda layer, args, output: kept.append(args[0]))
    last.register_forward_hook(lambda layer, args, output: output + kept[-1])
    with pytest.raises(ModelError, match="a later one needs more of the layers before it than hidden states"):
        check_stages(model.model, [1])


def test_layers_that_answer_more_than_hidden_states_are_refused(model: Any) -> None:
    plain = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: (plain(*args, **kwargs),)
    with pytest.raises(ModelError, match="layers answer more than hidden states"):
        check_stages(model.model, [1])


def test_a_model_of_fewer_layers_than_stages_is_refused(model: Any) -> None:
    stage: Any = SimpleNamespace(count=len(model.model.layers) + 1, number=0)
    with pytest.raises(ModelError, match="needs as many decoder layers, and LlamaModel has"):
        cut(PolicyNetwork(model), stage, WHOLE, torch.float32)
