"""Curriculum: chooses the next environment by success rates.

An environment is sampled in proportion to its weight times 4 p (1 - p), where p is its success rate: rewards within
groups vary most if half of the episodes succeed, and do not vary if all or none succeed. An environment without
episodes has its full weight."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

from roll.config.pipelines.agentic import AgenticConfig, CurriculumConfig
from roll.pipelines.episodes.state import AgenticState
from roll.pipelines.measures import compute_score
from roll.types import Group, Rollout

__all__ = ["choose_domain", "compute_domain_probabilities", "update_success_rates"]


def compute_domain_probabilities(config: AgenticConfig, rates: Mapping[str, float]) -> dict[str, float]:
    """Compute the sampling probability of each environment from the success rates `rates`."""
    least = config.curriculum.min_share if config.curriculum else 1.0
    weights = {}
    for entry in config.environments:
        rate = rates.get(entry.domain, 0.5)
        weights[entry.domain] = entry.weight * max(least, 4 * rate * (1 - rate))
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def choose_domain(config: AgenticConfig, state: AgenticState, draw_id: int) -> str:
    """Return the environment of a draw, which depends only on the run's seed, the draw ID and the success rates."""
    found = compute_domain_probabilities(config, state.success_rates)
    digest = hashlib.blake2b(f"{config.seed}/curriculum/{draw_id}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest, "big") / 2**64
    names = list(found)
    return names[min(bisect(list(accumulate(found.values())), point), len(names) - 1)]


def update_success_rates(curriculum: CurriculumConfig, state: AgenticState, groups: Sequence[Group]) -> None:
    """Update the moving averages of success rates with a step's episodes, each with weight 1 / `num_episodes`.

    Episodes that began at an anchor are left out.
    """
    by_domain: dict[str, list[Rollout]] = {}
    for group in groups:
        if group.draw.anchor is None:
            by_domain.setdefault(group.draw.prompt.domain, []).extend(group.scored_rollouts)
    rates = dict(state.success_rates)
    for name, rollouts in by_domain.items():
        if rollouts:
            kept = (1 - 1 / curriculum.num_episodes) ** len(rollouts) if name in rates else 0.0
            rates[name] = kept * rates.get(name, 0.0) + (1 - kept) * min(max(compute_score(rollouts), 0.0), 1.0)
    state.success_rates = rates
