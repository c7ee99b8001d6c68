"""Your own advantage: the baseline is the group's median, which a single outlier does not change."""

from collections import defaultdict
from statistics import median

from roll.algorithms.episodes import Episode


def advantages(episodes: list[Episode]) -> list[float]:
    """Return one number per rollout: its reward minus the median reward of its prompt's rollouts."""
    rewards = defaultdict(list)
    for episode in episodes:
        rewards[episode.group].append(episode.total)
    return [episode.total - median(rewards[episode.group]) for episode in episodes]
