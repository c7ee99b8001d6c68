"""A pipeline stage: its place among the ranks, its parts of the model, its messages.

    part 0  ─ hidden states, up ─►  part 1  ─►  …  part p - 1      of ranks 0 … p - 1, each with its chunk 0
       ▲                                            │ around, where ranks have several parts
       └─ part p  ─►  part p + 1  ─►  …  ◄──────────┘               chunk 1 of the same ranks
    and gradients in the opposite direction

`order` decides when a rank computes which of its parts. Rows may differ in length: every rank of a data share packs the
whole batch, so all ranks know the shape of each message. A process group carries messages in one direction only, and
two ranks receive them in the order in which they were sent. A sending stage may wait for a late one, but stages never
wait for each other: a message waits until those of two works earlier have arrived. Hidden states do not wait if stages
have several parts and a backward pass follows, for which they are kept anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.errors import InfraError
from roll.training.parallel.pipeline_schedule import Action, schedule

__all__ = ["MAX_UNRECEIVED", "ModelChunk", "PassThrough", "Stage"]

MAX_UNRECEIVED = 2
"""Number of earlier works whose messages may be unreceived. More would use memory without speed; with fewer, two
stages could wait for each other."""


class _InFlightMessage(NamedTuple):
    """A message in transfer."""

    arrival: Any
    tensor: Tensor
    action: int
    """The number of the work that sent it, counted from the trainer's first one."""


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Consecutive layers of a model, computed by one call of its decoder."""

    number: int
    count: int
    """The number of parts of the model."""

    @property
    def is_first(self) -> bool:
        """Whether tokens enter the model here."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether log-probs, values and losses are computed here."""
        return self.number == self.count - 1


class Stage:
    """A rank among those that a micro-batch passes through.

    Args:
        up: The group of these ranks, first stage first, for hidden states.
        down: The same ranks, for gradients.
        device: The device of the network.
        with_first: Whether rank 0 of the trainer is among the ranks.
        around: The same ranks, up and down, for messages between the last and the first one; given if each has several
            parts.
        num_chunks: The number of parts of each rank.
    """

    def __init__(
        self,
        up: ProcessGroup,
        down: ProcessGroup,
        device: torch.device,
        *,
        with_first: bool,
        around: tuple[ProcessGroup, ProcessGroup] | None = None,
        num_chunks: int = 1,
    ) -> None:
        self.number, self.count, self.num_chunks = up.rank(), up.size(), num_chunks
        self.device = device
        self.with_first = with_first
        self.chunks = tuple(
            ModelChunk(c * self.count + self.number, self.count * num_chunks) for c in range(num_chunks)
        )
        """The parts of this rank, in the model's order."""
        self.active_index = 0
        """The index of the active part."""
        self._up, self._down = up, down
        turn = around or (up, down)
        self._before = (self.number - 1) % self.count, *((up, down) if self.number else turn)
        """The rank of the previous part, the group of its hidden states, and the group of gradients sent to it."""
        self._after = (self.number + 1) % self.count, *((up, down) if self.number + 1 < self.count else turn)
        """The rank of the next part, the group of hidden states sent to it, and the group of its gradients."""
        self._sent: dict[ProcessGroup, deque[_InFlightMessage]] = {group: deque() for group in (up, down, *turn)}
        self._in_flight: list[deque[tuple[Tensor | None, Tensor | None, int]]] = [deque() for _ in self.chunks]
        self._has_backward = False
        self._num_actions = 0
        self._has_open_messages = False
        """Whether messages of a batch may be in transfer: some were sent or received, and the batch has not ended."""
        if around is not None:
            self._connect(around)

    @property
    def active_chunk(self) -> ModelChunk:
        """The active part."""
        return self.chunks[self.active_index]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first part."""
        return self.chunks[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last part."""
        return self.chunks[-1].is_last

    def iter_actions(self, num: int, *, backward: bool) -> Iterator[Action]:
        """Yield this rank's work on `num` micro-batches, each while its part is the active one.

        After the last one, all sent messages have arrived.

        Raises:
            InfraError: an earlier batch failed midway; its messages could be mistaken for this batch's.
        """
        if self._has_open_messages:
            raise InfraError(
                "an earlier batch failed while its messages were in transfer between pipeline stages "
                "(training.parallel.pp), and this batch would receive them: resume the run."
            )
        for in_flight in self._in_flight:
            in_flight.clear()  # a failed batch may have left some
        self._has_backward = backward
        for work in schedule(num, self.number, self.count, self.num_chunks, backward=backward):
            self.active_index = work.chunk
            self._num_actions += 1
            yield work
        self._finish()

    def recv_states(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Receive the hidden states of the previous part, as a leaf that collects a gradient where gradients are
        enabled.
        """
        states = torch.empty(*shape, dtype=dtype, device=self.device)
        rank, up, _ = self._before
        self._has_open_messages = True
        dist.recv(states, group=up, group_src=rank)
        return states.requires_grad_(torch.is_grad_enabled())

    def send_states(self, states: Tensor) -> None:
        """Send hidden states to the next part."""
        rank, up, _ = self._after
        self._send(states.detach(), up, rank, waits=not self._has_backward or self.num_chunks == 1)

    def save_for_backward(self, received: Tensor | None, passed: Tensor | None) -> None:
        """Store the input and the output of a micro-batch whose backward pass through this part is still to come."""
        self._in_flight[self.active_index].append((received, passed, self._num_actions))

    def backward(self, loss: Tensor | None, run_backward: Callable[[Tensor], None]) -> None:
        """Run the backward pass of the oldest micro-batch in flight in this part, and send its gradient to the
        previous part.

        Args:
            loss: The loss of the micro-batch, in the last part.
            backward: A function that runs the backward pass. Other parts call it with a scalar whose gradient is the
                received one.
        """
        received, passed, work = self._in_flight[self.active_index].popleft()
        if passed is not None:
            gradient = torch.empty_like(passed, memory_format=torch.contiguous_format)
            rank, up, down = self._after
            self._has_open_messages = True
            dist.recv(gradient, group=down, group_src=rank)
            self._wait_for_sent(up, work)  # the next rank has received it, or it could not have sent a gradient
            loss = (passed * gradient).sum()
        assert loss is not None
        if loss.requires_grad:  # adapters need not be in every part
            run_backward(loss)
        if received is not None:
            gradient = received.grad if received.grad is not None else torch.zeros_like(received)
            rank, _, down = self._before
            self._send(gradient, down, rank, waits=True)

    def gather(self, value: Any) -> list[Any]:
        """Gather the plain value of every stage."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._up)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the stages, in place."""
        dist.all_reduce(value, group=self._up)
        return value

    def exchange_with_other_end(self, own: Tensor) -> Tensor:
        """Exchange tensors of the same shape between the first and the last stage; return the other one's."""
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        peer, there, back = (self.count - 1, self._up, self._down) if self.is_first else (0, self._down, self._up)
        self._send(own, there, peer, waits=False)
        dist.recv(other, group=back, group_src=peer)
        self._finish()
        return other

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """Broadcast the tensor of the stage `owner` to every stage, in place."""
        dist.broadcast(tensor, group=self._up, group_src=owner)
        return tensor

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a tensor to the first stage, which receives it with `of`."""
        dist.send(tensor.contiguous(), group=self._down, group_dst=0)

    def recv_from(self, stage: int, like: Tensor) -> Tensor:
        """Receive a tensor shaped like `like` that another stage sends to the first one."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(tensor, group=self._down, group_src=stage)
        return tensor

    def _connect(self, around: tuple[ProcessGroup, ProcessGroup]) -> None:
        """Exchange one message with each neighbor, because NCCL connects two ranks with their first message.

        The sender waits for that connection. In the middle of an order this could deadlock.
        """
        word, first, last = torch.zeros(1, device=self.device), 0, self.count - 1
        links = [(self._up, i, i + 1) for i in range(last)] + [(self._down, i + 1, i) for i in range(last)]
        for group, sender, receiver in (*links, (around[0], last, first), (around[1], first, last)):
            if self.number == sender:
                dist.send(word, group=group, group_dst=receiver)
            elif self.number == receiver:
                dist.recv(word, group=group, group_src=sender)

    def _finish(self) -> None:
        for group in self._sent:
            self._wait_for_sent(group, self._num_actions)
        self._has_open_messages = False

    def _send(self, tensor: Tensor, group: ProcessGroup, to: int, *, waits: bool) -> None:
        sent, tensor = self._sent[group], tensor.contiguous()
        self._has_open_messages = True
        while waits and len({each.action for each in sent} - {self._num_actions}) >= MAX_UNRECEIVED:
            self._wait_for_sent(group, sent[0].action)
        sent.append(_InFlightMessage(dist.isend(tensor, group=group, group_dst=to), tensor, self._num_actions))

    def _wait_for_sent(self, group: ProcessGroup, work: int) -> None:
        """Wait until the messages of a work and of those before have arrived, and drop them."""
        sent = self._sent[group]
        while sent and sent[0].action <= work:
            sent.popleft().arrival.wait()


class PassThrough(nn.Module):
    """Replaces a module of another stage; returns its input unchanged.

    Args:
        replaced: The module, whose plain attributes are kept because a decoder may read them.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({n: v for n, v in vars(replaced).items() if isinstance(v, (str, int)) and n[0] != "_"})

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states
