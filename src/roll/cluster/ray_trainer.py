"""A trainer's ranks as Ray actors.

    controller ──► RayTrainerGroup ──► TrainerActor × ranks (one process each) ──► TrainBackend

Every method is collective: all ranks get the same call, in the same order, and rank 0's answer is returned. A batch is
put into the object store once, however many ranks read it.

If one rank fails alone, the others wait for it, up to the timeout of a collective. So after the first failure they have
`LONGEST_BEHIND_S`. If a rank has not answered by then, the ranks are lost, and every later call raises an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from roll.cluster.actor_log import ACTOR_LOG, log_into_the_run
from roll.cluster.ray_answers import answer
from roll.config.training import TRAINERS
from roll.errors import WorkerDiedError
from roll.protocols import TrainBackend, TrainerGroup
from roll.training import TrainerSpec
from roll.training.engine_weights import engine_weights
from roll.types import TrainingBatch, WeightUpdate
from roll.weights import Sender, run_sync

__all__ = ["RayTrainerGroup", "TrainerActor"]

LONGEST_BEHIND_S = 30.0
"""Timeout from one rank's failure to the last answer."""

LONGEST_DEATH_S = 3.0
"""Timeout for detecting the death of a process that made another rank fail. Starting ranks wait for nothing else."""


class TrainerActor:
    """Runs one rank. Calls run one after the other, except `release`, which may run during `send`."""

    def __init__(self) -> None:
        log_into_the_run()
        self._backend: TrainBackend
        self._spec: TrainerSpec
        self._sender = Sender(host=ray.util.get_node_ip_address())

    def meeting_place(self) -> str:
        """Return an address on this machine at which the ranks can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def build(self, spec: TrainerSpec, backend: str) -> None:
        """Resolve the back-end from its name or import path, and load the model."""
        self._spec = spec
        self._backend = TRAINERS.get(backend)(spec)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call any method of the back-end."""
        return getattr(self._backend, name)(*arguments, **options)

    def stage(self, policy_version: int, transport: str) -> WeightUpdate | None:
        """See `Sender`, also for all methods below."""
        return self._sender.stage(engine_weights(self._backend, self._spec), policy_version, transport)

    def send(self) -> dict[str, int]:
        return self._sender.send()

    @ray.method(concurrency_group="release")
    def release(self, failed: bool) -> None:
        self._sender.release(failed=failed)

    def close(self) -> None:
        self._sender.close()


class RayTrainerGroup(TrainerGroup):
    """All ranks of a trainer; implements `SendSteps` for its weight syncs.

    Args:
        actors: The actors, by rank.
        name: The name of the trainer in messages.
        logs: The actors' logs, if they have any.
    """

    def __init__(self, actors: Sequence[Any], name: str = "", logs: Sequence[str] = ()) -> None:
        self._actors = list(actors)
        self._name = name
        self._logs = logs or [""] * len(actors)
        self._lost = ""
        """The reason why the ranks can no longer work together; empty if they can."""

    @classmethod
    async def start(cls, spec: TrainerSpec, seats: Sequence[dict[str, Any]]) -> RayTrainerGroup:
        """Start one rank per placement slot, given as Ray options, all at once."""
        remote: Any = ray.remote
        actor = remote(max_restarts=0, concurrency_groups={"release": 1})(TrainerActor)
        logs = [options["runtime_env"]["env_vars"].get(ACTOR_LOG, "") for options in seats]
        group = cls([actor.options(**options).remote() for options in seats], spec.role, logs)
        try:
            place = await group._answer(0, group._actors[0].meeting_place.remote()) if len(seats) > 1 else None
            specs = [replace(spec, rank=r, world_size=len(seats), init_method=place) for r in range(len(seats))]
            backend = TRAINERS.path(spec.training.backend)
            building = [actor.build.remote(s, backend) for actor, s in zip(group._actors, specs, strict=True)]
            await group._answers(building, LONGEST_DEATH_S)
        except BaseException:
            group._end()  # no rank has anything to free yet, and one that is loading a model would not answer
            raise
        return group

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this trainer."""
        return len(self._actors)

    async def _all(self, calls: Callable[[], Iterable[Any]]) -> list[Any]:
        """Call every rank and return all answers.

        Raises:
            WorkerDiedError: a rank's process ended, or an earlier call left ranks behind.
        """
        if self._lost:
            raise WorkerDiedError(f"the trainer's ranks no longer work together, since one failed: {self._lost}")
        return await self._answers(calls(), LONGEST_BEHIND_S)

    async def _answers(self, calls: Iterable[Any], reconnect_timeout_s: float) -> list[Any]:
        """Await the answers of all ranks. If several fail, a death is raised first, because it explains the others."""
        waiting = [asyncio.ensure_future(self._answer(rank, call)) for rank, call in enumerate(calls)]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for each in waiting if each in done and (error := each.exception())]
            if failures:
                done, behind = await asyncio.wait(waiting, timeout=reconnect_timeout_s)
                failures += [error for each in waiting if each in done and (error := each.exception())]
                worst = next((error for error in failures if isinstance(error, WorkerDiedError)), failures[0])
                if behind:
                    self._lost = str(worst)
                raise worst
            return [each.result() for each in waiting]
        finally:
            for each in waiting:
                each.cancel()

    async def _answer(self, rank: int, call: Any) -> Any:
        def died() -> WorkerDiedError:
            log = f" (see {self._logs[rank]})" if self._logs[rank] else ""
            return WorkerDiedError(f"rank {rank} of trainer {self._name}: its process ended{log}: resume the run.")

        return await answer(call, died)

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        shared = [ray.put(each) if isinstance(each, TrainingBatch) else each for each in arguments]
        return (await self._all(lambda: [actor.call.remote(name, *shared, **options) for actor in self._actors]))[0]

    async def is_save_written(self, *, wait: bool) -> bool:
        return all(await self._all(lambda: [actor.call.remote("is_save_written", wait=wait) for actor in self._actors]))

    async def send_weights(
        self, policy_version: int, transport: str, deliver: Callable[[WeightUpdate], Awaitable[None]]
    ) -> Mapping[str, int]:
        return await run_sync(self, policy_version, transport, deliver)

    async def stage(self, policy_version: int, transport: str) -> WeightUpdate:
        return (await self._all(lambda: [actor.stage.remote(policy_version, transport) for actor in self._actors]))[0]

    async def send(self) -> Mapping[str, int]:
        return (await self._all(lambda: [actor.send.remote() for actor in self._actors]))[0]

    async def release(self, failed: bool) -> None:
        await self._answers([actor.release.remote(failed) for actor in self._actors], LONGEST_DEATH_S)

    async def close(self) -> None:
        """Free shared memory, then end every rank."""
        try:
            with contextlib.suppress(WorkerDiedError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self._answers([actor.close.remote() for actor in self._actors], LONGEST_DEATH_S)
        finally:
            self._end()

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
