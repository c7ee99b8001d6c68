"""Alarms: warnings about problems of a run, which may also stop the run.

The run's state contains the number of consecutive steps of each alarm, so a resumed run raises alarms at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.config.alarms import AlarmsConfig

__all__ = ["Alarm", "check_alarms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """An alarm that was raised at the end of a step."""

    message: str
    stops: bool
    """True if the run ends at this step's boundary."""


def check_alarms(
    config: AlarmsConfig, metrics: Mapping[str, float], streaks: Mapping[str, int]
) -> tuple[dict[str, int], list[Alarm]]:
    """Return the alarms that a step's metrics raise.

    Args:
        config: Thresholds.
        metrics: Metrics of the step.
        streaks: For each alarm, the number of consecutive steps up to the previous step in which the condition held.

    Returns:
        The numbers of consecutive steps up to this step, and the alarms. An alarm is raised when its condition has held
        in `config.patience` consecutive steps. It is raised again only after the condition has cleared.
    """
    counts: dict[str, int] = {}
    alarms = []
    for name, problem in (*_check_training(config, metrics), *_check_answers(config, metrics)):
        counts[name] = streaks.get(name, 0) + 1
        if counts[name] == config.patience:
            steps = f"{config.patience} consecutive steps" if config.patience > 1 else "this step"
            alarms.append(Alarm(message=f"{problem} ({steps}; alarms.{name})", stops=config.stops_on(name)))
    return counts, alarms


def _check_training(config: AlarmsConfig, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the name and the message of each alarm about the update."""
    entropy = metrics.get("training/policy/entropy", metrics.get("training/policy/entropy_estimate"))
    if config.entropy_below is not None and entropy is not None and entropy < config.entropy_below:
        yield "entropy_below", f"entropy is {entropy:.3g} nats per token, below {config.entropy_below:g}"
    kl = metrics.get("training/kl/reference", metrics.get("training/mismatch/kl"))
    if config.kl_above is not None and kl is not None and kl > config.kl_above:
        yield "kl_above", f"KL divergence is {kl:.3g} nats per token, above {config.kl_above:g}"
    apart = metrics.get("agreement/divergence")
    if config.mismatch_above is not None and apart is not None and apart > config.mismatch_above:
        yield (
            "mismatch_above",
            f"the trainer's log-probs diverge from the engine's by {apart:.3g} nats per token, above "
            f"{config.mismatch_above:g}: if inference.quantization is set, set it to none; if many tokens are stale, "
            "lower rollout.scheduling.async_ratio",
        )
    trained = metrics.get("data/groups_trained", 1.0)
    if config.no_signal and trained == 0 and "reward/mean" in metrics:  # without a reward, infrastructure failed
        yield (
            "no_signal",
            "no group has a learning signal: the rewards within each group are equal (mean reward "
            f"{metrics.get('reward/mean', 0.0):.3g}); the prompts are too easy or too hard, or the reward is broken",
        )


_FRACTION_MESSAGES = {
    "unfinished_above": (
        "rollout/unfinished_share",
        "{share:.0%} of rollouts were truncated, above {limit:.0%}: raise rollout.max_new_tokens; a truncated answer "
        "scores 0 unless the reward sets require_finished=false",
    ),
    "repeated_text_above": (
        "hacking/repeated_text_share",
        "{share:.0%} of longer answers are identical to an answer to another prompt, above {limit:.0%}: check whether "
        "the reward accepts text that does not answer the prompt",
    ),
    "shared_ngrams_above": (
        "hacking/shared_ngram_share",
        "{share:.0%} of the 8-grams of answers occur in the answers to half of the prompts, above {limit:.0%}: check "
        "whether the reward favors certain phrases",
    ),
    "self_repetition_above": (
        "hacking/self_repetition_share",
        "{share:.0%} of answers consist mostly of repetitions, above {limit:.0%}: inspect the rollouts, or add the "
        "reward 'repetition'",
    ),
    "disagreement_above": (
        "hacking/disagreement_share",
        "{share:.0%} of answers are correct for one reward component and wrong for another, above {limit:.0%}: the "
        "policy may exploit one of them",
    ),
}


def _check_answers(config: AlarmsConfig, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the name and the message of each alarm about the policy's answers, including reward hacking."""
    for name, (metric, words) in _FRACTION_MESSAGES.items():
        limit, share = getattr(config, name), metrics.get(metric, 0.0)
        if limit is not None and share > limit:
            yield name, words.format(share=share, limit=limit)
    most, ratio = config.length_drift_above, metrics.get("hacking/length_ratio")
    if most is not None and ratio is not None and not 1 / most <= ratio <= most:
        direction = "longer" if ratio > 1 else "shorter"
        yield (
            "length_drift_above",
            f"answers are {max(ratio, 1 / max(ratio, 1e-9)):.1f} times {direction} than in the first steps, more than "
            f"{most:g}: check whether the reward depends on length",
        )
