"""Devices of simulated engines and trainers."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.sharing import SharingRule

__all__ = ["DEVICES_PER_MACHINE", "SimulatedPlacement"]

DEVICES_PER_MACHINE = 8
"""Number of devices of one machine, which `link_bandwidth` connects; more devices communicate over the network."""


class SimulatedPlacement(Section):
    """Numbers of devices for generation and for training, and how the two share them."""

    generation: int = option(8, "Number of devices that generate.", ge=1)
    training: int = option(0, "Number of devices that train; 0: colocated with generation, in turns.", ge=0)
    sharing: Literal["auto"] | SharingRule | None = option(
        None,
        "When engines release devices that they share with the trainer (`cluster.sharing` of a run). With a rule other "
        "than `disaggregated`, the `training` devices are the last of the `generation` devices. `auto`: the rule with "
        "the shortest step in a short simulation. By default `disaggregated` with devices that only train, otherwise "
        "`colocated`.",
    )
    switch_s: float = option(
        0.0,
        "Duration of a switch of shared devices from generation to training and back, half of it in each direction.",
        unit="seconds",
        ge=0,
    )

    @model_validator(mode="after")
    def _check_sharing(self) -> SimulatedPlacement:
        rule = self.sharing
        if self.overlaps and not 0 < self.training < self.generation:
            raise ValueError(
                f"sharing {rule} requires engines that continue to generate, but training uses {self.training} of "
                f"{self.generation} generation devices: set training between 1 and {self.generation - 1}"
            )
        if rule == "disaggregated" and self.training == 0:
            raise ValueError(
                "sharing disaggregated requires devices that only train, but training is 0: set training to their "
                "number, or sharing to colocated"
            )
        if rule in ("colocated", "auto") and self.training >= self.generation:
            raise ValueError(
                f"sharing {rule}: the training devices are among the {self.generation} generation devices, got "
                f"training {self.training}: set training to less than {self.generation}, or to 0 for all devices"
            )
        return self

    @property
    def is_colocated(self) -> bool:
        """True if training uses all devices that generate."""
        return self.training == 0

    @property
    def shares_devices(self) -> bool:
        """True if the trainer's devices also generate."""
        return self.training == 0 or self.sharing not in (None, "disaggregated")

    @property
    def overlaps(self) -> bool:
        """True if engines that share no devices generate while the trainer computes."""
        return self.sharing in ("partial_overlap", "elastic_overlap", "stream_training")

    @property
    def rule(self) -> SharingRule:
        """The sharing rule; by default `colocated` or `disaggregated`, depending on the devices.

        Raises:
            ValueError: The rule `auto` was not resolved.
        """
        if self.sharing == "auto":
            raise ValueError("placement.sharing auto must be resolved first")
        return self.sharing or ("colocated" if self.is_colocated else "disaggregated")

    @property
    def num_training_devices(self) -> int:
        """Number of devices used for training."""
        return self.training or self.generation

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return self.generation if self.shares_devices else self.generation + self.training
