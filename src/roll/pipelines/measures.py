"""The figures of a step, from what it made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from roll.pipelines.learning.selection import Selection
from roll.pipelines.state import RunState
from roll.rollout import Batch, DataLedger, Fate, LLMProxy
from roll.types import Group, Rollout, RolloutStatus

__all__ = [
    "accuracy",
    "batch_metrics",
    "evaluation_metrics",
    "rollout_metrics",
    "run_metrics",
    "selection_metrics",
]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [r.reward.value for r in rollouts if r.reward is not None]


def accuracy(rollouts: Sequence[Rollout]) -> float:
    """Share of rollouts that solved their task; where no reward defines that, the mean reward."""
    judged = [r.reward.correct for r in rollouts if r.reward is not None and r.reward.correct is not None]
    return _mean([float(c) for c in judged]) if judged else _mean(_rewards(rollouts))


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards by domain and component, lengths, and how answers ended."""
    scored = [r for g in groups for r in g.scored]
    lengths = [len(r.token_ids) for r in scored]
    failed = sum(r.status is RolloutStatus.INFRA_ERROR for g in groups for r in g.rollouts)
    metrics = {
        "reward/mean": _mean(_rewards(scored)),
        "reward/std": float(np.std(_rewards(scored))) if scored else 0.0,
        "accuracy": accuracy(scored),
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/unfinished_share": _mean([float(not r.finished) for r in scored]),
        "rollout/infra_errors": float(failed),
        "rollout/num_tokens": float(sum(lengths)),
    }
    by_domain: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in scored:
        by_domain[rollout.prompt.domain].append(rollout)
    for domain, rollouts in sorted(by_domain.items()):
        metrics[f"reward/{domain}/mean"] = _mean(_rewards(rollouts))
        components = sorted({name for r in rollouts if r.reward for name in r.reward.components})
        for name in components:
            values = [r.reward.components[name] for r in rollouts if r.reward and name in r.reward.components]
            metrics[f"reward/{domain}/{name}"] = _mean(values)
    return metrics


def selection_metrics(selection: Selection) -> dict[str, float]:
    """How many groups were trained, and how many were not."""
    return {
        "data/groups_trained": float(selection.count(Fate.TRAINED)),
        "data/groups_filtered": float(selection.count(Fate.FILTERED)),
        "data/groups_failed": float(selection.count(Fate.FAILED)),
    }


def batch_metrics(batch: Batch) -> dict[str, float]:
    """How the batch came about: refills, ages, what was given up, and what was chosen beside what was launched."""
    choice = batch.census.metrics() if batch.census is not None else {}
    return choice | {
        "data/refills": float(batch.num_refills),
        "data/groups_expired": float(len(batch.expired)),
        "rollout/expired_length_mean": _mean(batch.expired_lengths),
        "rollout/staleness_mean": _mean(batch.staleness),
        "rollout/staleness_max": float(max(batch.staleness, default=0)),
    }


def run_metrics(state: RunState, ledger: DataLedger, proxy: LLMProxy) -> dict[str, float]:
    """Of the whole run so far."""
    metrics = {f"ledger/{fate}": float(count) for fate, count in ledger.counts().items()}
    metrics |= {f"alarm/{name}": float(count) for name, count in state.alarms.items()}
    return metrics | {
        "policy_version": float(state.policy_version),
        "engines/replaced": float(proxy.num_replaced),
        "engines/reissued": float(proxy.num_reissued),
        "engines/continued": float(proxy.num_continued),
    }


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Accuracy over all held-out answers, by domain too, and what they looked like."""
    scored = [r for g in groups for r in g.scored]
    metrics = {
        "eval/accuracy": accuracy(scored),
        "eval/reward": _mean(_rewards(scored)),
        "eval/num_answers": float(len(scored)),
        "eval/length_mean": _mean([len(r.token_ids) for r in scored]),
        "eval/unfinished_share": _mean([float(not r.finished) for r in scored]),
    }
    for domain in sorted({r.prompt.domain for r in scored}):
        metrics[f"eval/{domain}/accuracy"] = accuracy([r for r in scored if r.prompt.domain == domain])
    return metrics
