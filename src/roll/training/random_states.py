"""A trainer's random generator states, separate from those of the other roles in its process.

torch has one generator per process and device, but trainers of several roles may share a process, each in its own
thread. With separate states, a trainer's random numbers do not depend on when other trainers are built or run. Only
adapter dropout uses random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["RandomStates"]


class RandomStates:
    """This rank's generator states, which replace torch's global states while the rank computes.

    `states` has the keys `cpu` and, on an accelerator, `device`. Trainers in one process compute one at a time, so they
    never use the generators concurrently.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self.states: dict[str, Tensor] = {}
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Reset the states to the initial states for a seed."""
        outer = self._read_states()
        torch.manual_seed(seed)
        self.states = self._read_states()
        self._put(outer)

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Restore saved generator states.

        Raises:
            RuntimeError: A value is not a valid generator state.
        """
        outer = self._read_states()
        try:
            self._put(states)
        finally:
            self._put(outer)
        self.states = dict(states)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Use these generator states in a `with` block, and save the new states at its end."""
        outer = self._read_states()
        self._put(self.states)
        try:
            yield
        finally:
            self.states = self._read_states()
            self._put(outer)

    @contextlib.contextmanager
    def restore_on_error(self) -> Iterator[None]:
        """Restore the states if the `with` block fails, as if the block had not used any random numbers."""
        before = self.states
        try:
            yield
        except BaseException:
            self.states = before
            raise

    def _read_states(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._module is not None:
            states["device"] = self._module.get_rng_state(self._device)
        return states

    def _put(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._module is not None:
            self._module.set_rng_state(states["device"], self._device)
