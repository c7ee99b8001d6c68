"""EngineGroup: the engines of a role, and which of them are awake.

    add ──► replace (starts it) ──► awake ◄──wake── asleep ──► retire
                                      └───sleep──────►┘

Weight sync and routing only read the group's members. `EngineTransitions` moves requests to
other engines when an engine joins or leaves; `EngineFleet` replaces engines that fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

from roll.errors import UnsupportedError
from roll.protocols import InferenceEngine

__all__ = ["EngineGroup"]


class EngineGroup(ABC):
    """The controller's interface to the engines of a role; implemented in `roll.cluster`."""

    @property
    @abstractmethod
    def engines(self) -> Sequence[InferenceEngine]:
        """All members, in the order in which they were added."""

    @abstractmethod
    def add(self, engine_id: str, factory: Callable[[], InferenceEngine]) -> None:
        """Add a member; it is not in `engines` until `replace` starts it.

        Args:
            engine_id: Unique id of the member.
            factory: Builds an engine without starting it; called again whenever the engine is replaced.
        """

    @abstractmethod
    async def retire(self, engine_id: str) -> None:
        """Shut a member down and remove it."""

    @abstractmethod
    async def replace(self, engine_id: str) -> InferenceEngine:
        """Close a member's engine, if any, and start a new one with the same id and the initial weights."""

    @abstractmethod
    async def stop(self, engine_id: str) -> None:
        """Close a member's engine, which frees its devices; `replace` starts a new one."""

    @abstractmethod
    async def close(self) -> None:
        """Shut all members down."""

    def list_awake(self) -> list[InferenceEngine]:
        """Return the members that are neither asleep nor excluded, in the order in which they were added."""
        # Compared by identity: the replacement of a sleeping engine has the same id, but is awake.
        return [
            engine
            for engine in self.engines
            if not _contains(self._sleeping_engines, engine) and not _contains(self._excluded_engines, engine)
        ]

    def exclude(self, engine: InferenceEngine) -> None:
        """Exclude a member that is being replaced, so that weight syncs do not wait for it."""
        self._excluded_engines[:] = [
            each for each in self.engines if each is engine or _contains(self._excluded_engines, each)
        ]

    def include(self, engine: InferenceEngine) -> None:
        """Include a member in weight syncs again after `exclude`."""
        self._excluded_engines[:] = [each for each in self._excluded_engines if each is not engine]

    async def sleep(self, engine: InferenceEngine) -> None:
        """Put a member to sleep, which frees its device memory; weight syncs skip it from now on. A sleeping member
        stays asleep.

        Raises:
            UnsupportedError: The engine does not support sleep here; it stays awake.
        """
        if _contains(self._sleeping_engines, engine):
            return
        # Marked before the call, so that no weight sync starts while the engine frees its weights. Engines that were
        # replaced are dropped.
        self._sleeping_engines[:] = [
            each for each in self.engines if each is engine or _contains(self._sleeping_engines, each)
        ]
        try:
            await engine.sleep()
        except UnsupportedError:
            self._on_wake(engine)
            raise

    async def wake(self, engine: InferenceEngine) -> None:
        """Wake a member, which allocates its memory again; it needs a weight sync before it can generate."""
        await engine.wake()
        self._on_wake(engine)

    def _on_wake(self, engine: InferenceEngine) -> None:
        self._sleeping_engines[:] = [other for other in self._sleeping_engines if other is not engine]

    @cached_property
    def _sleeping_engines(self) -> list[InferenceEngine]:
        return []

    @cached_property
    def _excluded_engines(self) -> list[InferenceEngine]:
        return []


def _contains(engines: Sequence[InferenceEngine], engine: InferenceEngine) -> bool:
    return any(each is engine for each in engines)
