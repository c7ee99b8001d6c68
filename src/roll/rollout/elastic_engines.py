"""ElasticEngines: engines on nodes that join and leave the cluster while a run works.

    node joins ──► its engines start ──► they get the current weights ──► they serve
    node is announced to leave ──► routing stops ──► requests continue elsewhere from their tokens ──► engines close
    node is gone ──► requests start again elsewhere, with the same random numbers

`plan_changes` decides; `EngineTransitions` adds and removes engines. The other engines serve without interruption.

Invariants:
    - an engine id is never used twice;
    - an engine that still starts when its node leaves is canceled;
    - an engine that fails to start is retried after a backoff, `MAX_START_FAILURES` times per node;
    - no error of a node or of an engine ends the observation of the nodes;
    - a message that stays true is logged once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from roll.errors import one_line_error
from roll.protocols import InferenceEngine
from roll.rollout.elastic import (
    AddEngine,
    Change,
    ElasticEngine,
    ElasticNode,
    EngineState,
    IgnoreNode,
    RemoveEngine,
    plan_changes,
)
from roll.rollout.transitions import EngineTransitions

__all__ = ["ElasticEngines", "ElasticNodes"]

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Interval at which nodes are observed."""
MAX_START_FAILURES = 3
"""Number of engines that may fail to start on a node before the node is ignored."""
START_BACKOFF_S = 10.0
"""Backoff after an engine that failed to start on a node, in seconds; doubled after each failure."""


class ElasticNodes(Protocol):
    """The nodes of a cluster that are not the run's initial nodes; implemented in `roll.cluster`."""

    async def list_nodes(self) -> Sequence[ElasticNode]:
        """Return the live nodes.

        Raises:
            InfraError: The cluster does not answer.
        """
        ...

    def build_engine(self, engine_id: str, node_id: str) -> InferenceEngine:
        """Build an engine on a node without starting it."""
        ...


@dataclass(slots=True)
class _Member:
    """An engine on an elastic node."""

    node_id: str
    state: EngineState
    task: asyncio.Task[None]
    """Adds or removes the engine."""
    is_lost: bool = False


@dataclass(slots=True)
class _NodeFailures:
    """The failed engine starts on a node."""

    count: int = 0
    retry_at: float = 0.0


class ElasticEngines:
    """Adds engines on nodes that join, and removes engines from nodes that leave.

    Args:
        nodes: The nodes.
        transitions: Adds and removes the engines.
        min_engines: Number of engines below which a message is logged.
        max_engines: Maximum number of engines on these nodes.
        min_timeout_s: Time that `wait_for_min` waits at most, in seconds.
        first_number: Number in the id of the first engine.
        on_change: Called with a message whenever an engine joined or left.
    """

    def __init__(
        self,
        nodes: ElasticNodes,
        transitions: EngineTransitions,
        *,
        min_engines: int,
        max_engines: int,
        min_timeout_s: float = 0.0,
        first_number: int = 0,
        on_change: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.num_joined = self.num_drained = self.num_lost = 0
        self._nodes = nodes
        self._transitions = transitions
        self._min_engines, self._max_engines, self._min_timeout_s = min_engines, max_engines, min_timeout_s
        self._next_number = first_number
        self._on_change = on_change
        self._members: dict[str, _Member] = {}
        self._observed: dict[str, ElasticNode] = {}
        """Nodes at the last observation, oldest first."""
        self._failures: dict[str, _NodeFailures] = {}
        self._ignored: set[str] = set()
        self._is_short = self._cannot_list = False
        self._min_reached = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def num_serving(self) -> int:
        """Number of engines on elastic nodes that serve."""
        return sum(member.state == "serving" for member in self._members.values())

    def get_counters(self) -> dict[str, int]:
        """Return the number of engines on elastic nodes, and how many joined and left, by name."""
        return {
            "elastic": self.num_serving,
            "joined": self.num_joined,
            "drained": self.num_drained,
            "lost": self.num_lost,
        }

    def start(self) -> None:
        """Start observing the nodes. The weights must have been pushed once before, since new engines receive them."""
        self._watch = asyncio.create_task(self._observe(), name="elastic-engines")

    async def wait_for_min(self) -> None:
        """Wait until the minimum number of engines serves; after the timeout, the run continues with fewer engines."""
        timeout_s = self._min_timeout_s
        if self.num_serving >= self._min_engines:
            return
        logger.warning(
            "the run waits up to %g s for nodes: %d of %d elastic engines serve (cluster.elastic.min_engines)",
            timeout_s,
            self.num_serving,
            self._min_engines,
        )
        self._is_short = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._min_reached.wait()
        except TimeoutError:
            logger.warning(
                "%d of %d elastic engines serve after %g s: the run continues with the engines that it has, and nodes "
                "that join later are used",
                self.num_serving,
                self._min_engines,
                timeout_s,
            )

    async def close(self) -> None:
        """Stop observing the nodes, and cancel starts and removals in progress."""
        tasks = [member.task for member in self._members.values()]
        tasks += [] if self._watch is None else [self._watch]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- observation

    async def _observe(self) -> None:
        while True:
            try:
                nodes = await self._nodes.list_nodes()
            except Exception as error:  # of any kind: a run must not go on without noticing that nodes come and go
                if not self._cannot_list:
                    logger.warning("cannot list the nodes of the cluster: %s", one_line_error(error))
                self._cannot_list = True
            else:
                self._cannot_list = False
                self.adapt(nodes)
            await asyncio.sleep(POLL_INTERVAL_S)

    def adapt(self, nodes: Sequence[ElasticNode]) -> None:
        """Begin the changes that adapt the engines to the live nodes."""
        live = {node.node_id: node for node in nodes}
        # A dictionary keeps its order, so nodes that were there before stay first.
        self._observed = {
            **{node_id: live[node_id] for node_id in self._observed if node_id in live},
            **live,
        }
        self._failures = {node_id: each for node_id, each in self._failures.items() if node_id in live}
        engines = [
            ElasticEngine(engine_id=engine_id, node_id=member.node_id, state=member.state)
            for engine_id, member in self._members.items()
        ]
        changes = plan_changes(
            [self._restrict(node) for node in self._observed.values()],
            engines,
            min_engines=self._min_engines,
            max_engines=self._max_engines,
        )
        for change in changes:
            self._apply(change)
        self._log_ignored({change.node_id for change in changes if isinstance(change, IgnoreNode)})
        self._check_min()

    def _restrict(self, node: ElasticNode) -> ElasticNode:
        """Return the node, without its free devices if engines must not be started on it after earlier failures."""
        failures = self._failures.get(node.node_id)
        if failures is None:
            return node
        waits = asyncio.get_running_loop().time() < failures.retry_at
        return replace(node, num_free=0) if waits or failures.count >= MAX_START_FAILURES else node

    def _apply(self, change: Change) -> None:
        if isinstance(change, AddEngine):
            engine_id = f"engine-{self._next_number}"
            self._next_number += 1
            task = asyncio.create_task(self._add(engine_id, change.node_id), name=f"add-{engine_id}")
            self._members[engine_id] = _Member(change.node_id, "starting", task)
        elif isinstance(change, RemoveEngine):
            self._remove(change)

    def _log_ignored(self, ignored: set[str]) -> None:
        for node_id in ignored - self._ignored:
            logger.warning(
                "no engine is started on node %s: the run has %d elastic engines, the maximum "
                "(cluster.elastic.max_engines)",
                self._describe(node_id),
                self._max_engines,
            )
        self._ignored = (self._ignored & self._observed.keys()) | ignored

    def _check_min(self) -> None:
        num_serving, is_short = self.num_serving, self.num_serving < self._min_engines
        if is_short and not self._is_short:
            logger.warning(
                "%d of %d elastic engines serve (cluster.elastic.min_engines): the run waits for nodes, and continues "
                "with the engines that it has",
                num_serving,
                self._min_engines,
            )
        self._is_short = is_short
        self._min_reached.clear() if is_short else self._min_reached.set()

    def _describe(self, node_id: str) -> str:
        node = self._observed.get(node_id)
        return f"{node_id[:8]} ({node.address})" if node is not None and node.address else node_id[:8]

    # ---- changes

    async def _add(self, engine_id: str, node_id: str) -> None:
        where = self._describe(node_id)
        try:
            await self._transitions.add(
                engine_id, partial(self._nodes.build_engine, engine_id, node_id), is_preemptible=True
            )
        except Exception as error:  # of any kind: an engine that cannot start must not end a run that has others
            del self._members[engine_id]
            self._count_failure(node_id, engine_id, where, error)
        except asyncio.CancelledError:
            self._members.pop(engine_id, None)
            raise
        else:
            self._members[engine_id].state = "serving"
            self.num_joined += 1
            self._report(f"engine {engine_id} joined on node {where} and serves")
            self._check_min()

    def _count_failure(self, node_id: str, engine_id: str, where: str, error: Exception) -> None:
        failures = self._failures.setdefault(node_id, _NodeFailures())
        failures.count += 1
        wait_s = START_BACKOFF_S * 2 ** (failures.count - 1)
        failures.retry_at = asyncio.get_running_loop().time() + wait_s
        last = failures.count >= MAX_START_FAILURES
        logger.warning(
            "engine %s did not start on node %s: %s; %s",
            engine_id,
            where,
            one_line_error(error),
            "the node is ignored from now on" if last else f"the next attempt is in {wait_s:g} s",
        )

    def _remove(self, change: RemoveEngine) -> None:
        engine_id, member = change.engine_id, self._members[change.engine_id]
        if member.state == "starting":
            logger.warning(
                "the start of engine %s is canceled, because node %s leaves", engine_id, self._describe(member.node_id)
            )
            member.state = "leaving"
            member.task.cancel()  # removes the member
        elif change.reason == "drain":
            self._drain(engine_id, member)
        elif not member.is_lost:
            was_leaving, member.state, member.is_lost = member.state == "leaving", "leaving", True
            self._transitions.mark_lost(engine_id, f"its node {member.node_id[:8]} left the cluster")
            if not was_leaving:
                member.task = asyncio.create_task(self._remove_lost(engine_id, member), name=f"remove-{engine_id}")

    def _drain(self, engine_id: str, member: _Member) -> None:
        node, where = self._observed[member.node_id], self._describe(member.node_id)
        left = "" if node.seconds_left is None else f", which is shut down in {node.seconds_left:.0f} s"
        logger.warning("engine %s leaves node %s%s; its requests continue on other engines", engine_id, where, left)
        member.state = "leaving"
        member.task = asyncio.create_task(self._remove_drained(engine_id, where), name=f"drain-{engine_id}")

    async def _remove_drained(self, engine_id: str, where: str) -> None:
        await self._retire(engine_id)
        self.num_drained += 1
        self._report(f"engine {engine_id} left node {where}")

    async def _remove_lost(self, engine_id: str, member: _Member) -> None:
        await self._retire(engine_id)
        self.num_lost += 1
        self._report(
            f"engine {engine_id} was lost, because its node {member.node_id[:8]} left the cluster without notice; its "
            "requests restart on other engines"
        )

    async def _retire(self, engine_id: str) -> None:
        try:
            await self._transitions.retire(engine_id)
        except Exception as error:  # of any kind: the run has others
            logger.warning("engine %s did not close properly: %s", engine_id, one_line_error(error))
        finally:
            self._members.pop(engine_id, None)

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        self._on_change(text)
