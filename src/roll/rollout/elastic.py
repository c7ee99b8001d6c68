"""Decides which nodes get engines and which engines leave, for nodes that join and leave a cluster during a run.

    observed nodes + engines on them ──► plan_changes ──► removals, additions, messages

`ElasticEngines` observes the nodes and applies the changes. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "AddEngine",
    "Change",
    "ElasticEngine",
    "ElasticNode",
    "IgnoreNode",
    "RemoveEngine",
    "ReportShortage",
    "plan_changes",
]

EngineState: TypeAlias = Literal["starting", "serving", "leaving"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticNode:
    """A live node that is not one of the run's initial nodes."""

    node_id: str
    capacity: int
    """Number of engines that the devices of the node can run."""
    num_free: int
    """Number of further engines for which devices are free now."""
    is_draining: bool = False
    """True if the node was announced to leave the cluster."""
    seconds_left: float | None = None
    """Time until a draining node is shut down, if known."""
    address: str = ""
    """Address of the node, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticEngine:
    """An engine on an elastic node."""

    engine_id: str
    node_id: str
    state: EngineState = "serving"


@dataclass(frozen=True, kw_only=True, slots=True)
class AddEngine:
    """A planned change: start an additional engine on a node."""

    node_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveEngine:
    """A planned change: remove an engine.

    With `drain`, the node will leave, and the engine's requests continue on other engines from their tokens. With
    `lost`, the node has left without notice, and the requests start again.
    """

    engine_id: str
    reason: Literal["drain", "lost"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnoreNode:
    """A note that free devices of a node stay unused, because the run already has the maximum number of engines."""

    node_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportShortage:
    """A note that fewer engines serve than the minimum."""

    num_serving: int


Change: TypeAlias = AddEngine | RemoveEngine | IgnoreNode | ReportShortage


def plan_changes(
    nodes: Sequence[ElasticNode], engines: Sequence[ElasticEngine], *, min_engines: int, max_engines: int
) -> list[Change]:
    """Return the changes that adapt the engines to the nodes, in the order in which to apply them.

    Engines are added to all free devices of nodes that stay, until `max_engines` engines stay in total. Nodes that
    already have engines come first, then the other nodes in the given order. An engine that is leaving still occupies
    its devices.

    Args:
        nodes: The live nodes, oldest first.
        engines: The engines on these nodes and on nodes that have left.
        min_engines: Number of serving engines below which a shortage is reported.
        max_engines: Maximum number of engines.
    """
    known = {node.node_id: node for node in nodes}
    removals: list[Change] = []
    staying: list[ElasticEngine] = []
    for engine in engines:
        node = known.get(engine.node_id)
        if node is None:  # also if it is leaving: its requests must not wait for a node that is gone
            removals.append(RemoveEngine(engine_id=engine.engine_id, reason="lost"))
        elif engine.state == "leaving":
            continue
        elif node.is_draining:
            removals.append(RemoveEngine(engine_id=engine.engine_id, reason="drain"))
        else:
            staying.append(engine)
    additions, ignored = _fill_nodes(nodes, engines, max_engines - len(staying))
    num_serving = sum(engine.state == "serving" for engine in staying)
    shortage = [ReportShortage(num_serving=num_serving)] if num_serving < min_engines else []
    return [*removals, *additions, *ignored, *shortage]


def _fill_nodes(
    nodes: Sequence[ElasticNode], engines: Sequence[ElasticEngine], num_allowed: int
) -> tuple[list[AddEngine], list[IgnoreNode]]:
    """Return up to `num_allowed` engines to add to nodes, and the nodes whose devices stay partly unused."""
    occupied = Counter(engine.node_id for engine in engines)
    additions: list[AddEngine] = []
    ignored: list[IgnoreNode] = []
    # Nodes in use come first: when a node leaves, fewer engines of the others have to move.
    for node in sorted(nodes, key=lambda node: not occupied[node.node_id]):
        num_missing = 0 if node.is_draining else min(node.capacity - occupied[node.node_id], node.num_free)
        num_added = max(0, min(num_missing, num_allowed - len(additions)))
        additions += [AddEngine(node_id=node.node_id)] * num_added
        if num_missing > num_added:
            ignored.append(IgnoreNode(node_id=node.node_id))
    return additions, ignored
