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
    "infra_errors_above",
    "timeouts_above",
]


class AlarmsConfig(Section):
    """When a run warns of a problem, or stops."""

    action: Literal["warn", "stop"] = option(
        "warn",
        "`warn`: log a warning and go on. `stop`: save, end, and exit with code 3; `roll resume` continues from there.",
    )
    stop_on: list[AlarmName] = option(
        ["infra_errors_above", "timeouts_above"],
        "Alarms that stop the run whatever `action` says; a list of yours replaces this one.",
        examples=[["disagreement_above"]],
    )
    patience: int = option(
        3,
        "An alarm goes off after N steps in a row; those of infrastructure errors and time-outs look at N steps "
        "together, and go off at once where all answers of the first step failed.",
        unit="steps",
        ge=1,
    )
    infra_errors_above: float | None = option(
        0.25,
        "The share of answers that got no reward, because a verifier, an environment or an engine failed, is above "
        "this. Answers that no verifier looked at (cut off) do not count.",
        ge=0,
        lt=1,
    )
    timeouts_above: float | None = option(
        0.5,
        "The share of answers that took a verifier longer than `time_limit_s`, and so got 0, is above this.",
        ge=0,
        lt=1,
    )
    entropy_below: float | None = option(
        None,
        "Entropy collapse: the policy's entropy is below this. A solved task ends here too.",
        unit="nats per token",
        gt=0,
    )
    kl_above: float | None = option(
        1.0,
        "KL blow-up: the divergence from the reference (without one: of the trainer from the engine) is above this.",
        unit="nats per token",
        gt=0,
    )
    no_signal: bool = option(True, "In a step, no group had rewards that differ.")
    unfinished_above: float | None = option(0.5, "The share of rollouts that were cut off is above this.", ge=0, lt=1)
    length_drift_above: float | None = option(
        None,
        "Answers' mean length, as a multiple of that in the first five steps, is above this or below its inverse.",
        gt=1,
        examples=[3.0],
    )
    repeated_text_above: float | None = option(
        0.5,
        "Share of longer answers (12 words or more) that another prompt was given too, word for word.",
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
        0.5, "Share of answers that one component of the reward calls right and another wrong.", ge=0, lt=1
    )

    def stops_on(self, name: str) -> bool:
        """Return whether the run stops when this alarm is raised."""
        return self.action == "stop" or name in self.stop_on
