"""Streams that tell who may use what another has written: a device's memory and the host's, played by the host's alone.

Streams are lists of what was asked of them. An operation may read a storage only if whatever wrote it, and write one
only if whatever used it, was asked for earlier on the same stream, or is known to be over: by `wait_stream`, by an
event, or because the host has waited. The memory of a device's storage that is let go is used anew on its own stream,
so that another one that still needs it must have been recorded.
(https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams)
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll.training.memory.host_memory import HostMemory

_UNREAD = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_full", "new_ones")
"""Operations that ask a tensor for its shape alone."""


class Stream:
    """In place of `torch.Stream`; its clock says how much of every stream is over before what comes next on it."""

    def __init__(self, world: Streams, name: str) -> None:
        self.world, self.name = world, name
        self.clock: dict[str, int] = {name: 0}
        self._outer: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        _join(self.clock, other.clock)

    def record_event(self) -> Event:
        return Event(self.world, dict(self.clock))

    def synchronize(self) -> None:
        _join(self.world.host, self.clock)

    def __enter__(self) -> Stream:
        self._outer.append(self.world.current)
        self.world.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self.world.current = self._outer.pop()


class Event:
    def __init__(self, world: Streams, clock: dict[str, int]) -> None:
        self.world, self.clock = world, clock

    def synchronize(self) -> None:
        _join(self.world.host, self.clock)


class Streams(TorchDispatchMode):
    """All streams of the device, the host, and when each storage was last used by them."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[str, int] = {"host": 0}
        self.main = self.current = Stream(self, "main")
        self.races: list[str] = []
        self.num_copies = 0
        """Between main memory and the device."""
        self._read: dict[int, dict[str, int]] = {}
        self._written: dict[int, dict[str, int]] = {}
        self._on_host: set[int] = set()
        self._home: dict[int, str] = {}
        self._recorded: dict[int, set[str]] = {}
        self._num_sides = 0
        self._watching = True

    def side(self, *_: object) -> Stream:
        """A stream beside the main one."""
        self._num_sides += 1
        return Stream(self, f"side {self._num_sides}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._watching or _is_view(func):
            return result
        given = _tensors((args, kwargs))
        made = [tensor for tensor in _tensors(result) if _key(tensor) not in map(_key, given)]
        if given and all(self._is_on_host(tensor) for tensor in given):
            self._on_host.update(map(_key, made))
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":  # the host reads a number, and waits for it
            _join(self.host, self.current.clock)
        else:
            self.use(name, [] if name in _UNREAD else given, _written_by(func, args, kwargs) + made)
        return result

    def use(self, what: str, read: list[Tensor], written: list[Tensor], *, on_device: bool = False) -> None:
        """Note an operation, on the current stream where a tensor of the device takes part."""
        tensors = {_key(tensor): tensor for tensor in (*read, *written)}
        places = {self._is_on_host(tensor) for tensor in tensors.values()}
        self.num_copies += len(places) == 2
        is_host = places == {True} and not on_device
        clock, name = (self.host, "host") if is_host else (self.current.clock, self.current.name)
        _join(clock, self.host)  # the host asks, so what it has waited for is over
        clock[name] = clock.get(name, 0) + 1
        writes = set(map(_key, written))
        for key, tensor in tensors.items():
            if key not in self._home:
                self._home[key] = name if key in writes else "main"  # what nobody was seen to make
                weakref.finalize(tensor.untyped_storage(), self._let_go, key)
            before = [self._written, self._read] if key in writes else [self._written]
            late = {s for used in before for s, when in used.get(key, {}).items() if clock.get(s, 0) < when}
            self.races += [f"{what} on {name} does not wait for {other}" for other in sorted(late)]
            (self._written if key in writes else self._read).setdefault(key, {})[name] = clock[name]

    def record(self, tensor: Tensor, stream: Stream) -> None:
        self._recorded.setdefault(_key(tensor), set()).add(stream.name)

    def pinned_like(self, tensor: Tensor, **more: Any) -> Tensor:
        """Main memory, empty."""
        found = self.unwatched(
            torch.empty_strided, tensor.shape, tensor.stride(), dtype=more.get("dtype", tensor.dtype)
        )
        self._on_host.add(_key(found))
        return found

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of main memory's, on the current stream."""
        found = self.unwatched(tensor.clone)
        self.use("to", [tensor], [found])
        return found

    def is_host_s(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._on_host

    def unwatched(self, call: Any, *args: Any, **more: Any) -> Any:
        self._watching = False
        try:
            return call(*args, **more)
        finally:
            self._watching = True

    def _is_on_host(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._on_host

    def _let_go(self, key: int) -> None:
        home, recorded = self._home.pop(key), self._recorded.pop(key, set())
        last: dict[str, int] = {}
        for used in (self._read, self._written):
            _join(last, used.pop(key, {}))
        if key in self._on_host:  # pinned memory waits for its copies by itself
            self._on_host.discard(key)
            return
        known = self.main.clock if home == "main" else {}
        late = (s for s, when in last.items() if s not in (home, "host", *recorded) and known.get(s, 0) < when)
        self.races += [f"memory of {home} is let go while {other} uses it" for other in late]


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, when in other.items():
        clock[name] = max(clock.get(name, 0), when)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    """Numbers aside, which are passed by value."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for name in names for tensor in _tensors(given.get(name))]


@contextlib.contextmanager
def device_of_streams() -> Iterator[Streams]:
    """Inside, `HostMemory` moves between a device and main memory that are both this host's, under watch."""
    streams, empty_like, to = Streams(), torch.empty_like, torch.Tensor.to

    def begin(memory: HostMemory, device: torch.device) -> None:
        memory.device, memory._stream, memory._arriving = device, streams.side(), deque()  # type: ignore[assignment]

    def made_like(tensor: Tensor, **more: Any) -> Tensor:
        return streams.pinned_like(tensor, **more) if more.get("pin_memory") else empty_like(tensor, **more)

    def brought(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        to_device = bool(args) and isinstance(args[0], torch.device) and tensor.dim() > 0
        return streams.to_device(tensor) if to_device and streams.is_host_s(tensor) else to(tensor, *args, **more)

    instead: dict[str, Any] = {
        "roll.training.memory.host_memory.HostMemory.__init__": begin,
        "torch.accelerator.current_stream": lambda *_: streams.current,
        "torch.empty_like": made_like,
        "torch.Tensor.to": brought,
        "torch.Tensor.record_stream": lambda tensor, stream: streams.record(tensor, stream),
    }
    with contextlib.ExitStack() as stack:
        for path, value in instead.items():
            stack.enter_context(mock.patch(path, value))
        stack.enter_context(streams)
        yield streams
