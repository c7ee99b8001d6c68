"""The losses as the papers write them: plain loops over plain floats, one token after the other.

Nothing of `roll.algorithms` is used but the log-ratio clamp, which is part of every formula. A loss is a function of
two copies of the current log-probs: `new`, which moves, and `held`, which stop-gradient factors are made of. Its
derivative in `new` alone is the gradient; `gradient` takes it by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from roll.algorithms.kl import LOG_RATIO_LIMIT

Objective = Callable[[float, float, float, float], float]
"""(ratio, the same held, log pi, advantage) of a token -> what is maximised."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A sequence's loss tokens, in order."""

    new: list[float]
    held: list[float]
    old: list[float]
    rollout: list[float]
    advantages: list[float]
    chunks: list[int]
    ref: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    gets_bonus: list[bool] = field(default_factory=list)
    full_kl: list[float] = field(default_factory=list)
    behavior: list[float] = field(default_factory=list)
    expert: bool = False


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Engine against trainer."""

    level: str = "token"
    upper: float | None = 2.0
    low: float | None = None
    high: float | None = None
    veto: float | None = None
    corrects: str = "both"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A method's loss by name of its pieces."""

    objective: Objective
    ratio: str = "token"
    reduce: str = "geometric"
    against: str = "old"
    max_token_log_ratio: float | None = None
    over: str = "answers"
    """`answers`: mean over each answer's tokens, then over answers. `tokens`: over all tokens. `longest`: sum over
    tokens by the longest possible answer, then mean over answers. `sums`: sum over tokens, mean over answers."""
    correction: Correction = Correction()
    kl: str = "k3"
    beta: float = 0.0
    eta: float = 0.0


def clamp(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def limited(log_ratio: float) -> float:
    return clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# Objectives: r ratio, s the same held, p log pi, a advantage.


def ppo(low: float, high: float) -> Objective:
    return lambda r, s, p, a: min(r * a, clamp(r, 1 - low, 1 + high) * a)


def dual_clip(low: float, high: float, bound: float) -> Objective:
    def objective(r: float, s: float, p: float, a: float) -> float:
        inner = min(r * a, clamp(r, 1 - low, 1 + high) * a)
        return max(inner, bound * a) if a < 0 else inner

    return objective


def weighted_log_prob(lower: float, upper: float, mask: bool = False) -> Objective:
    def objective(r: float, s: float, p: float, a: float) -> float:
        if mask and ((a > 0 and s > upper) or (a < 0 and s < lower)):
            return 0.0
        return clamp(s, lower, upper) * a * p

    return objective


def by_sign(positive: float, negative: float, lower: float, upper: float) -> Objective:
    return lambda r, s, p, a: positive * a * p if a > 0 else negative * clamp(s, lower, upper) * a * p


def ratio_alone(r: float, s: float, p: float, a: float) -> float:
    return r * a


def log_prob(r: float, s: float, p: float, a: float) -> float:
    return a * p


def squared_penalty(tau: float) -> Objective:
    return lambda r, s, p, a: a * p - tau / 2 * math.log(r) ** 2


def soft(tau_positive: float, tau_negative: float) -> Objective:
    def objective(r: float, s: float, p: float, a: float) -> float:
        tau = tau_positive if a > 0 else tau_negative
        z = tau * (r - 1)
        sigmoid = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
        return 4 / tau * sigmoid * a

    return objective


def log_ratio(answer: Answer, t: int, loss: Loss, new: list[float]) -> float:
    """Of token t at the loss's level, made of `new`."""
    base = getattr(answer, loss.against)
    if loss.ratio == "token":
        return limited(new[t] - base[t])
    total, count = 0.0, 0
    for u in range(len(new)):
        if loss.ratio == "chunk" and answer.chunks[u] != answer.chunks[t]:
            continue
        difference = new[u] - base[u]
        if loss.max_token_log_ratio is not None and answer.advantages[u] > 0:
            difference = min(difference, loss.max_token_log_ratio)
        if loss.max_token_log_ratio is not None and answer.advantages[u] < 0:
            difference = max(difference, -loss.max_token_log_ratio)
        total += limited(difference)
        count += 1
    return limited(total / count if loss.reduce == "geometric" else total)


def token_ratio(answer: Answer, t: int, loss: Loss) -> tuple[float, float]:
    """The ratio, and the same held."""
    held = math.exp(log_ratio(answer, t, loss, answer.held))
    if loss.ratio == "sequence_token":  # s_t = sg(s) pi_t / sg(pi_t), within the token's clamp
        base = getattr(answer, loss.against)
        moved = limited(answer.new[t] - base[t]) - limited(answer.held[t] - base[t])
        return held * math.exp(moved), held
    return math.exp(log_ratio(answer, t, loss, answer.new)), held


def correction_factor(answer: Answer, t: int, level: str, corrects: str = "both") -> float:
    def difference(u: int) -> float:
        if corrects == "mismatch":  # engine against trainer, both at the version that sampled
            return limited(answer.behavior[u] - answer.rollout[u])
        if corrects == "staleness":
            return limited(answer.old[u] - answer.behavior[u])
        return limited(answer.old[u] - answer.rollout[u])

    if level == "token":
        return math.exp(difference(t))
    total, count = 0.0, 0
    for u in range(len(answer.old)):
        if level == "chunk" and answer.chunks[u] != answer.chunks[t]:
            continue
        total += difference(u)
        count += 1
    return math.exp(limited(total if level == "sequence" else total / count))


def correction_weight(answer: Answer, t: int, correction: Correction) -> float:
    factor = correction_factor(answer, t, correction.level, correction.corrects)
    if correction.low is not None and factor < correction.low:
        return 0.0
    if correction.high is not None and factor > correction.high:
        return 0.0
    if correction.veto is not None:
        for u in range(len(answer.old)):
            if correction_factor(answer, u, "token", correction.corrects) < correction.veto:
                return 0.0
    return 1.0 if correction.upper is None else min(factor, correction.upper)


def kl_estimate(p: float, q: float, estimator: str) -> float:
    """KL(policy || reference) at one token: p policy's, q the reference's log-prob."""
    if estimator == "k1":
        return p - q
    if estimator == "k2":
        return (p - q) ** 2 / 2
    if estimator == "absolute":
        return abs(p - q)
    log_ratio = limited(q - p)
    return math.exp(log_ratio) - 1 - log_ratio


def token_weight(answer: Answer, answers: list[Answer], over: str, longest: int) -> float:
    tokens, sequences = 0, 0
    for other in answers:
        tokens += len(other.new)
        sequences += 1 if other.new else 0
    if over == "answers":
        return 1 / len(answer.new) / sequences
    if over == "tokens":
        return 1 / tokens
    return 1 / longest / sequences if over == "longest" else 1 / sequences


def total_loss(answers: list[Answer], loss: Loss, longest: int) -> float:
    """Of a batch of answers."""
    result = 0.0
    for answer in answers:
        for t in range(len(answer.new)):
            if answer.expert:
                gain = answer.advantages[t] * answer.new[t]
            else:
                r, s = token_ratio(answer, t, loss)
                gain = loss.objective(r, s, answer.new[t], answer.advantages[t])
                gain *= correction_weight(answer, t, loss.correction)
            full = loss.kl == "full"
            if loss.beta and (full or not answer.expert):
                gain -= loss.beta * (answer.full_kl[t] if full else kl_estimate(answer.new[t], answer.ref[t], loss.kl))
            if loss.eta and (not answer.gets_bonus or answer.gets_bonus[t]):
                gain += loss.eta * answer.entropy[t]
            result -= token_weight(answer, answers, loss.over, longest) * gain
    return result


def gradient(answers: list[Answer], loss: Loss, longest: int, step: float = 1e-6) -> list[float]:
    """Of the loss in every token's log-prob, by central differences; stop-gradient factors stay as they are."""
    result = []
    for i, answer in enumerate(answers):
        for t in range(len(answer.new)):
            moved = []
            for sign in (1, -1):
                new = list(answer.new)
                new[t] += sign * step
                changed = [*answers[:i], replace(answer, new=new), *answers[i + 1 :]]
                moved.append(total_loss(changed, loss, longest))
            result.append((moved[0] - moved[1]) / (2 * step))
    return result


def value_loss(values: list[float], old: list[float], returns: list[float], clip: float | None) -> float:
    """The critic's, over all tokens of the batch."""
    total = 0.0
    for value, before, target in zip(values, old, returns, strict=True):
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (clamp(value, before - clip, before + clip) - target) ** 2)
        total += error / 2
    return total / len(values)
