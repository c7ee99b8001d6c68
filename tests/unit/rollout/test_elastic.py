"""The decision which nodes get engines and which engines leave, by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.elastic import (
    AddEngine,
    ElasticEngine,
    ElasticNode,
    IgnoreNode,
    RemoveEngine,
    ReportShortage,
    plan_changes,
)


def node(name: str, capacity: int = 1, num_free: int | None = None, *, is_draining: bool = False) -> ElasticNode:
    free = capacity if num_free is None else num_free
    return ElasticNode(node_id=name, capacity=capacity, num_free=free, is_draining=is_draining)


def engine(name: str, at: str, state: str = "serving") -> ElasticEngine:
    return ElasticEngine(engine_id=name, node_id=at, state=state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "engines", "changes"),
    [
        ([node("a", 2)], [], [AddEngine(node_id="a")] * 2),
        ([node("a", 2, 1)], [], [AddEngine(node_id="a")]),
        ([node("a", 2, 1)], [engine("1", "a")], [AddEngine(node_id="a")]),
        ([node("a", 2, 2)], [engine("1", "a"), engine("2", "a", "starting")], []),
        (
            [node("a"), node("b", 3)],
            [],
            [AddEngine(node_id="a"), *[AddEngine(node_id="b")] * 2, IgnoreNode(node_id="b")],
        ),
        (
            [node("b", 3), node("a", 2)],
            [engine("1", "a")],
            [AddEngine(node_id="a"), AddEngine(node_id="b"), IgnoreNode(node_id="b")],
        ),
        ([node("a", is_draining=True)], [], []),
        ([node("a", is_draining=True)], [engine("1", "a")], [RemoveEngine(engine_id="1", reason="drain")]),
        ([node("a", is_draining=True)], [engine("1", "a", "leaving")], []),
        ([node("a")], [engine("1", "a", "leaving")], []),
        (
            [],
            [engine("1", "a"), engine("2", "a", "leaving")],
            [RemoveEngine(engine_id="1", reason="lost"), RemoveEngine(engine_id="2", reason="lost")],
        ),
        (
            [node("a", 3, is_draining=True), node("b", 3)],
            [engine(f"{i}", "a") for i in range(3)],
            [*[RemoveEngine(engine_id=f"{i}", reason="drain") for i in range(3)], *[AddEngine(node_id="b")] * 3],
        ),
    ],
    ids=[
        "a node is filled",
        "other programs use a device",
        "a second engine",
        "an engine that starts counts",
        "the maximum",
        "nodes in use come first",
        "nothing on a node that leaves",
        "a notice",
        "a notice that was followed",
        "an engine that leaves has its device still",
        "a node is gone",
        "engines that leave make room",
    ],
)
def test_elastic_changes(nodes: list[ElasticNode], engines: list[ElasticEngine], changes: list[object]) -> None:
    assert plan_changes(nodes, engines, min_engines=0, max_engines=3) == changes


def test_elastic_a_shortage_counts_engines_that_serve_and_stay() -> None:
    nodes = [node("a", 3, 0), node("b", is_draining=True)]
    engines = [engine("1", "a"), engine("2", "a", "starting"), engine("3", "b"), engine("4", "c")]
    found = plan_changes(nodes, engines, min_engines=2, max_engines=9)
    assert found[-1] == ReportShortage(num_serving=1)
    assert not any(
        isinstance(change, ReportShortage) for change in plan_changes(nodes, engines, min_engines=1, max_engines=9)
    )


NODES = st.lists(
    st.builds(
        ElasticNode,
        node_id=st.sampled_from("abcdef"),
        capacity=st.integers(0, 4),
        num_free=st.integers(0, 4),
        is_draining=st.booleans(),
    ),
    unique_by=lambda each: each.node_id,
)
ENGINES = st.lists(
    st.builds(
        ElasticEngine,
        engine_id=st.uuids().map(str),
        node_id=st.sampled_from("abcdefgh"),
        state=st.sampled_from(["starting", "serving", "leaving"]),
    ),
    unique_by=lambda each: each.engine_id,
    max_size=8,
)


@given(NODES, ENGINES, st.integers(0, 6), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_elastic_every_decision_keeps_the_limits_and_leaves_nothing_to_do(
    nodes: Sequence[ElasticNode], engines: Sequence[ElasticEngine], min_engines: int, max_engines: int
) -> None:
    changes = plan_changes(nodes, engines, min_engines=min_engines, max_engines=max_engines)
    known = {each.node_id: each for each in nodes}
    removed = {change.engine_id: change.reason for change in changes if isinstance(change, RemoveEngine)}
    added = Counter(change.node_id for change in changes if isinstance(change, AddEngine))
    ignored = [change.node_id for change in changes if isinstance(change, IgnoreNode)]
    assert len(removed) == sum(isinstance(change, RemoveEngine) for change in changes)
    assert len(ignored) == len(set(ignored))

    for each in engines:
        home = known.get(each.node_id)
        wanted = "lost" if home is None else "drain" if home.is_draining and each.state != "leaving" else None
        assert removed.get(each.engine_id) == wanted
    staying = [each for each in engines if each.engine_id not in removed and each.state != "leaving"]
    held = Counter(each.node_id for each in engines)
    for name, count in added.items():
        assert not known[name].is_draining
        assert count <= known[name].num_free and held[name] + count <= known[name].capacity
    total = len(staying) + sum(added.values())
    assert total <= max(max_engines, len(staying))
    room = {
        name: min(each.num_free, each.capacity - held[name]) - added[name]
        for name, each in known.items()
        if not each.is_draining
    }
    assert sorted(name for name, left in room.items() if left > 0) == sorted(ignored)
    assert not ignored or total >= max_engines
    num_serving = sum(each.state == "serving" for each in staying)
    shortage = [change for change in changes if isinstance(change, ReportShortage)]
    assert shortage == ([ReportShortage(num_serving=num_serving)] if num_serving < min_engines else [])

    then = [ElasticEngine(engine_id=f"new {i}", node_id=name) for i, name in enumerate(added.elements())]
    left = list(nodes)
    for index, each in enumerate(left):
        left[index] = ElasticNode(
            node_id=each.node_id,
            capacity=each.capacity,
            num_free=each.num_free - added[each.node_id],
            is_draining=each.is_draining,
        )
    again = plan_changes(
        left,
        [*(each for each in engines if each.engine_id not in removed), *then],
        min_engines=0,
        max_engines=max_engines,
    )
    assert not any(isinstance(change, (AddEngine, RemoveEngine)) for change in again)
