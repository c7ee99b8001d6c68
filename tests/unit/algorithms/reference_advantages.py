"""Rewards to advantages as the papers write them: plain loops over plain floats, rollout by rollout.

Nothing of `roll` is used but two constants that are part of the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll.algorithms.normalization import EPSILON

WHITENING_EPSILON = 1e-8
"""Added to the variance."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy wrote at once: tokens start … end - 1."""

    start: int
    end: int
    reward: float = 0.0
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A scored rollout; lists are by token, the environment's included."""

    group: int
    index: int
    reward: float
    length: int
    turns: list[Turn]
    domain: str = "d"
    correct: bool | None = None
    finished: bool = True
    verdict: str = ""
    greedy: float = 0.0
    expert: bool = False
    new: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    """By critic."""
    token_rewards: list[float] = field(default_factory=list)
    waad: list[float] = field(default_factory=list)
    fai: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.group}.{self.index}"

    @property
    def written(self) -> list[int]:
        """Places of the policy's own tokens."""
        return [t for turn in self.turns for t in range(turn.start, turn.end)]

    @property
    def total(self) -> float:
        total = self.reward
        for turn in self.turns:
            total += turn.reward
        return total

    @property
    def turn_rewards(self) -> list[float]:
        """With the reward of the whole on the last one."""
        return self.rewards_with(self.reward)

    def rewards_with(self, outcome: float) -> list[float]:
        rewards = [turn.reward for turn in self.turns]
        rewards[-1] += outcome
        return rewards


ByName = dict[str, float]
ByToken = dict[str, list[float]]
"""For every attempt, a value for each of its `written` tokens."""


def mean(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def deviation(values: Sequence[float], unbiased: bool = True) -> float:
    centre, total = mean(values), 0.0
    for value in values:
        total += (value - centre) ** 2
    return math.sqrt(total / (len(values) - (1 if unbiased else 0)))


def all_equal(values: Sequence[float]) -> bool:
    return all(value == values[0] for value in values)


def group_of(attempt: Attempt, attempts: list[Attempt]) -> list[Attempt]:
    return [other for other in attempts if other.group == attempt.group]


def domain_of(attempt: Attempt, attempts: list[Attempt]) -> list[Attempt]:
    return [other for other in attempts if other.domain == attempt.domain]


def minus_mean(value: float, others: Sequence[float]) -> float:
    """Exactly 0 where all are equal, which rounding would not give."""
    return value - others[0] if all_equal(others) else value - mean(others)


def over_std(value: float, others: Sequence[float]) -> float:
    """Without spread nothing is divided."""
    return value if len(others) < 2 or all_equal(others) else value / (deviation(others) + EPSILON)


Reward = Callable[[Attempt], float]


def total_of(attempt: Attempt) -> float:
    return attempt.total


def reward_of(attempt: Attempt) -> float:
    return attempt.reward


def raw(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    return {a.name: reward(a) for a in attempts}


def group_centred(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    return {a.name: minus_mean(reward(a), [reward(b) for b in group_of(a, attempts)]) for a in attempts}


def group_scored(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    centred = group_centred(attempts, reward)
    return {a.name: over_std(centred[a.name], [reward(b) for b in group_of(a, attempts)]) for a in attempts}


def group_centred_over_batch_std(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    centred = group_centred(attempts, reward)
    return {a.name: over_std(centred[a.name], [reward(b) for b in domain_of(a, attempts)]) for a in attempts}


def batch_centred(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    return {a.name: minus_mean(reward(a), [reward(b) for b in domain_of(a, attempts)]) for a in attempts}


def leave_one_out(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    result = {}
    for a in attempts:
        others = [reward(b) for b in group_of(a, attempts) if b.index != a.index]
        result[a.name] = reward(a) - mean(others) if others and not all_equal([reward(a), *others]) else 0.0
    return result


def length_weighted(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    result = {}
    for a in attempts:
        top, bottom = 0.0, 0.0
        group = group_of(a, attempts)
        for b in group:
            top += len(b.written) * reward(b)
            bottom += len(b.written)
        equal = all_equal([reward(b) for b in group])
        result[a.name] = 0.0 if equal else reward(a) - (top / bottom if bottom else 0.0)
    return result


def against_greedy(attempts: list[Attempt], reward: Reward = total_of) -> ByName:
    return {a.name: reward(a) - a.greedy for a in attempts}


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """sum_{j >= k} gamma^(j-k) r_j, straight from the sum."""
    result = []
    for k in range(len(rewards)):
        total = 0.0
        for j in range(k, len(rewards)):
            total += gamma ** (j - k) * rewards[j]
        result.append(total)
    return result


def later_token_rewards(attempt: Attempt, gamma: float = 1.0) -> list[float]:
    """What rewards per token (a KL penalty) come to from each written token on."""
    own = [attempt.token_rewards[t] if attempt.token_rewards else 0.0 for t in attempt.written]
    return discounted(own, gamma)


def same_for_all_tokens(values: ByName, attempts: list[Attempt]) -> ByToken:
    return {a.name: [values[a.name] + later for later in later_token_rewards(a)] for a in attempts}


def token_rewards(attempt: Attempt, outcome: float) -> list[float]:
    """Of the written tokens: a turn's reward is on its last token."""
    place = {t: n for n, t in enumerate(attempt.written)}
    rewards = [attempt.token_rewards[t] if attempt.token_rewards else 0.0 for t in attempt.written]
    at = 0
    for turn, reward in zip(attempt.turns, attempt.rewards_with(outcome), strict=True):
        if turn.end > turn.start:
            at = place[turn.end - 1]
        if rewards:
            rewards[at] += reward
    return rewards


def token_returns(outcomes: ByName, attempts: list[Attempt], gamma: float) -> ByToken:
    return {a.name: discounted(token_rewards(a, outcomes[a.name]), gamma) for a in attempts}


def gae(outcomes: ByName, attempts: list[Attempt], gamma: float, lam: float) -> tuple[ByToken, ByToken]:
    """Advantages, and returns for the critic."""
    advantages, returns = {}, {}
    for a in attempts:
        rewards = token_rewards(a, outcomes[a.name])
        values = [mean([critic[t] for critic in a.values]) for t in a.written]
        deltas = []
        for t in range(len(values)):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            deltas.append(rewards[t] + gamma * following - values[t])
        advantages[a.name] = discounted(deltas, gamma * lam)
        returns[a.name] = [x + v for x, v in zip(advantages[a.name], values, strict=True)]
    return advantages, returns


def turn_returns(outcomes: ByName, attempts: list[Attempt], gamma: float) -> dict[str, list[float]]:
    """Of the rewards of turns, their tokens' rewards included."""
    result = {}
    for a in attempts:
        rewards = a.rewards_with(outcomes[a.name])
        for k, turn in enumerate(a.turns):
            for t in range(turn.start, turn.end):
                rewards[k] += a.token_rewards[t] if a.token_rewards else 0.0
        result[a.name] = discounted(rewards, gamma)
    return result


def spread_over_tokens(by_turn: dict[str, list[float]], attempts: list[Attempt], later: bool = True) -> ByToken:
    """A turn's value at each of its tokens, `later` with the rewards of the tokens from there on."""
    result = {}
    for a in attempts:
        values = []
        for turn, value in zip(a.turns, by_turn[a.name], strict=True):
            for _ in range(turn.start, turn.end):
                values.append(value)
        following = later_token_rewards(a) if later else [0.0] * len(values)
        result[a.name] = [v + more for v, more in zip(values, following, strict=True)]
    return result


def anchor_state(attempts: list[Attempt], gamma: float, divide: bool = True) -> dict[str, list[float]]:
    """GiGPO's step advantages by turn, of the environment's rewards alone; `attempts` are all that were scored."""
    returns = {a.name: discounted(a.turn_rewards, gamma) for a in attempts}
    result = {a.name: [0.0] * len(a.turns) for a in attempts}
    for a in attempts:
        for k, turn in enumerate(a.turns):
            met = []
            for b in group_of(a, attempts):
                for j, other in enumerate(b.turns):
                    if turn.state and other.state == turn.state:
                        met.append(returns[b.name][j])
            if len(met) > 1 and not all_equal(met):
                above = returns[a.name][k] - mean(met)
                result[a.name][k] = above / (deviation(met) + EPSILON) if divide else above
    return result


def whitened(values: ByToken) -> ByToken:
    """Over every entry of every attempt."""
    together = [value for array in values.values() for value in array]
    if len(together) < 2:
        return {name: list(array) for name, array in values.items()}
    if all_equal(together):
        return {name: [0.0] * len(array) for name, array in values.items()}
    centre = mean(together)
    spread = math.sqrt(deviation(together, unbiased=False) ** 2 + WHITENING_EPSILON)
    return {name: [(value - centre) / spread for value in array] for name, array in values.items()}


def critic_deviations(attempts: list[Attempt]) -> ByToken:
    return {
        a.name: [deviation([critic[t] for critic in a.values], unbiased=False) for t in a.written] for a in attempts
    }


def lowest(values: ByToken, share: float) -> dict[str, list[bool]]:
    """Which entries lie below the one at place floor(share x n)."""
    together = sorted(value for array in values.values() for value in array)
    if not together:
        return {name: [] for name in values}
    threshold = together[int(share * len(together))]
    return {name: [value < threshold for value in array] for name, array in values.items()}


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """DAPO's punishment, as its three cases."""
    if buffer == 0 or length <= longest - buffer:
        return 0.0
    if length <= longest:
        return (length - (longest - buffer)) / buffer
    return 1.0
