"""Returns and advantages over time: per token, per turn, with a critic (GAE), and by repeated states. NumPy only.

Time steps are the tokens that the policy wrote; the environment's tokens are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from roll.algorithms.episodes import Episode, Float64Array, compute_turn_rewards
from roll.algorithms.normalization import EPSILON, NormalizationScope, _compute_spread

__all__ = [
    "compute_chunk_returns",
    "compute_discounted_returns",
    "compute_gae",
    "compute_step_advantages",
    "compute_token_rewards",
    "compute_turn_returns",
    "spread_over_tokens",
]


def compute_discounted_returns(rewards: Float64Array, gamma: float) -> Float64Array:
    """Compute G_t = r_t + gamma G_{t+1}, shape [n]."""
    result = np.zeros(len(rewards))
    running = 0.0
    for index in range(len(rewards) - 1, -1, -1):
        running = rewards[index] + gamma * running
        result[index] = running
    return result


def compute_token_rewards(episode: Episode, outcome: float) -> Float64Array:
    """Return the reward of every token that the policy wrote, shape [n].

    A turn's reward is assigned to its last token, and `Episode.token_rewards` are added. The reward of a turn without a
    token is assigned to the last token before the turn or, if there is none, to the first token.
    """
    rewards = np.zeros(episode.num_tokens)
    if episode.token_rewards is not None:
        rewards += episode.token_rewards
    written = np.flatnonzero(episode.mask)
    if not len(written):
        return np.zeros(0)
    place = int(written[0])
    for (start, end), reward in zip(episode.spans, compute_turn_rewards(episode, outcome), strict=True):
        # A turn's reward is known only after its last token, so it must not be credited to a later turn.
        place = end - 1 if end > start else place
        rewards[place] += reward
    return rewards[written]


def compute_chunk_returns(episode: Episode, value: float, gamma: float) -> Float64Array:
    """Compute the return of every turn, G_k = gamma^(K-1-k) value, shape [K] (IPA, arXiv 2512.24873 eq. 7).

    `value` is the value of the whole rollout (in the paper, the final reward). For each turn, it is discounted by the
    number of turns that follow.
    """
    # IPA, arXiv 2512.24873 eq. 7: discounted per turn, not per token, so long turns are not discounted more.
    return value * gamma ** np.arange(len(episode.spans) - 1, -1, -1, dtype=np.float64)


def compute_turn_returns(episode: Episode, outcome: float, gamma: float) -> Float64Array:
    """Compute G_k = sum_{j >= k} gamma^(j-k) r_j of every turn, shape [K] (GEM, arXiv 2510.01051).

    Rewards per token are added to the reward of their turn.
    """
    return compute_discounted_returns(compute_turn_rewards(episode, outcome) + episode.token_rewards_by_turn, gamma)


def compute_gae(rewards: Float64Array, values: Float64Array, gamma: float, gae_lambda: float) -> Float64Array:
    """Compute the generalized advantage estimate, shape [n] (arXiv 1506.02438 eq. 16).

    The value after the last token is 0, also for a truncated episode, because the token limit is part of the task.
    """
    # delta_t = r_t + gamma V_{t+1} - V_t, discounted by gamma lambda: arXiv 1506.02438 eq. 16.
    following = np.append(values[1:], 0.0)
    return compute_discounted_returns(rewards + gamma * following - values, gamma * gae_lambda)


def spread_over_tokens(episode: Episode, turn_values: Float64Array) -> Float64Array:
    """Repeat each turn's value [K] for every token that the policy generated in the turn; return shape [n]."""
    return np.repeat(turn_values, [end - start for start, end in episode.spans])


def compute_step_advantages(
    episodes: Sequence[Episode], *, gamma: float, std: NormalizationScope
) -> list[Float64Array]:
    """Compute GiGPO's step advantage of every turn, shape [K] (arXiv 2505.10978 eq. 6-8).

    Turns of one group that began in the same state are compared by their discounted returns; equal states of different
    prompts are not compared. A state that occurs once has advantage 0. Rewards per token, such as a KL penalty, are
    ignored, because they depend on the policy, not on the environment.
    """
    returns = [compute_discounted_returns(compute_turn_rewards(episode, episode.reward), gamma) for episode in episodes]
    anchors: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        for k, state in enumerate(episode.states):
            if state:
                anchors[episode.group, state].append((i, k))
    result = [np.zeros(len(array)) for array in returns]
    for members in anchors.values():
        values = np.array([returns[i][k] for i, k in members])
        # A state that occurs once, or whose returns are equal, has nothing to compare: its advantage stays exactly 0.
        if len(members) < 2 or np.ptp(values) == 0:
            continue
        # GiGPO, arXiv 2505.10978 eq. 7.
        divisor = _compute_spread(values) + EPSILON if std != "none" else 1.0
        for (i, k), value in zip(members, values, strict=True):
            result[i][k] = (value - values.mean()) / divisor
    return result
