"""A trainer's random numbers, separate from those of every other role in its process.

torch has one generator per process and device. Trainers of several roles may share a process, each in a thread of its
own. So the numbers that one draws must not depend on when another was built or trained. Only an adapter's dropout draws
any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["Randomness"]


class Randomness:
    """The states of this rank's generators, by `cpu` and `device`, which replace the process's own while the rank
    computes.

    Trainers of one process compute one after the other, so there are no concurrent draws.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._device = device
        self.states: dict[str, Tensor] = {}
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Restart from a seed."""
        outer = self._current()
        torch.manual_seed(seed)
        self.states = self._current()
        self._put(outer)

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Restore saved states.

        Raises:
            RuntimeError: a value is not a state of torch's generators.
        """
        outer = self._current()
        try:
            self._put(states)
        finally:
            self._put(outer)
        self.states = dict(states)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the body with torch drawing from these generators."""
        outer = self._current()
        self._put(self.states)
        try:
            yield
        finally:
            self.states = self._current()
            self._put(outer)

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the states if the body raises, so that later saves do not include its draws."""
        before = self.states
        try:
            yield
        except BaseException:
            self.states = before
            raise

    def _current(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._module is not None:
            states["device"] = self._module.get_rng_state(self._device)
        return states

    def _put(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self._module is not None:
            self._module.set_rng_state(states["device"], self._device)
