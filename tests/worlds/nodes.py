"""Nodes that come and go, with small engines on them, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from roll.rollout.elastic import ElasticNode
from worlds.engines import TickingEngine, TickingEngines


class MovingNodes:
    """Implements `ElasticNodes`.

    Args:
        engines: The group that the engines join.
        like: Makes an engine.
    """

    def __init__(self, engines: TickingEngines, like: Callable[[str], TickingEngine]) -> None:
        self.live: dict[str, ElasticNode] = {}
        self.homes: dict[str, str] = {}
        """Node of every engine that was built, by the engine's id."""
        self.fails: Exception | None = None
        """The error with which the cluster answers, if any."""
        self.violations: list[str] = []
        self.victims: set[str] = set()
        """Requests whose engine vanished under them, without a notice."""
        self.gone_at: dict[str, float] = {}
        """When a node left, by its id."""
        self._like = like
        self._engines = engines
        engines.is_gone = lambda engine_id: engine_id in self.homes and self.homes[engine_id] not in self.live
        self._noticed: dict[str, float] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    async def list_nodes(self) -> Sequence[ElasticNode]:
        if self.fails is not None:
            raise self.fails
        return list(self.live.values())

    def build_engine(self, engine_id: str, node_id: str) -> TickingEngine:
        # A start that had to wait is built late, so the notice may be a little older than the last observation.
        noticed = self._noticed.get(node_id)
        if noticed is not None and asyncio.get_running_loop().time() > noticed + 1.0:
            self.violations.append(f"{engine_id} is started on {node_id}, which was announced to leave")
        if engine_id in self.homes and self.homes[engine_id] != node_id:
            self.violations.append(f"{engine_id} is started on {node_id}, but that name was used before")
        self.homes[engine_id] = node_id
        return self._like(engine_id)

    def join(self, node_id: str, capacity: int = 1) -> None:
        self.live[node_id] = ElasticNode(node_id=node_id, capacity=capacity, num_free=capacity)

    def notice(self, node_id: str, seconds: float) -> None:
        """The node is announced to leave, and leaves after a while, with whatever is on it."""
        node = self.live[node_id]
        if node.is_draining:
            return
        self._noticed[node_id] = asyncio.get_running_loop().time()
        self.live[node_id] = ElasticNode(
            node_id=node_id, capacity=node.capacity, num_free=node.num_free, is_draining=True, seconds_left=seconds
        )
        self._deadlines[node_id] = asyncio.get_running_loop().call_later(seconds, self.kill, node_id)

    def kill(self, node_id: str, *, hangs: bool = False) -> None:
        """The node is gone at once; with `hangs`, nobody hears of its engines' end except by the list of nodes."""
        node = self.live.pop(node_id, None)
        if node is None:
            return
        self.gone_at[node_id] = asyncio.get_running_loop().time()
        for engine in self.at(node_id):
            if not node.is_draining:
                self.victims |= engine.live.keys()
            engine.hang() if hangs else engine.die()

    def at(self, node_id: str) -> list[TickingEngine]:
        """Return the engines on a node that have not ended."""
        return [each for each in self._engines.all if self.homes.get(each.engine_id) == node_id and not each.dead]

    def list_forgotten(self, seconds: float) -> list[str]:
        """Return the engines in the group whose node left at least so many seconds ago."""
        now = asyncio.get_running_loop().time()
        homes = {each.engine_id: self.homes.get(each.engine_id, "") for each in self._engines.engines}
        return [engine_id for engine_id, home in homes.items() if now - self.gone_at.get(home, now) >= seconds]

    def close(self) -> None:
        for timer in self._deadlines.values():
            timer.cancel()
