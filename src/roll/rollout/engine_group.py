"""EngineGroup: which engines a role has, and which of them are awake.

    add ──► replace: it is started ──► awake ◄──wake── asleep ──► retire
                                         └───sleep──────►┘

Weight sync and routing ask the group, so that what changes here is all that changes. When an engine comes or goes,
`EngineTransitions` sees to it that nobody is lost on the way; what becomes of one that fails, `EngineFleet` decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

from roll.errors import UnsupportedError
from roll.protocols import InferenceEngine

__all__ = ["EngineGroup"]


class EngineGroup(ABC):
    """The engines of a role, seen from the controller; `cluster/` has the one."""

    @property
    @abstractmethod
    def engines(self) -> Sequence[InferenceEngine]:
        """All members, in the order in which they were added."""

    @abstractmethod
    def add(self, engine_id: str, make: Callable[[], InferenceEngine]) -> None:
        """Take a member in; `replace` starts it, and it is none of `engines` before.

        Args:
            engine_id: no other member has it.
            make: makes an engine that is not started yet; called again whenever it is replaced.
        """

    @abstractmethod
    async def retire(self, engine_id: str) -> None:
        """End a member, and forget it."""

    @abstractmethod
    async def replace(self, engine_id: str) -> InferenceEngine:
        """End what is left of a member and start a fresh engine in its place, with the same id and initial weights."""

    @abstractmethod
    async def close(self) -> None:
        """End all."""

    def awake(self) -> list[InferenceEngine]:
        """Return the members that have the memory of their devices, in their order."""
        return [engine for engine in self.engines if all(engine is not other for other in self._asleep)]

    async def sleep(self, engine: InferenceEngine) -> None:
        """Let a member give its memory back; weight syncs leave it out from now on.

        Raises:
            UnsupportedError: the engine cannot do it here; it stays awake.
        """
        awake = self.awake()  # of those that were replaced nothing is remembered
        self._asleep[:] = [each for each in self.engines if each is engine or all(each is not other for other in awake)]
        try:
            await engine.sleep()
        except UnsupportedError:
            self._woke(engine)
            raise

    async def wake(self, engine: InferenceEngine) -> None:
        """Let a member take its memory again; it needs a weight sync before it answers."""
        await engine.wake()
        self._woke(engine)

    def _woke(self, engine: InferenceEngine) -> None:
        self._asleep[:] = [other for other in self._asleep if other is not engine]

    @cached_property
    def _asleep(self) -> list[InferenceEngine]:
        return []
