"""Pipeline parallelism: a stage, its model chunks, and its messages to other stages.

    chunk 0  ─ hidden states, up ─►  chunk 1  ─►  …  chunk p - 1     of stages 0 … p - 1
       ▲                                              │ around, if stages have several chunks
       └─ chunk p  ─►  chunk p + 1  ─►  …  ◄──────────┘              of the same stages
    and gradients in the opposite direction

`pipeline_schedule` decides in which order a rank computes its chunks. Rows may differ in length: every rank packs the
whole batch, so all ranks know the shape of each message. Each process group is used in one direction only, and messages
between two ranks arrive in the order in which they were sent. Before a stage sends a message, it waits until its
messages from two actions earlier have arrived. Therefore a stage may wait for a slower stage, but two stages never wait
for each other. If stages have several chunks and a backward pass follows, hidden states are sent without waiting,
because they are kept for the backward pass anyway.
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
from roll.training.parallel.pipeline_schedule import Action, build_schedule

__all__ = ["MAX_PENDING_SENDS", "ModelChunk", "PassThrough", "Stage"]

MAX_PENDING_SENDS = 2
"""Maximum number of earlier actions whose messages have not been received yet. More would use memory without being
faster; with fewer, two stages could wait for each other."""


class _InFlightMessage(NamedTuple):
    """A message in transfer."""

    arrival: Any
    tensor: Tensor
    action: int
    """The index of the action that sent the message, counted from the trainer's first action."""


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """Consecutive layers of a model, computed by one call of its decoder."""

    number: int
    count: int
    """The number of chunks of the model."""

    @property
    def is_first(self) -> bool:
        """True if this is the first chunk of the model, whose input is tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True if this is the last chunk of the model, which computes log-probs, values and losses."""
        return self.number == self.count - 1


class Stage:
    """This rank's pipeline stage, with the messages that it exchanges with other stages.

    Args:
        forward_group: The process group of all stages, in stage order, in which hidden states are sent.
        backward_group: A process group of the same ranks, in which gradients are sent.
        device: The device of the network.
        includes_rank_0: True if rank 0 of the trainer belongs to one of the stages.
        wraparound_groups: Two more groups of the same ranks, for hidden states and gradients between the last and the
            first stage; required if each stage has several chunks.
        num_chunks: The number of chunks of each stage.
    """

    def __init__(
        self,
        forward_group: ProcessGroup,
        backward_group: ProcessGroup,
        device: torch.device,
        *,
        includes_rank_0: bool,
        wraparound_groups: tuple[ProcessGroup, ProcessGroup] | None = None,
        num_chunks: int = 1,
    ) -> None:
        self.number, self.count, self.num_chunks = forward_group.rank(), forward_group.size(), num_chunks
        self.device = device
        self.includes_rank_0 = includes_rank_0
        self.chunks = tuple(
            ModelChunk(c * self.count + self.number, self.count * num_chunks) for c in range(num_chunks)
        )
        """The chunks of this rank, in the model's order."""
        self.active_index = 0
        """The index of the active chunk."""
        self._forward_group, self._backward_group = forward_group, backward_group
        own_groups = (forward_group, backward_group)
        turn = wraparound_groups or own_groups
        self._before = (self.number - 1) % self.count, *(own_groups if self.number else turn)
        """The rank of the previous chunk, the group of its hidden states, and the group of gradients sent to it."""
        self._after = (self.number + 1) % self.count, *(own_groups if self.number + 1 < self.count else turn)
        """The rank of the next chunk, the group of hidden states sent to it, and the group of its gradients."""
        self._sent: dict[ProcessGroup, deque[_InFlightMessage]] = {group: deque() for group in (*own_groups, *turn)}
        self._in_flight: list[deque[tuple[Tensor | None, Tensor | None, int]]] = [deque() for _ in self.chunks]
        self._has_backward = False
        self._num_actions = 0
        self._has_open_messages = False
        """True if messages of a batch may be in transfer: some were sent or received, and the batch has not ended."""
        if wraparound_groups is not None:
            self._warm_up_connections(wraparound_groups)

    @property
    def active_chunk(self) -> ModelChunk:
        """The chunk that the decoder currently computes."""
        return self.chunks[self.active_index]

    @property
    def is_first(self) -> bool:
        """True if this rank has the first chunk."""
        return self.chunks[0].is_first

    @property
    def is_last(self) -> bool:
        """True if this rank has the last chunk."""
        return self.chunks[-1].is_last

    def iter_actions(self, num_micro_batches: int, *, backward: bool) -> Iterator[Action]:
        """Yield this rank's actions for `num_micro_batches` micro-batches, in order, and activate the chunk of each
        action.

        After the last action, wait until all sent messages have arrived.

        Raises:
            InfraError: An earlier batch failed midway; its messages could be mistaken for messages of this batch.
        """
        if self._has_open_messages:
            raise InfraError(
                "an earlier batch failed while its messages were in transfer between pipeline stages "
                "(training.parallel.pp), and this batch would receive them: resume the run."
            )
        for in_flight in self._in_flight:
            in_flight.clear()  # a failed batch may have left some
        self._has_backward = backward
        for action in build_schedule(num_micro_batches, self.number, self.count, self.num_chunks, backward=backward):
            self.active_index = action.chunk
            self._num_actions += 1
            yield action
        self._finish()

    def recv_states(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the hidden states received from the previous chunk, as a leaf tensor that requires a gradient if
        gradients are enabled.
        """
        states = torch.empty(*shape, dtype=dtype, device=self.device)
        rank, up, _ = self._before
        self._has_open_messages = True
        dist.recv(states, group=up, group_src=rank)
        return states.requires_grad_(torch.is_grad_enabled())

    def send_states(self, states: Tensor) -> None:
        """Send hidden states to the next chunk."""
        rank, up, _ = self._after
        # Waiting bounds memory. With several chunks, the backward pass keeps these states anyway.
        self._send(states.detach(), up, rank, wait=not self._has_backward or self.num_chunks == 1)

    def save_for_backward(self, received_states: Tensor | None, sent_states: Tensor | None) -> None:
        """Store the hidden states that the active chunk received and sent for a micro-batch, for the backward pass."""
        self._in_flight[self.active_index].append((received_states, sent_states, self._num_actions))

    def backward(self, loss: Tensor | None, run_backward: Callable[[Tensor], None]) -> None:
        """Run the backward pass of the oldest micro-batch in flight in the active chunk, and send the gradient of the
        received hidden states to the previous chunk.

        Args:
            loss: The loss of the micro-batch, in the last chunk.
            run_backward: A function that runs the backward pass from a scalar. The last chunk passes `loss`; other
                chunks pass a scalar whose gradient with respect to the chunk's output is the gradient that they
                received from the next chunk.
        """
        received, passed, action = self._in_flight[self.active_index].popleft()
        if passed is not None:
            gradient = torch.empty_like(passed, memory_format=torch.contiguous_format)
            rank, up, down = self._after
            self._has_open_messages = True
            dist.recv(gradient, group=down, group_src=rank)
            self._wait_for_sent(up, action)  # the next rank has received it, or it could not have sent a gradient
            # The back-ends take a scalar: d loss / d passed is the received gradient.
            loss = (passed * gradient).sum()
        assert loss is not None
        if loss.requires_grad:  # adapters need not be in every chunk
            run_backward(loss)
        if received is not None:
            gradient = received.grad if received.grad is not None else torch.zeros_like(received)
            rank, _, down = self._before
            self._send(gradient, down, rank, wait=True)

    def gather(self, value: Any) -> list[Any]:
        """Gather a Python object from every stage; return the list in stage order."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._forward_group)
        return values

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the stages, in place, and return it."""
        dist.all_reduce(value, group=self._forward_group)
        return value

    def exchange_between_ends(self, tensor: Tensor) -> Tensor:
        """Exchange tensors of the same shape between the first and the last stage; return the other stage's tensor."""
        other = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        peer, there, back = (
            (self.count - 1, self._forward_group, self._backward_group)
            if self.is_first
            else (0, self._backward_group, self._forward_group)
        )
        # Both ends send before they receive, so neither may wait for the other.
        self._send(tensor, there, peer, wait=False)
        dist.recv(other, group=back, group_src=peer)
        self._finish()
        return other

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """Broadcast a tensor from the stage `owner` to all stages, in place, and return it."""
        dist.broadcast(tensor, group=self._forward_group, group_src=owner)
        return tensor

    def send_to_first_stage(self, tensor: Tensor) -> None:
        """Send a tensor to the first stage, which receives it with `recv_from`."""
        dist.send(tensor.contiguous(), group=self._backward_group, group_dst=0)

    def recv_from(self, stage: int, template: Tensor) -> Tensor:
        """Receive, on the first stage, a tensor that `stage` sent with `send_to_first_stage`; `template` has the same
        shape and dtype.
        """
        tensor = torch.empty(template.shape, dtype=template.dtype, device=self.device)
        dist.recv(tensor, group=self._backward_group, group_src=stage)
        return tensor

    def _warm_up_connections(self, wraparound_groups: tuple[ProcessGroup, ProcessGroup]) -> None:
        """Exchange one message with each neighbor, so that NCCL connects the ranks.

        NCCL connects two ranks at their first message, and the sender waits for the connection. During a schedule this
        could deadlock.
        """
        word, first, last = torch.zeros(1, device=self.device), 0, self.count - 1
        links = [(self._forward_group, i, i + 1) for i in range(last)] + [
            (self._backward_group, i + 1, i) for i in range(last)
        ]
        for group, sender, receiver in (
            *links,
            (wraparound_groups[0], last, first),
            (wraparound_groups[1], first, last),
        ):
            if self.number == sender:
                dist.send(word, group=group, group_dst=receiver)
            elif self.number == receiver:
                dist.recv(word, group=group, group_src=sender)

    def _finish(self) -> None:
        for group in self._sent:
            self._wait_for_sent(group, self._num_actions)
        self._has_open_messages = False

    def _send(self, tensor: Tensor, group: ProcessGroup, receiver: int, *, wait: bool) -> None:
        sent, tensor = self._sent[group], tensor.contiguous()
        self._has_open_messages = True
        while wait and len({each.action for each in sent} - {self._num_actions}) >= MAX_PENDING_SENDS:
            self._wait_for_sent(group, sent[0].action)
        sent.append(_InFlightMessage(dist.isend(tensor, group=group, group_dst=receiver), tensor, self._num_actions))

    def _wait_for_sent(self, group: ProcessGroup, action: int) -> None:
        """Wait until all messages of a group up to the messages of `action` have arrived, and discard them."""
        sent = self._sent[group]
        while sent and sent[0].action <= action:
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
