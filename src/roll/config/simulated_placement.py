"""Devices of simulated engines and trainers."""

from __future__ import annotations

from pydantic import model_validator

from roll.config.base import Section, option
from roll.config.sharing import SharingRule

__all__ = ["SimulatedPlacement"]


class SimulatedPlacement(Section):
    """Numbers of devices for generation and for training, and how the two share them."""

    generation: int = option(8, "Number of devices that generate.", ge=1)
    training: int = option(0, "Number of devices that train; 0: colocated with generation, in turns.", ge=0)
    sharing: SharingRule | None = option(
        None,
        "When engines release devices that they share with the trainer (`cluster.sharing` of a run). "
        "`partial_overlap`, `elastic_overlap`, `stream_training`: the `training` devices are the last of the "
        "`generation` devices. By default `disaggregated` with devices that only train, otherwise `colocated`.",
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
        if rule in ("disaggregated", "colocated") and (rule == "colocated") != (self.training == 0):
            raise ValueError(
                f"sharing is {rule}, but training is {self.training}: set training to 0 for colocated, or to the "
                "number of devices that only train for disaggregated"
            )
        return self

    @property
    def is_colocated(self) -> bool:
        """True if training and generation share all devices."""
        return self.training == 0

    @property
    def overlaps(self) -> bool:
        """True if the trainer shares its devices with some of the engines."""
        return self.sharing in ("partial_overlap", "elastic_overlap", "stream_training")

    @property
    def rule(self) -> SharingRule:
        """The sharing rule; by default `colocated` or `disaggregated`, depending on the devices."""
        return self.sharing or ("colocated" if self.is_colocated else "disaggregated")

    @property
    def num_training_devices(self) -> int:
        """Number of devices used for training."""
        return self.training or self.generation

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return self.generation if self.overlaps else self.generation + self.training
