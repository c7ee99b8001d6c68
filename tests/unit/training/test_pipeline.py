"""Layers in stages: the order of work, who has which layers, and models that cannot be cut."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from roll.config.staging import assign_layers
from roll.errors import InfraError, ModelError
from roll.models import load_causal_lm
from roll.training.attention.packed import register_attention
from roll.training.network.packing_check import check_stages
from roll.training.network.pipeline_split import _split_layers, split_into_stages
from roll.training.network.policy import PolicyNetwork
from roll.training.parallel.pipeline import MAX_PENDING_SENDS, Stage
from roll.training.parallel.pipeline_schedule import Action, build_schedule, compute_bubble_fraction, simulate_schedules
from roll.training.parallel.tokens import WHOLE_ROW


def _words(num: int, stage: int, num_stages: int, num_chunks: int = 1) -> str:
    works = build_schedule(num, stage, num_stages, num_chunks, backward=True)
    return " ".join(
        f"{'FB'[not w.is_forward]}{'abcd'[w.chunk] if num_chunks > 1 else ''}{w.micro_batch}" for w in works
    )


def test_pipeline_parallel_a_stage_is_ahead_by_the_stages_that_follow() -> None:
    assert _words(4, 0, 3) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert _words(4, 1, 3) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert _words(4, 2, 3) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert _words(1, 0, 4) == "F0 B0"
    assert build_schedule(3, 0, 3, 1, backward=False) == [(True, 0, 0), (True, 0, 1), (True, 0, 2)]


def test_pipeline_parallel_a_round_of_micro_batches_goes_through_a_stage_s_parts_one_after_the_other() -> None:
    assert _words(2, 1, 2, 2) == "Fa0 Fa1 Fb0 Bb0 Fb1 Bb1 Ba0 Ba1"
    assert _words(2, 0, 2, 2) == "Fa0 Fa1 Fb0 Fb1 Bb0 Bb1 Ba0 Ba1"
    assert _words(5, 1, 2, 2) == "Fa0 Fa1 Fa2 Fb0 Bb0 Fb1 Bb1 Fb2 Bb2 Fa3 Ba0 Fa4 Ba1 Fb3 Ba2 Fb4 Bb3 Bb4 Ba3 Ba4"
    assert _words(1, 0, 2, 3) == "Fa0 Fb0 Fc0 Bc0 Bb0 Ba0"
    forward = build_schedule(5, 0, 2, 2, backward=False)
    assert [(w.chunk, w.micro_batch) for w in forward] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (0, 4), (1, 3), (1, 4)
    ]  # fmt: skip


def _finished(orders: list[list[Action]], num_parts: int) -> tuple[list[int], int]:
    """When each stage is through, if every work takes one unit of time, and how many works there were."""
    stages, done = len(orders), dict[tuple[int, bool, int], int]()
    queues, free = [list(own) for own in orders], [0] * len(orders)
    while any(queues):
        moved = False
        for s, queue in enumerate(queues):
            if not queue:
                continue
            forward, chunk, i = queue[0]
            part = chunk * stages + s
            before = (part - 1, True, i) if forward else (part + 1, False, i)
            if 0 <= before[0] < num_parts and before not in done:
                continue
            assert forward or (part, True, i) in done
            free[s] = done[part, forward, i] = max(free[s], done.get(before, 0)) + 1
            queue.pop(0)
            moved = True
        assert moved, "stages wait for each other"
    return free, len(done)


@given(num=st.integers(1, 20), stages=st.integers(1, 8), chunks=st.integers(1, 4))
def test_pipeline_parallel_stages_wait_for_each_other_no_longer_than_they_must(
    num: int, stages: int, chunks: int
) -> None:
    """Forward and backward of one unit of time each: all is done after 2 (chunks x micro-batches + stages - 1), also
    where micro-batches are no multiple of the stages; fewer of them than stages go through every part at once."""
    chunks = chunks if stages > 1 else 1
    orders = [build_schedule(num, s, stages, chunks, backward=True) for s in range(stages)]
    free, count = _finished(orders, stages * chunks)
    missing = max(stages - num, 0) * (chunks - 1)
    assert max(free) == 2 * (chunks * num + stages - 1 + missing)
    assert count == 2 * num * stages * chunks
    if not missing:
        assert compute_bubble_fraction(num, stages, chunks) == pytest.approx((stages - 1) / (chunks * num + stages - 1))


def test_pipeline_parallel_stages_that_wait_for_each_other_forever_are_found_out() -> None:
    with pytest.raises(ValueError, match="the schedules deadlock"):
        simulate_schedules([[Action(False, 0, 0), Action(True, 0, 0)], build_schedule(1, 1, 2, 1, backward=True)], 2)


def _messages(num: int, stage: int, stages: int, chunks: int, each: int, *, backward: bool) -> list[Any]:
    """What a stage receives and sends, one after the other: whether it sends, between whom and which way, what it is,
    and where it waits for others of how many works before."""
    found: list[Any] = []
    last = stages * chunks - 1
    for forward, chunk, i in build_schedule(num, stage, stages, chunks, backward=backward):
        part, way = chunk * stages + stage, 1 if forward else -1
        asks, tells = 0 <= part - way <= last, 0 <= part + way <= last
        for model in range(each if forward else 1):
            if asks:
                found.append((False, (way, (stage - way) % stages, stage), (part - way, i, model), None))
            if tells:
                waits = not (forward and backward and chunks > 1)
                found.append(
                    (True, (way, stage, (stage + way) % stages), (part, i, model), waits and MAX_PENDING_SENDS)
                )
    return found


@given(
    num=st.integers(1, 20),
    stages=st.integers(2, 8),
    chunks=st.integers(1, 4),
    each=st.integers(1, 3),
    backward=st.booleans(),
)
def test_pipeline_parallel_no_stage_waits_forever_and_messages_come_as_they_are_asked_for(
    num: int, stages: int, chunks: int, each: int, backward: bool
) -> None:
    """Between two ranks messages have no names: the first that was sent is the first to arrive. A stage that receives
    waits for it; one that sends waits, if ever, as `Stage` does. `each`: models that states pass through at once."""
    queues = [deque(_messages(num, s, stages, chunks, each, backward=backward)) for s in range(stages)]
    under_way: dict[Any, deque[Any]] = defaultdict(deque)
    while any(queues):
        moved = False
        for queue in queues:
            while queue:
                sends, between, what, most = queue[0]
                channel = under_way[between]
                if sends:
                    if most and len({other[:2] for other in channel} - {what[:2]}) >= most:
                        break
                    channel.append(what)
                else:
                    if not channel:
                        break
                    assert channel.popleft() == what
                queue.popleft()
                moved = True
        assert moved, "stages wait for each other"
    assert not any(under_way.values())


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_pipeline_parallel_it_is_no_worse_than_the_order_of_pytorch(stages: int, chunks: int) -> None:
    """Neither in time nor in micro-batches in flight, for those multiples of the stages that PyTorch takes."""
    for num in (stages, 2 * stages, 5 * stages):
        own = [build_schedule(num, s, stages, chunks, backward=True) for s in range(stages)]
        other = [_pytorch_s(num, s, stages, chunks) for s in range(stages)]
        own_times, other_times = (_finished(each, stages * chunks)[0] for each in (own, other))
        for s in range(stages):
            assert own_times[s] <= other_times[s]
            assert _most_in_flight(own[s]) <= _most_in_flight(other[s])


def _pytorch_s(num: int, stage: int, stages: int, chunks: int) -> list[Action]:
    schedule: Any = object.__new__(ScheduleInterleaved1F1B)  # its constructor wants process groups
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = stages, chunks, num
    schedule.microbatches_per_round = num // max(1, num // stages)
    actions = schedule._calculate_single_rank_operations(stage)
    return [
        Action(a.computation_type.name == "FORWARD", a.stage_index // stages, a.microbatch_index)
        for a in actions
        if a is not None
    ]


@dataclass(frozen=True, eq=False)
class _Group:
    """What a stage asks of its groups."""

    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2


def _stage(number: int) -> Any:
    up, down = _Group(number), _Group(number)
    return Stage(up, down, torch.device("cpu"), includes_rank_0=True)  # type: ignore[arg-type]


def test_pipeline_parallel_a_batch_that_broke_off_amid_its_messages_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other stage may have got, or still get, what the next batch's first message would be taken for."""
    monkeypatch.setattr(dist, "isend", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(dist, "recv", lambda *_, **__: None)
    first, last = _stage(0), _stage(1)
    for stage, message in (
        (first, lambda: first.send_states(torch.ones(2))),
        (last, lambda: last.recv_states((2,), torch.half)),
    ):
        for _ in stage.iter_actions(3, backward=False):
            message()
        for _ in stage.iter_actions(3, backward=False):
            break  # before any message: all can go on
        for _ in stage.iter_actions(3, backward=False):
            message()
            break
        with pytest.raises(InfraError, match="resume the run"):
            next(stage.iter_actions(3, backward=False))


def _fake_messages(monkeypatch: pytest.MonkeyPatch) -> tuple[list[weakref.ref[torch.Tensor]], list[int]]:
    """Messages that a stage sends, as long as something holds them, and the numbers of those that it waits for."""
    sent: list[weakref.ref[torch.Tensor]] = []
    waits: list[int] = []

    def isend(tensor: torch.Tensor, **_: Any) -> Any:
        number = len(sent)
        sent.append(weakref.ref(tensor))
        return SimpleNamespace(wait=lambda: waits.append(number))

    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "isend", isend)
    return sent, waits


def test_pipeline_parallel_a_message_is_let_go_when_its_micro_batch_has_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of a stage with several parts are sent without waiting: of 12 micro-batches no more are kept than are in
    flight, with the gradients of so many works as may wait."""
    sent, waits = _fake_messages(monkeypatch)
    groups: list[Any] = [_Group(0) for _ in range(4)]
    stage = Stage(
        *groups[:2], torch.device("cpu"), includes_rank_0=True, wraparound_groups=(groups[2], groups[3]), num_chunks=2
    )
    in_flight = most = 0
    came_back = False
    for work in stage.iter_actions(
        12, backward=True
    ):  # parts 0 and 2 of 4: both send states, the second gradients, too
        if work.is_forward:
            received = None if stage.active_chunk.is_first else stage.recv_states((1,), torch.float32)
            passed = torch.ones(1, requires_grad=True) * 1
            stage.send_states(passed)
            stage.save_for_backward(received, passed)
            del received, passed
        else:
            assert came_back or not waits  # states have waited for nobody
            came_back = True
            stage.backward(None, torch.Tensor.backward)
        in_flight += 1 if work.is_forward else -1
        most = max(most, in_flight)
        assert sum(ref() is not None for ref in sent) <= in_flight + MAX_PENDING_SENDS + 1
    assert (in_flight, most, len(sent)) == (0, 5, 3 * 12)
    assert not any(ref() is not None for ref in sent)


def test_pipeline_parallel_without_gradients_a_message_waits_for_those_of_two_works_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, waits = _fake_messages(monkeypatch)
    stage, states = _stage(0), [torch.ones(1) for _ in range(5)]
    for work in stage.iter_actions(5, backward=False):
        stage.send_states(states[work.micro_batch])
        assert waits == list(range(work.micro_batch - MAX_PENDING_SENDS + 1))
    assert waits == list(range(5))


def test_pipeline_parallel_what_a_forward_pass_left_in_flight_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss that is only measured has a gradient nobody asks for."""
    _fake_messages(monkeypatch)
    stage, old, new = _stage(1), torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    for _ in stage.iter_actions(1, backward=False):
        stage.save_for_backward(old, None)
    for work in stage.iter_actions(1, backward=True):
        if work.is_forward:
            stage.save_for_backward(new, None)
        else:
            stage.backward((2 * new).sum(), torch.Tensor.backward)
    with pytest.raises(IndexError):
        stage.backward(new.sum(), torch.Tensor.backward)
    assert old.grad is None and new.grad is not None


def _most_in_flight(works: list[Action]) -> int:
    return max(itertools.accumulate(1 if work.is_forward else -1 for work in works))


def test_pipeline_parallel_the_vocabulary_is_weighed_in_layers() -> None:
    assert assign_layers(30, 2, 1, 8.0) == [19, 11]
    assert assign_layers(30, 4, 1, 8.0) == [9, 9, 10, 2]
    assert assign_layers(5, 2, 1, 0.0) == [2, 3]
    assert assign_layers(4, 4, 1, 100.0) == [1, 1, 1, 1]


def test_pipeline_parallel_a_stage_has_as_much_as_others_and_so_has_each_of_its_parts() -> None:
    assert assign_layers(30, 2, 2, 8.0) == [9, 9, 10, 2]
    assert assign_layers(30, 2, 3, 8.0) == [6, 5, 6, 5, 7, 1]
    assert assign_layers(8, 2, 4, 3.0) == [1] * 8
    assert assign_layers(7, 3, 2, 0.0) == [1, 1, 1, 1, 1, 2]


def test_pipeline_parallel_of_a_mixture_the_experts_that_a_token_goes_through_are_weighed_against_the_vocabulary() -> (
    None
):
    """Layers of 900 weights, of which a token meets 200, and a projection of 400: as much as two layers."""
    layers = nn.ModuleList(nn.Linear(10, 10, bias=False) for _ in range(8))
    for layer in layers:
        layer.register_parameter("experts", nn.Parameter(torch.empty(8, 10, 10)))
    config = SimpleNamespace(num_experts_per_tok=1)
    decoder = SimpleNamespace(layers=layers, config=SimpleNamespace(get_text_config=lambda: config))
    stage: Any = SimpleNamespace(count=2, num_chunks=1)
    assert _split_layers(decoder, nn.Linear(10, 40, bias=False), stage) == [range(5), range(5, 8)]
    assert _split_layers(decoder, None, stage) == [range(4), range(4, 8)]


@given(more=st.integers(0, 6), stages=st.integers(2, 4), projection=st.floats(0, 9))
def test_pipeline_parallel_no_other_cut_has_a_faster_slowest_stage(more: int, stages: int, projection: float) -> None:
    counts = assign_layers(stages + more, stages, 1, projection)

    def slowest(counts: Any) -> float:
        return max(count + projection * (i == stages - 1) for i, count in enumerate(counts))

    every = itertools.product(range(1, more + 2), repeat=stages)
    assert sum(counts) == stages + more
    assert slowest(counts) == min(slowest(own) for own in every if sum(own) == stages + more)


@pytest.fixture(name="model")
def _model(tiny_model: Path) -> Any:
    return load_causal_lm(tiny_model, torch.float32, attention=register_attention())


def test_pipeline_parallel_layers_that_need_more_than_hidden_states_are_refused(model: Any) -> None:
    check_stages(model.model, [1])
    first, last = model.model.layers[0], model.model.layers[-1]
    kept: list[torch.Tensor] = []
    first.register_forward_hook(lambda layer, args, output: kept.append(args[0]))
    last.register_forward_hook(lambda layer, args, output: output + kept[-1])
    with pytest.raises(ModelError, match="a later layer requires more than hidden states from earlier layers"):
        check_stages(model.model, [1])


def test_pipeline_parallel_layers_that_answer_more_than_hidden_states_are_refused(model: Any) -> None:
    plain = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: (plain(*args, **kwargs),)
    with pytest.raises(ModelError, match="layers return more than hidden states"):
        check_stages(model.model, [1])


@pytest.mark.parametrize(
    ("stages", "chunks", "says"),
    [
        (3, 1, "pp 3 requires at least as many decoder layers, but"),
        (2, 2, "pp 2 x vpp 2 requires at least 4 decoder layers, but"),
    ],
)
def test_pipeline_parallel_a_model_of_fewer_layers_than_parts_is_refused(
    model: Any, stages: int, chunks: int, says: str
) -> None:
    assert len(model.model.layers) == 2
    stage: Any = SimpleNamespace(count=stages, num_chunks=chunks, number=0)
    with pytest.raises(ModelError, match=f"training.parallel.{says} LlamaModel has 2: lower pp or vpp"):
        split_into_stages(PolicyNetwork(model), stage, WHOLE_ROW, torch.float32)
