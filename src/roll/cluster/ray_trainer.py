"""A trainer's ranks as Ray actors.

    controller ──► RayTrainerGroup ──► TrainerActor × ranks (one process each) ──► TrainBackend

Every method is collective: all ranks get the same call, in the same order, and the result of rank 0 is returned.

Batches are put into the object store. Every rank reads the tokens of all samples, and the other arrays only of the
samples that it computes (`roll.training.packing.division`). Each part is stored once, even if several ranks read it.

If only one rank fails, the others wait for it in a collective, up to its long timeout. Therefore, after the first
failure, the controller waits `FAILURE_TIMEOUT_S` for the other ranks. If a rank has not answered by then, every later
call to the trainer raises an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from roll.cluster.actor_log import ACTOR_LOG, redirect_to_run_log
from roll.cluster.ray_answers import await_result
from roll.config.training import TRAINERS
from roll.errors import WorkerDiedError
from roll.protocols import TrainBackend, TrainerGroup
from roll.training import TrainerSpec
from roll.training.engine_weights import build_engine_weights
from roll.training.packing.division import (
    BatchOutline,
    Columns,
    DividedBatch,
    RankShare,
    divide_batch,
    restore_batch,
)
from roll.types import TrainingBatch, WeightStore, WeightUpdate
from roll.weights import Sender, run_sync

__all__ = ["RayTrainerGroup", "TrainerActor"]

_BATCH_METHODS = ("train_step", "forward_backward", "measure", "forward")
"""Methods whose first arguments are a batch and the loss or the outputs to compute."""

FAILURE_TIMEOUT_S = 30.0
"""Time that the other ranks have to answer after one rank has failed."""

DEATH_TIMEOUT_S = 3.0
"""Timeout for detecting a dead process after another rank has failed; used where ranks do not wait for each other."""


class TrainerActor:
    """Runs one rank. Calls run one at a time; only `release` may run during `send`."""

    def __init__(self) -> None:
        redirect_to_run_log()
        self._backend: TrainBackend
        self._spec: TrainerSpec
        self._sender = Sender(host=ray.util.get_node_ip_address())

    def find_rendezvous(self) -> str:
        """Return a free address on this machine as the `init_method` for torch.distributed."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def build(self, spec: TrainerSpec, backend: str) -> RankShare | None:
        """Resolve the back-end from its name or import path, and load the model.

        Returns:
            The rank's share of every batch; `None` if the back-end needs whole batches.
        """
        self._spec = spec
        self._backend = TRAINERS.get(backend)(spec)
        return getattr(self._backend, "batch_share", None)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the back-end by name."""
        return getattr(self._backend, name)(*arguments, **options)

    def call_with_share(
        self, name: str, outline: BatchOutline, columns: Columns, *arguments: Any, **options: Any
    ) -> Any:
        """Call a method of the back-end with this rank's share of a batch."""
        return self.call(name, restore_batch(outline, columns), *arguments, **options)

    def stage(self, policy_version: int, transport: str, store: WeightStore | None = None) -> WeightUpdate | None:
        """See `Sender.stage`."""
        return self._sender.stage(build_engine_weights(self._backend, self._spec), policy_version, transport, store)

    def send(self) -> dict[str, int]:
        return self._sender.send()

    @ray.method(concurrency_group="release")
    def release(self, failed: bool) -> None:
        self._sender.release(failed=failed)

    def close(self) -> None:
        self._sender.close()


class RayTrainerGroup(TrainerGroup):
    """All ranks of a trainer as Ray actors; also implements `SendSteps` for weight syncs.

    Args:
        actors: The actors, by rank.
        name: The name of the trainer in messages.
        logs: The actors' logs, if they have any.
    """

    def __init__(self, actors: Sequence[Any], name: str = "", logs: Sequence[str] = ()) -> None:
        self._actors = list(actors)
        self._name = name
        self._logs = logs or [""] * len(actors)
        self._shares: Sequence[RankShare] = ()
        """The share of each rank of every batch; empty if all ranks get whole batches."""
        self._lost = ""
        """The reason why the ranks can no longer work together; empty if they can."""

    @classmethod
    async def start(cls, spec: TrainerSpec, slots: Sequence[dict[str, Any]]) -> RayTrainerGroup:
        """Start one rank per placement slot, all at once; `slots` are the Ray options of the ranks."""
        remote: Any = ray.remote
        actor = remote(max_restarts=0, concurrency_groups={"release": 1})(TrainerActor)
        logs = [options["runtime_env"]["env_vars"].get(ACTOR_LOG, "") for options in slots]
        group = cls([actor.options(**options).remote() for options in slots], spec.role, logs)
        try:
            address = await group._await_rank(0, group._actors[0].find_rendezvous.remote()) if len(slots) > 1 else None
            specs = [replace(spec, rank=r, world_size=len(slots), init_method=address) for r in range(len(slots))]
            backend = TRAINERS.path(spec.training.backend)
            building = [actor.build.remote(s, backend) for actor, s in zip(group._actors, specs, strict=True)]
            shares = await group._gather_results(building, DEATH_TIMEOUT_S)
        except BaseException:
            group._kill_actors()  # not closed: a rank that loads a model would not answer
            raise
        if len({(s.data_rank, s.computes_loss) for s in shares if s is not None}) > 1 and None not in shares:
            group._shares = shares
        return group

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this trainer."""
        return len(self._actors)

    async def _call_all_ranks(self, calls: Callable[[], Iterable[Any]]) -> list[Any]:
        """Call every rank and return the results, by rank.

        Raises:
            WorkerDiedError: a rank's process ended, or a rank did not answer after an earlier failure.
        """
        if self._lost:
            raise WorkerDiedError(f"the trainer cannot continue, because one of its ranks failed: {self._lost}")
        return await self._gather_results(calls(), FAILURE_TIMEOUT_S)

    async def _gather_results(self, calls: Iterable[Any], reconnect_timeout_s: float) -> list[Any]:
        """Await the results of all ranks; if several ranks fail, raise the error of a rank whose process died.

        If the process of one rank dies, the other ranks fail as well.
        """
        waiting = [asyncio.ensure_future(self._await_rank(rank, call)) for rank, call in enumerate(calls)]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for each in waiting if each in done and (error := each.exception())]
            if failures:
                # Ranks that wait for the failed one in a collective would block until its timeout, so they are not
                # awaited longer. A dead process is detected late, but explains the errors of the other ranks.
                done, unanswered = await asyncio.wait(waiting, timeout=reconnect_timeout_s)
                failures += [error for each in waiting if each in done and (error := each.exception())]
                worst = next((error for error in failures if isinstance(error, WorkerDiedError)), failures[0])
                if unanswered:
                    self._lost = str(worst)
                raise worst
            return [each.result() for each in waiting]
        finally:
            for each in waiting:
                each.cancel()

    async def _await_rank(self, rank: int, call: Any) -> Any:
        def build_death_error() -> WorkerDiedError:
            log = f" (see {self._logs[rank]})" if self._logs[rank] else ""
            return WorkerDiedError(f"rank {rank} of trainer {self._name}: its process ended{log}: resume the run.")

        return await await_result(call, build_death_error)

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._shares and name in _BATCH_METHODS:
            batch, work, *others = arguments
            # Packing takes a while for long samples, so it runs in a thread.
            divided = await asyncio.to_thread(divide_batch, batch, work, self._shares)
            if divided is not None:
                return await self._call_with_shares(name, divided, work, *others, **options)
        # Put once: otherwise Ray would copy the batch into the object store for each rank's call.
        shared = [ray.put(each) if isinstance(each, TrainingBatch) else each for each in arguments]
        return (
            await self._call_all_ranks(lambda: [actor.call.remote(name, *shared, **options) for actor in self._actors])
        )[0]

    async def _call_with_shares(self, name: str, divided: DividedBatch, *arguments: Any, **options: Any) -> Any:
        """Call a method of every rank with the rank's share of a batch, and return the result of rank 0."""
        outline = ray.put(divided.outline)
        stored = {id(columns): ray.put(columns) for columns in divided.columns.values()}
        columns = [stored[id(divided.get_columns(share))] for share in self._shares]

        def call() -> Iterable[Any]:
            for actor, own in zip(self._actors, columns, strict=True):
                yield actor.call_with_share.remote(name, outline, own, *arguments, **options)

        return (await self._call_all_ranks(call))[0]

    async def is_save_written(self, *, wait: bool) -> bool:
        return all(
            await self._call_all_ranks(
                lambda: [actor.call.remote("is_save_written", wait=wait) for actor in self._actors]
            )
        )

    async def send_weights(
        self,
        policy_version: int,
        transport: str,
        deliver: Callable[[WeightUpdate], Awaitable[None]],
        store: WeightStore | None = None,
    ) -> Mapping[str, int]:
        return await run_sync(self, policy_version, transport, deliver, store)

    async def stage(self, policy_version: int, transport: str, store: WeightStore | None) -> WeightUpdate:
        return (
            await self._call_all_ranks(
                lambda: [actor.stage.remote(policy_version, transport, store) for actor in self._actors]
            )
        )[0]

    async def send(self) -> Mapping[str, int]:
        return (await self._call_all_ranks(lambda: [actor.send.remote() for actor in self._actors]))[0]

    async def release(self, failed: bool) -> None:
        await self._gather_results([actor.release.remote(failed) for actor in self._actors], DEATH_TIMEOUT_S)

    async def close(self) -> None:
        """Free the shared memory, then end the processes of all ranks."""
        try:
            with contextlib.suppress(WorkerDiedError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self._gather_results([actor.close.remote() for actor in self._actors], DEATH_TIMEOUT_S)
        finally:
            self._kill_actors()

    def _kill_actors(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
