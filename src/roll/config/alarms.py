"""Alarms."""

from __future__ import annotations

from typing import Literal

from roll.config.base import Section, option

__all__ = ["AlarmsConfig"]


class AlarmsConfig(Section):
    """When a run warns that it goes wrong, or stops."""

    action: Literal["warn", "stop"] = option(
        "warn", "Say it and go on; or save, end, and exit with code 3. `roll resume` goes on from there."
    )
    patience: int = option(3, "An alarm goes off after so many steps in a row.", unit="steps", ge=1)
    entropy_below: float | None = option(
        None, "Entropy collapse: below this. A solved task ends here too.", unit="nats per token", gt=0
    )
    kl_above: float | None = option(
        1.0,
        "KL blow-up: divergence from the reference, or without one of the trainer from the engine, above this.",
        unit="nats per token",
        gt=0,
    )
    no_signal: bool = option(True, "No group of a step had rewards that differ.")
    unfinished_above: float | None = option(0.95, "Share of rollouts that were cut off, above this.", ge=0, lt=1)
