"""Configuration of alarms: conditions under which a run warns or stops."""

from __future__ import annotations

from typing import Literal, TypeAlias

from roll.config.base import Section, option

__all__ = ["AlarmName", "AlarmsConfig"]

AlarmName: TypeAlias = Literal[
    "entropy_below",
    "kl_above",
    "mismatch_above",
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
    """Conditions under which a run warns of a problem, or stops."""

    action: Literal["warn", "stop"] = option(
        "warn",
        "`warn`: log a warning and continue. `stop`: save a checkpoint and exit with code 3; `roll resume` continues "
        "from there.",
    )
    stop_on: list[AlarmName] = option(
        ["infra_errors_above", "timeouts_above"],
        "Alarms that stop the run regardless of `action`; a configured list replaces the default.",
        examples=[["disagreement_above"]],
    )
    patience: int = option(
        3,
        "Number of consecutive steps for which a condition must hold before its alarm is raised. Alarms about "
        "infrastructure errors and timeouts use the fraction over all these steps, and are raised immediately if all "
        "answers of the first step failed.",
        unit="steps",
        ge=1,
    )
    infra_errors_above: float | None = option(
        0.25,
        "Alarm if the fraction of answers that have no reward, because a verifier, an environment or an engine failed, "
        "is above this value.",
        ge=0,
        lt=1,
    )
    timeouts_above: float | None = option(
        0.5,
        "Alarm if the fraction of answers whose verification exceeded `time_limit_s` is above this value. Such answers "
        "get a reward of 0.",
        ge=0,
        lt=1,
    )
    entropy_below: float | None = option(
        None,
        "Alarm for entropy collapse: the policy's entropy is below this value. Entropy is also low if the task is "
        "solved.",
        unit="nats per token",
        gt=0,
    )
    kl_above: float | None = option(
        1.0,
        "Alarm for KL blow-up: the divergence from the reference model is above this value. Without a reference "
        "model, it is the divergence of the trainer from the engine.",
        unit="nats per token",
        gt=0,
    )
    mismatch_above: float | None = option(
        0.1,
        "Alarm if the divergence of the trainer from the engine, for the tokens that the engine sampled, is above this "
        "value (`agreement/divergence`, k3). Stale tokens are included.",
        unit="nats per token",
        gt=0,
    )
    no_signal: bool = option(
        True, "Alarm if a step has no learning signal: the rewards within every group are identical."
    )
    unfinished_above: float | None = option(
        0.5, "Alarm if the fraction of truncated rollouts is above this value.", ge=0, lt=1
    )
    length_drift_above: float | None = option(
        None,
        "Alarm if the mean answer length, divided by the mean length in the first five steps, is above this value or "
        "below its inverse.",
        gt=1,
        examples=[3.0],
    )
    repeated_text_above: float | None = option(
        0.5,
        "Alarm if the fraction of answers that are identical to an answer to another prompt is above this value. "
        "Answers of fewer than 12 words are ignored.",
        ge=0,
        lt=1,
    )
    shared_ngrams_above: float | None = option(
        0.5,
        "Alarm if the fraction of 8-grams of words that occur in answers to at least half of the prompts is above this "
        "value.",
        ge=0,
        lt=1,
    )
    self_repetition_above: float | None = option(
        0.5,
        "Alarm if the fraction of answers in which more than half of the 4-grams of tokens are repetitions is above "
        "this value.",
        ge=0,
        lt=1,
    )
    disagreement_above: float | None = option(
        0.5,
        "Alarm if the fraction of answers that one reward component accepts and another rejects is above this value.",
        ge=0,
        lt=1,
    )

    def stops_on(self, name: str) -> bool:
        """Return whether the run stops when this alarm is raised."""
        return self.action == "stop" or name in self.stop_on
