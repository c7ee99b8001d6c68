"""Alarms: a run that goes wrong says so, or stops.

State is the number of steps in a row for each alarm; it is part of the run's state, so that a resumed run alarms at the
same step.
"""

from __future__ import annotations

from collections.abc import Mapping

from roll.config.alarms import AlarmsConfig

__all__ = ["check_alarms"]


def check_alarms(
    config: AlarmsConfig, metrics: Mapping[str, float], before: Mapping[str, int]
) -> tuple[dict[str, int], list[str]]:
    """Look at a step's metrics.

    Args:
        config: thresholds.
        metrics: of the step.
        before: steps in a row for each alarm, before this one.

    Returns:
        The same after this step, and a message for every alarm that goes off now: in the step that makes
        `config.patience` in a row, and not again before it was silent.
    """
    counts: dict[str, int] = {}
    messages = []
    for name, problem in _problems(config, metrics).items():
        counts[name] = before.get(name, 0) + 1
        if counts[name] == config.patience:
            steps = f"{config.patience} steps in a row" if config.patience > 1 else "this step"
            messages.append(f"{problem} ({steps}; alarms.{name})")
    return counts, messages


def _problems(config: AlarmsConfig, metrics: Mapping[str, float]) -> dict[str, str]:
    found: dict[str, str] = {}
    entropy = metrics.get("training/policy/entropy", metrics.get("training/policy/entropy_estimate"))
    if config.entropy_below is not None and entropy is not None and entropy < config.entropy_below:
        found["entropy_below"] = f"entropy collapsed: {entropy:.3g} nats per token, below {config.entropy_below:g}"
    kl = metrics.get("training/kl/reference", metrics.get("training/mismatch/kl"))
    if config.kl_above is not None and kl is not None and kl > config.kl_above:
        found["kl_above"] = f"divergence blew up: {kl:.3g} per token, above {config.kl_above:g}"
    trained = metrics.get("data/groups_trained", 1.0)
    if config.no_signal and trained == 0:
        found["no_signal"] = (
            f"no group has a signal: rewards are all equal (mean {metrics.get('reward/mean', 0.0):.3g}); "
            "the task is solved, too hard, or its reward is broken"
        )
    share = metrics.get("rollout/unfinished_share", 0.0)
    if config.unfinished_above is not None and share > config.unfinished_above:
        found["unfinished_above"] = (
            f"{share:.0%} of rollouts were cut off, above {config.unfinished_above:.0%}: raise rollout.max_new_tokens"
        )
    return found
