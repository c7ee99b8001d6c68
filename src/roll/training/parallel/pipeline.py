"""One stage of a model that several ranks compute one after the other: its place, its messages, its order of work.

    stage 0    F0 F1 F2 B0 F3 B1 B2 B3            forward of micro-batch i: hidden states go up to the next stage
    stage 1       F0 F1 B0 F2 B1 F3 B2 B3         backward: their gradients come down again
    stage 2          F0 B0 F1 B1 F2 B2 F3 B3

That order (1F1B, arXiv 1806.03377) keeps as many micro-batches in flight as stages follow, and no more. Rows may differ
in length: every rank of a data share packs the whole batch, so all know the shape of each message. Messages up and
down have groups of their own and are sent without waiting, so no two stages wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__all__ = ["Part", "PassThrough", "Stage", "order"]

_UNRECEIVED = 2
"""Messages each way that may wait for the next stage: more would be memory without speed."""


def order(num: int, num_later: int, *, backward: bool) -> Iterator[tuple[bool, int]]:
    """Whether a stage goes forward (or back), and with which micro-batch, in turn.

    Args:
        num: of micro-batches.
        num_later: stages that follow; with none, each forward is directly followed by its backward.
        backward: whether there is any.
    """
    ahead = min(num_later, num) if backward else num
    yield from ((True, i) for i in range(ahead))
    for i in range(num if backward else 0):
        if i + ahead < num:
            yield True, i + ahead
        yield False, i


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a model, of which one call of its decoder computes no more."""

    number: int
    count: int
    """Of the model's parts."""

    @property
    def is_first(self) -> bool:
        """Whether tokens come in here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether log-probs, values and losses come out here."""
        return self.number == self.count - 1


class Stage:
    """A rank among those, one of each stage, that a micro-batch passes through.

    Args:
        up: these ranks, first stage first; for hidden states.
        down: the same; for gradients.
        device: of the network.
        with_first: whether rank 0 of the trainer is among them.
    """

    def __init__(self, up: ProcessGroup, down: ProcessGroup, device: torch.device, *, with_first: bool) -> None:
        self.number, self.count = up.rank(), up.size()
        self.parts = (Part(self.number, self.count),)
        """That this rank has, in the model's order."""
        self.chunk = 0
        """Which of them is at work."""
        self.device = device
        self.with_first = with_first
        self._up, self._down = up, down
        self._sent: dict[ProcessGroup, deque[tuple[Any, Tensor]]] = {up: deque(), down: deque()}
        self._in_flight: deque[tuple[Tensor | None, Tensor | None]] = deque()

    @property
    def part(self) -> Part:
        """Which is at work."""
        return self.parts[self.chunk]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first part."""
        return self.parts[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last part."""
        return self.parts[-1].is_last

    @property
    def num_later(self) -> int:
        """Stages that follow."""
        return self.count - 1 - self.number

    def begin(self) -> None:
        """Forget what a batch that failed has left."""
        self._in_flight.clear()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Hidden states of the stage before; a leaf, which has a gradient where one is wanted."""
        states = torch.empty(*shape, dtype=dtype, device=self.device)
        dist.recv(states, group=self._up, group_src=self.number - 1)
        return states.requires_grad_(torch.is_grad_enabled())

    def pass_on(self, states: Tensor) -> None:
        """Hidden states to the next stage."""
        self._send(states.detach(), self._up, self.number + 1)

    def remember(self, received: Tensor | None, passed: Tensor | None) -> None:
        """A micro-batch whose backward is still to come: what came in, and what went to the next stage."""
        self._in_flight.append((received, passed))

    def go_back(self, loss: Tensor | None, backward: Callable[[Tensor], None]) -> None:
        """Backward of the oldest micro-batch in flight, whose gradient goes on to the stage before.

        Args:
            loss: of the micro-batch, on the last stage.
            backward: takes it back; on other stages what stands for it, whose gradient is the one that came down.
        """
        received, passed = self._in_flight.popleft()
        if passed is not None:
            gradient = torch.empty_like(passed, memory_format=torch.contiguous_format)
            dist.recv(gradient, group=self._down, group_src=self.number + 1)
            loss = (passed * gradient).sum()
        assert loss is not None
        if loss.requires_grad:  # adapters need not be in every stage
            backward(loss)
        if received is not None:
            gradient = received.grad if received.grad is not None else torch.zeros_like(received)
            self._send(gradient, self._down, self.number - 1)

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every stage."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._up)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Over the stages, in place."""
        dist.all_reduce(value, group=self._up)
        return value

    def exchanged(self, own: Tensor) -> Tensor:
        """Between the first stage and the last: the other's tensor, which is like `own`."""
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        peer, there, back = (self.count - 1, self._up, self._down) if self.is_first else (0, self._down, self._up)
        self._send(own, there, peer)
        dist.recv(other, group=back, group_src=peer)
        self.finish()
        return other

    def spread(self, tensor: Tensor, owner: int) -> Tensor:
        """What the stage `owner` has, on every stage, in place of what is there."""
        dist.broadcast(tensor, group=self._up, group_src=owner)
        return tensor

    def to_first(self, tensor: Tensor) -> None:
        """Send a tensor to the first stage, which asks for it by `of`."""
        dist.send(tensor.contiguous(), group=self._down, group_dst=0)

    def of(self, stage: int, like: Tensor) -> Tensor:
        """What another stage sends to this one, the first; it looks like `like`."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(tensor, group=self._down, group_src=stage)
        return tensor

    def _send(self, tensor: Tensor, group: ProcessGroup, to: int) -> None:
        sent = self._sent[group]
        while len(sent) >= _UNRECEIVED:
            sent.popleft()[0].wait()
        tensor = tensor.contiguous()
        sent.append((dist.isend(tensor, group=group, group_dst=to), tensor))


class PassThrough(nn.Module):
    """Stands where another stage has a module, and gives what it is given.

    Args:
        replaced: the module; what a decoder may ask it about itself is kept.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({n: v for n, v in vars(replaced).items() if isinstance(v, (str, int)) and n[0] != "_"})

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states
