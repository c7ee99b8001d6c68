"""Alarms."""

from __future__ import annotations

from typing import Literal, TypeAlias

from roll.config.base import Section, option

__all__ = ["AlarmName", "AlarmsConfig"]

AlarmName: TypeAlias = Literal[
    "entropy_below",
    "kl_above",
    "no_signal",
    "unfinished_above",
    "length_drift_above",
    "repeated_text_above",
    "shared_ngrams_above",
    "self_repetition_above",
    "disagreement_above",
]


class AlarmsConfig(Section):
    """When a run warns that it goes wrong, or stops."""

    action: Literal["warn", "stop"] = option(
        "warn", "Say it and go on; or save, end, and exit with code 3. `roll resume` goes on from there."
    )
    stop_on: list[AlarmName] = option(
        [], "Alarms that stop the run whatever `action` says.", examples=[["disagreement_above"]]
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
    length_drift_above: float | None = option(
        None,
        "Mean length of answers, as a multiple of that in the run's first five steps, above this or below its inverse.",
        gt=1,
        examples=[3.0],
    )
    repeated_text_above: float | None = option(
        0.5,
        "Share of longer answers (from 12 words on) that another prompt was given too, word for word.",
        ge=0,
        lt=1,
    )
    shared_ngrams_above: float | None = option(
        0.5,
        "Share of the answers' runs of eight words that occur in answers to half of the prompts or more.",
        ge=0,
        lt=1,
    )
    self_repetition_above: float | None = option(
        0.5,
        "Share of answers more than half of which (by runs of four tokens) they said before themselves.",
        ge=0,
        lt=1,
    )
    disagreement_above: float | None = option(
        0.5, "Share of answers of which one component of the reward says right and another wrong.", ge=0, lt=1
    )
