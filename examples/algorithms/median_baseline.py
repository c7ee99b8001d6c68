"""An advantage of your own: the group's median as the baseline, which one lucky rollout does not move."""

from collections import defaultdict
from statistics import median

from roll.algorithms.episodes import Episode


def advantages(episodes: list[Episode]) -> list[float]:
    """Reward minus the median reward of the same prompt's rollouts; one number per rollout."""
    rewards = defaultdict(list)
    for episode in episodes:
        rewards[episode.group].append(episode.total)
    return [episode.total - median(rewards[episode.group]) for episode in episodes]
