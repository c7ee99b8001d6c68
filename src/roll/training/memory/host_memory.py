"""Optimizer and activation offload: copies between a device and host memory that overlap with computation.

    backward pass ─ a gradient ─ separate stream ─► pinned copy ─ once it is complete ─► added on the host
    update on the host ─ a weight, rounded to the network's dtype ─► pinned copy ─► device, while the next is rounded

On a CPU, device and host memory are the same, so nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["HostMemory"]

_MAX_COPIES_IN_FLIGHT = 4
"""Maximum number of copies in flight; before another copy starts, the host waits for the first of them."""


class HostMemory:
    """Moves tensors between one device and host memory.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._arriving: deque[tuple[torch.Event, Tensor, Callable[[Tensor], None]]] = deque()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor from the device to host memory, and return the copy.

        The copy must not be read before `finish`, but it may be passed to `to_device`.
        """
        if self._stream is None:
            return tensor
        # The copy must not start before the kernels that compute the tensor have finished.
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        # Otherwise the allocator could give the memory to another tensor before the copy has read it.
        tensor.record_stream(self._stream)  # type: ignore[arg-type]
        return copy

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that `to_host` returned back to the device."""
        if self._stream is None:
            return tensor
        # The copy to the host may still be running.
        torch.accelerator.current_stream(self.device).wait_stream(self._stream)
        return tensor.to(self.device, non_blocking=True)

    def to_host_with_callback(self, tensor: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Start to copy a tensor from the device to host memory. `callback` is called with the copy, at the latest in
        `finish`.

        Callbacks are called in the order of the copies.
        """
        copy = self.to_host(tensor)
        if self._stream is None:
            callback(copy)
            return
        self._arriving.append((self._stream.record_event(), copy, callback))
        while len(self._arriving) > _MAX_COPIES_IN_FLIGHT:
            self._finish_first()

    def finish(self) -> None:
        """Wait for all copies that were started, and call the remaining callbacks."""
        while self._arriving:
            self._finish_first()
        if self._stream is not None:
            self._stream.synchronize()

    def write(self, target: Tensor, source: Tensor) -> None:
        """Start to copy `source` from host memory to `target`, rounded to the target's dtype on the host."""
        if self._stream is not None:
            # Only copies from pinned memory are asynchronous; rounding first halves the transfer of float32 masters.
            source = torch.empty_like(source, dtype=target.dtype, pin_memory=True).copy_(source)
        target.copy_(source, non_blocking=True)

    def _finish_first(self) -> None:
        event, copy, callback = self._arriving.popleft()
        event.synchronize()
        callback(copy)
