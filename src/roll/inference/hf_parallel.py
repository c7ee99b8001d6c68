"""Tensor parallelism of the `hf` engine: several processes that compute every step together.

    HFEngine ─► ShardedDecoder: rank 0, in this process
                     └─ every call, over a pipe ─► Decoder of rank 1, 2, … (a child process each)
                          sums of all attention and MLP outputs ─┘

All ranks have the same rows and make the same calls in the same order, so only tensors are exchanged within a call. If
a rank fails, the others get an error in the next collective, and the engine ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll.errors import ConfigError, EngineDiedError
from roll.inference.hf_decoder import Decoder
from roll.inference.hf_requests import BatchRow
from roll.inference.hf_shard import ModelShard
from roll.inference.spec import EngineSpec
from roll.types import FloatArray, IntArray, SequenceMedia, WeightUpdate
from roll.weights.rendezvous import BroadcastMember, build_group, choose_backend

__all__ = ["ShardedDecoder"]

GROUP_TIMEOUT_S = 600.0
"""Timeout of a collective; a rank may load the model while the others wait for it."""
CLOSE_TIMEOUT_S = 5.0


class ShardedDecoder(Decoder):
    """The decoder of rank 0, which repeats every call on the other ranks.

    Args:
        spec: The spec of the engine.
        device: The device of rank 0; on GPUs, the other ranks use the devices after it.

    Raises:
        ConfigError: The spec requires a feature that a sharded model does not support.
        ModelError: The model cannot be loaded or sharded.
    """

    def __init__(self, spec: EngineSpec, device: torch.device) -> None:
        _check_spec(spec)
        self._directory = tempfile.mkdtemp(prefix="roll-hf-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        store = str(Path(self._directory) / "store")
        try:
            for rank in range(1, spec.tensor_parallel):
                pipe, other = context.Pipe()
                process = context.Process(target=_run_rank, args=(spec, device.type, rank, store, other), daemon=True)
                process.start()
                other.close()
                self._pipes.append(pipe)
                self._processes.append(process)
            super().__init__(spec, device, _join(spec, device.type, 0, store))
        except BaseException:
            self.close()
            raise

    def _repeat(self, name: str, *arguments: Any) -> None:
        """Start a call on the other ranks."""
        try:
            for pipe in self._pipes:
                pipe.send((name, arguments))
        except OSError as error:
            raise EngineDiedError(self._spec.engine_id, "another rank of the engine has ended") from error

    def admit(self, rows: Sequence[BatchRow]) -> None:
        self._repeat("admit", list(rows))
        super().admit(rows)

    def step(self) -> list[BatchRow]:
        self._repeat("step")
        # `Decoder.step` removes the rows that ended, on every rank.
        return super().step()

    def abort_rows(self, rows: Sequence[BatchRow]) -> None:
        self._repeat("abort_rows", [row.request.request_id for row in rows])
        self.remove(rows)

    def logprobs(
        self, sequences: Sequence[IntArray], media: SequenceMedia = (), adapter: str | None = None
    ) -> list[FloatArray]:
        self._repeat("logprobs", list(sequences), list(media), adapter)
        return super().logprobs(sequences, media, adapter)

    def update_weights(self, update: WeightUpdate) -> Mapping[str, int]:
        # The other ranks receive the weights from this one, so they do not need the transport.
        self._repeat("update_weights", replace(update, handle=None))
        try:
            return super().update_weights(update)
        except BaseException:
            self.close()  # the other ranks may wait for a tensor that never comes
            raise

    def release(self) -> list[BatchRow]:
        self._repeat("release")
        return super().release()

    def allocate_weights(self) -> None:
        self._repeat("allocate_weights")
        super().allocate_weights()

    def close(self) -> None:
        """End the processes of the other ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join(CLOSE_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)


def _check_spec(spec: EngineSpec) -> None:
    for name, is_needed in (("model.lora", spec.lora is not None), ("training.router_replay", spec.records_experts)):
        if is_needed:
            raise ConfigError(
                f"inference.tensor_parallel {spec.tensor_parallel} of the hf engine does not support {name}: set "
                f"inference.tensor_parallel to 1, use inference.engine=vllm, or remove {name}."
            )


def _join(spec: EngineSpec, device: str, rank: int, store: str) -> ModelShard:
    size = spec.tensor_parallel
    names = ["cpu"] * size if device == "cpu" else [f"{device}:{each}" for each in range(size)]
    group = build_group(
        dist.FileStore(store, size),
        key="engine",
        rank=rank,
        members=tuple(BroadcastMember(spec.engine_id, each) for each in range(1, size)),
        backend=choose_backend(names),
        address="127.0.0.1",
        timeout_s=GROUP_TIMEOUT_S,
    )
    return ModelShard(rank, size, group.process_group)


def _run_rank(spec: EngineSpec, kind: str, rank: int, store: str, pipe: Connection) -> None:
    """Run a rank other than 0: repeat the calls of rank 0 until it closes the pipe."""
    torch.set_num_threads(spec.num_threads or max(1, torch.get_num_threads() // spec.tensor_parallel))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    decoder = Decoder(spec, device, _join(spec, kind, rank, store))
    with contextlib.suppress(EOFError, ConnectionResetError):
        while (call := pipe.recv()) is not None:
            name, arguments = call
            if name == "abort_rows":
                wanted = set(arguments[0])
                decoder.remove([row for row in decoder.rows if row.request.request_id in wanted])
            else:
                getattr(decoder, name)(*arguments)
