"""Metrics of a step's rollouts and batches, and of evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from roll.pipelines.learning.failures import count_failures
from roll.pipelines.state import RunState
from roll.rollout import Batch, DataLedger
from roll.tracking.intervals import accuracy_figures
from roll.types import Fate, Group, Rollout

__all__ = [
    "batch_metrics",
    "engine_metrics",
    "evaluation_metrics",
    "fate_metrics",
    "rollout_metrics",
    "run_metrics",
    "score",
]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [r.reward.value for r in rollouts if r.reward is not None]


def _verdicts(rollouts: Sequence[Rollout]) -> list[float]:
    return [float(r.reward.correct) for r in rollouts if r.reward is not None and r.reward.correct is not None]


def _accuracy(rollouts: Sequence[Rollout], prefix: str) -> dict[str, float]:
    """Return the share of solved rollouts among those whose reward decides it, with their number and, if they are few,
    the confidence interval; empty if no reward decides it."""
    found = _verdicts(rollouts)
    return accuracy_figures(prefix, _mean(found), len(found)) if found else {}


def score(rollouts: Sequence[Rollout]) -> float:
    """Return the mean over rollouts of 1 for a solved task and 0 for a failed one, or of the reward if that is
    undecided.

    It is the accuracy if every reward decides correctness, and the mean reward if none does. Every answer counts
    equally, hence every source by its number of answers.
    """
    found = [r.reward for r in rollouts if r.reward is not None]
    return _mean([r.value if r.correct is None else float(r.correct) for r in found])


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute rewards by domain and component, lengths, finish reasons, and infrastructure failures.

    If no answer got a reward, the mean is absent, since 0 would look like a result.
    """
    scored = [r for g in groups for r in g.scored]
    lengths = [len(r.token_ids) for r in scored]
    rewards = {"reward/mean": _mean(_rewards(scored)), "reward/std": float(np.std(_rewards(scored)))} if scored else {}
    metrics = (
        rewards
        | _accuracy(scored, "")
        | {
            "rollout/length_mean": _mean(lengths),
            "rollout/length_max": float(max(lengths, default=0)),
            "rollout/unfinished_share": _mean([float(not r.finished) for r in scored]),
            "rollout/num_tokens": float(sum(lengths)),
        }
    )
    metrics |= count_failures(groups).metrics()
    for name in sorted({name for r in scored for name in r.counts}):
        metrics[f"rollout/{name}"] = float(sum(r.counts.get(name, 0) for r in scored))
    by_domain: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in scored:
        by_domain[rollout.prompt.domain].append(rollout)
    metrics |= _episode_metrics(by_domain)
    for domain, rollouts in sorted(by_domain.items()):
        metrics[f"reward/{domain}/mean"] = _mean(_rewards(rollouts))
        metrics |= {f"reward/{domain}/{name}": value for name, value in _components(rollouts).items()}
    return metrics


def _components(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every component of the reward, by name."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward.components.items() if rollout.reward else ():
            values[name].append(value)
    return {name: _mean(values[name]) for name in sorted(values)}


def _episode_metrics(by_domain: Mapping[str, Sequence[Rollout]]) -> dict[str, float]:
    """Compute success, length and unfinished share of each environment's episodes.

    Episodes that began at an anchor are left out.
    """
    metrics: dict[str, float] = {}
    for domain, everyone in sorted(by_domain.items()):
        rollouts = [rollout for rollout in everyone if not rollout.replayed]
        if not rollouts or rollouts[0].prompt.environment is None:
            continue
        metrics |= _accuracy(rollouts, f"env/{domain}/") | {
            f"env/{domain}/num_episodes": float(len(rollouts)),
            f"env/{domain}/turns_mean": _mean([len(r.spans) for r in rollouts]),
            f"env/{domain}/unfinished_share": _mean([float(not r.finished) for r in rollouts]),
        }
    return metrics


def fate_metrics(fates: Mapping[int, tuple[Fate, str]]) -> dict[str, float]:
    """Return the number of groups that were trained, filtered and failed."""
    found = [fate for fate, _ in fates.values()]
    return {f"data/groups_{fate}": float(found.count(fate)) for fate in (Fate.TRAINED, Fate.FILTERED, Fate.FAILED)}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return how the batch was assembled: refills, staleness, expired groups, and the bias of chosen rollouts."""
    choice = batch.census.metrics() if batch.census is not None else {}
    return choice | {
        "data/refills": float(batch.num_refills),
        "data/groups_expired": float(len(batch.expired)),
        "rollout/expired_length_mean": _mean(batch.expired_lengths),
        "rollout/staleness_mean": _mean(batch.staleness),
        "rollout/staleness_max": float(max(batch.staleness, default=0)),
    }


def run_metrics(state: RunState, ledger: DataLedger, counts: Mapping[str, int]) -> dict[str, float]:
    """Return the metrics of the whole run so far, including `LLMProxy.counts`."""
    metrics = {f"ledger/{fate}": float(count) for fate, count in ledger.counts().items()}
    metrics |= {f"alarm/{name}": float(count) for name, count in state.alarms.items()}
    return metrics | {"policy_version": float(state.policy_version)} | engine_metrics(counts)


def engine_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts of engine replacements and reissued requests in the whole run so far."""
    return {f"engines/{name}": float(count) for name, count in counts.items()}


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute score, accuracy and reward over all held-out answers and by domain and component, and their lengths.

    If no answer was scored, score, accuracy and reward are absent, since 0 would look like a result.
    """
    scored = [r for g in groups for r in g.scored]
    failures = count_failures(groups)
    metrics = {"eval/num_answers": float(len(scored)), "eval/infra_errors": float(failures.failed)}
    if not scored:
        return metrics
    metrics |= _accuracy(scored, "eval/") | {
        "eval/score": score(scored),
        "eval/verified_share": len(_verdicts(scored)) / len(scored),
        "eval/reward": _mean(_rewards(scored)),
        "eval/timeouts": float(failures.timed_out),
        "eval/length_mean": _mean([len(r.token_ids) for r in scored]),
        "eval/unfinished_share": _mean([float(not r.finished) for r in scored]),
    }
    for domain in sorted({r.prompt.domain for r in scored}):
        own = [r for r in scored if r.prompt.domain == domain]
        metrics |= _accuracy(own, f"eval/{domain}/")
        metrics |= {f"eval/{domain}/reward": _mean(_rewards(own)), f"eval/{domain}/num_answers": float(len(own))}
        parts = _components(own)
        if len(parts) > 1:
            metrics |= {f"eval/{domain}/reward/{name}": value for name, value in parts.items()}
    return metrics
