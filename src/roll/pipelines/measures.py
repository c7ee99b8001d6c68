"""Metrics of a step's rollouts and batches, and of evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from roll.pipelines.learning.failures import count_failures
from roll.pipelines.state import RunState
from roll.rollout import Batch, DataLedger
from roll.tracking.intervals import compute_accuracy_metrics
from roll.types import DrawOutcome, Group, Rollout

__all__ = [
    "compute_batch_metrics",
    "compute_engine_metrics",
    "compute_evaluation_metrics",
    "compute_group_metrics",
    "compute_rollout_metrics",
    "compute_run_metrics",
    "compute_score",
]


def _compute_mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _collect_rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [r.reward.value for r in rollouts if r.reward is not None]


def _collect_correctness(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(r.reward.correct) for r in rollouts if r.reward is not None and r.reward.correct is not None]


def _compute_accuracy(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Return accuracy metrics: the fraction and number of solved rollouts, with a confidence interval for few rollouts.

    Only rollouts whose reward decides correctness are included. The result is empty if there are no such rollouts.
    """
    correctness = _collect_correctness(rollouts)
    return compute_accuracy_metrics(prefix, _compute_mean(correctness), len(correctness)) if correctness else {}


def compute_score(rollouts: Sequence[Rollout]) -> float:
    """Return the mean score of the rewarded rollouts; 0 if there are none.

    A rollout scores 1 if it is correct and 0 if it is not; if the reward does not decide correctness, the score is the
    reward's value. The mean is therefore the accuracy if every reward decides correctness, and the mean reward if no
    reward does. Every rollout has the same weight, so a source with more rollouts has a larger weight.
    """
    found = [r.reward for r in rollouts if r.reward is not None]
    return _compute_mean([r.value if r.correct is None else float(r.correct) for r in found])


def compute_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute rewards by domain and component, lengths, finish reasons, and infrastructure failures.

    If no answer got a reward, the mean reward is left out, because 0 would look like a measured value.
    """
    scored = [r for g in groups for r in g.scored_rollouts]
    lengths = [len(r.token_ids) for r in scored]
    rewards = (
        {"reward/mean": _compute_mean(_collect_rewards(scored)), "reward/std": float(np.std(_collect_rewards(scored)))}
        if scored
        else {}
    )
    metrics = (
        rewards
        | _compute_accuracy(scored, "")
        | {
            "rollout/length_mean": _compute_mean(lengths),
            "rollout/length_max": float(max(lengths, default=0)),
            "rollout/unfinished_share": _compute_mean([float(not r.is_finished) for r in scored]),
            "rollout/num_tokens": float(sum(lengths)),
        }
    )
    metrics |= count_failures(groups).collect_metrics()
    for name in sorted({name for r in scored for name in r.counts}):
        metrics[f"rollout/{name}"] = float(sum(r.counts.get(name, 0) for r in scored))
    by_domain: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in scored:
        by_domain[rollout.prompt.domain].append(rollout)
    metrics |= _compute_episode_metrics(by_domain)
    for domain, rollouts in sorted(by_domain.items()):
        metrics[f"reward/{domain}/mean"] = _compute_mean(_collect_rewards(rollouts))
        metrics |= {f"reward/{domain}/{name}": value for name, value in _average_components(rollouts).items()}
    return metrics


def _average_components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every reward component over the scored rollouts, by name of the component."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward.components.items() if rollout.reward else ():
            values[name].append(value)
    return {name: _compute_mean(values[name]) for name in sorted(values)}


def _compute_episode_metrics(by_domain: Mapping[str, Sequence[Rollout]]) -> dict[str, float]:
    """Compute success rate, length and truncation rate of each environment's episodes.

    Episodes that began at an anchor are left out.
    """
    metrics: dict[str, float] = {}
    for domain, everyone in sorted(by_domain.items()):
        rollouts = [rollout for rollout in everyone if not rollout.replayed]
        if not rollouts or rollouts[0].prompt.environment is None:
            continue
        metrics |= _compute_accuracy(rollouts, f"env/{domain}/") | {
            f"env/{domain}/num_episodes": float(len(rollouts)),
            f"env/{domain}/turns_mean": _compute_mean([len(r.spans) for r in rollouts]),
            f"env/{domain}/unfinished_share": _compute_mean([float(not r.is_finished) for r in rollouts]),
        }
    return metrics


def compute_group_metrics(draw_outcomes: Mapping[int, tuple[DrawOutcome, str]]) -> dict[str, float]:
    """Return the numbers of trained, filtered and failed groups as metrics."""
    found = [outcome for outcome, _ in draw_outcomes.values()]
    return {
        f"data/groups_{outcome}": float(found.count(outcome))
        for outcome in (DrawOutcome.TRAINED, DrawOutcome.FILTERED, DrawOutcome.FAILED)
    }


def compute_batch_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of the batch: refills, staleness, expired groups, and selection bias."""
    choice = batch.selection_bias.compute_metrics() if batch.selection_bias is not None else {}
    return choice | {
        "data/refills": float(batch.num_refills),
        "data/groups_expired": float(len(batch.expired)),
        "rollout/expired_length_mean": _compute_mean(batch.expired_lengths),
        "rollout/staleness_mean": _compute_mean(batch.staleness),
        "rollout/staleness_max": float(max(batch.staleness, default=0)),
    }


def compute_run_metrics(state: RunState, ledger: DataLedger, counts: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of the whole run so far, including the counters of `LLMProxy.get_counters`."""
    metrics = {f"ledger/{outcome}": float(count) for outcome, count in ledger.count_outcomes().items()}
    metrics |= {f"alarm/{name}": float(count) for name, count in state.alarms.items()}
    return metrics | {"policy_version": float(state.policy_version)} | compute_engine_metrics(counts)


def compute_engine_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts of engine replacements and reissued requests in the whole run so far."""
    return {f"engines/{name}": float(count) for name, count in counts.items()}


def compute_evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute score, accuracy, reward and length over all held-out answers, and by domain and component.

    If no answer was scored, score, accuracy and reward are left out, because 0 would look like a measured value.
    """
    scored = [r for g in groups for r in g.scored_rollouts]
    failures = count_failures(groups)
    metrics = {"eval/num_answers": float(len(scored)), "eval/infra_errors": float(failures.failed)}
    if not scored:
        return metrics
    metrics |= _compute_accuracy(scored, "eval/") | {
        "eval/score": compute_score(scored),
        "eval/verified_share": len(_collect_correctness(scored)) / len(scored),
        "eval/reward": _compute_mean(_collect_rewards(scored)),
        "eval/timeouts": float(failures.timed_out),
        "eval/length_mean": _compute_mean([len(r.token_ids) for r in scored]),
        "eval/unfinished_share": _compute_mean([float(not r.is_finished) for r in scored]),
    }
    for domain in sorted({r.prompt.domain for r in scored}):
        own = [r for r in scored if r.prompt.domain == domain]
        metrics |= _compute_accuracy(own, f"eval/{domain}/")
        metrics |= {
            f"eval/{domain}/reward": _compute_mean(_collect_rewards(own)),
            f"eval/{domain}/num_answers": float(len(own)),
        }
        parts = _average_components(own)
        if len(parts) > 1:
            metrics |= {f"eval/{domain}/reward/{name}": value for name, value in parts.items()}
    return metrics
