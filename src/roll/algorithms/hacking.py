"""Metrics that indicate reward hacking: a policy that obtains rewards without solving the task.

Each metric is computed from one step's answers; `alarms` reports when one is too high. None of them proves hacking;
they indicate which answers to inspect.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from roll.types import Group, Rollout

__all__ = [
    "BASELINE_STEPS",
    "compute_hacking_metrics",
    "compute_repeated_text_fraction",
    "compute_shared_ngram_fraction",
]

BASELINE_STEPS = 5
"""Number of first steps of a run whose mean answer length is the baseline of later steps."""
MIN_WORDS = 12
"""Minimum number of words of a compared answer: shorter answers may legitimately be identical (`The answer is 7.`)."""
WORD_NGRAM_SIZE, TOKEN_NGRAM_SIZE = 8, 4
"""Number of words or tokens of an n-gram."""
MAX_WORDS, MAX_CHARACTERS = 500, 8_000
"""Number of words and characters of each answer that are examined, from its beginning."""
MAX_TOKENS = 4_096
"""Number of tokens of each answer that are examined, from its end, where endless repetitions occur."""
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def compute_hacking_metrics(groups: Sequence[Group], baseline_lengths: Sequence[float]) -> dict[str, float]:
    """Compute the reward-hacking metrics of a step's answers; this takes about 0.4 ms per answer of any length.

    Args:
        groups: All generated groups.
        baseline_lengths: Mean answer length of each of the run's first steps, up to `BASELINE_STEPS` of them.
    """
    scored = [rollout for group in groups for rollout in group.scored_rollouts]
    if not scored:
        return {}
    words = [(rollout.prompt.uid, rollout.text[:MAX_CHARACTERS].casefold().split()[:MAX_WORDS]) for rollout in scored]
    lengths = [float(len(rollout.token_ids)) for rollout in scored]
    metrics = {
        "hacking/repeated_text_share": compute_repeated_text_fraction(words),
        "hacking/shared_ngram_share": compute_shared_ngram_fraction(words),
        "hacking/self_repetition_share": _compute_mean(_has_repetition(rollout) for rollout in scored),
        "hacking/length_reward_correlation": _compute_correlation(
            lengths, [_get_reward_value(rollout) for rollout in scored]
        ),
    }
    decided = [set(r.reward.decisions.values()) for r in scored if r.reward and len(r.reward.decisions) > 1]
    if decided:
        metrics["hacking/disagreement_share"] = _compute_mean(len(verdicts) > 1 for verdicts in decided)
    if len(baseline_lengths) >= BASELINE_STEPS:
        metrics["hacking/length_ratio"] = statistics.fmean(lengths) / max(statistics.fmean(baseline_lengths), 1e-9)
    return metrics


def _get_reward_value(rollout: Rollout) -> float:
    return rollout.reward.value if rollout.reward is not None else 0.0


def _compute_mean(values: Iterable[float]) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else 0.0


def compute_repeated_text_fraction(answers: Sequence[tuple[str, list[str]]]) -> float:
    """Return the fraction of answers that are repeated, word for word, as an answer to another prompt.

    Answers of fewer than `MIN_WORDS` words are excluded; the result is 0 if no answer is left.

    Args:
        answers: The prompt's UID and the words of each answer.
    """
    long = [(uid, tuple(words)) for uid, words in answers if len(words) >= MIN_WORDS]
    prompts: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for uid, words in long:
        prompts[words].add(uid)
    return _compute_mean(len(prompts[words]) > 1 for _, words in long)


def compute_shared_ngram_fraction(answers: Sequence[tuple[str, list[str]]]) -> float:
    """Return the fraction of word n-grams that occur in answers to at least half of the prompts and to at least two.

    Args:
        answers: The prompt's UID and the words of each answer.
    """
    prompts = {uid: number for number, uid in enumerate(dict.fromkeys(uid for uid, _ in answers))}
    grams = [_hash_ngrams(np.array([hash(word) for word in words], np.int64), WORD_NGRAM_SIZE) for _, words in answers]
    if not sum(map(len, grams)):
        return 0.0
    owners = np.repeat([prompts[uid] for uid, _ in answers], [len(own) for own in grams])
    together = np.concatenate(grams)
    order = np.lexsort((owners, together))
    together, owners = together[order], owners[order]
    new_gram = np.concatenate(([True], together[1:] != together[:-1]))
    new_owner = new_gram | np.concatenate(([True], owners[1:] != owners[:-1]))
    begins = np.flatnonzero(new_gram)
    num_owners = np.add.reduceat(new_owner.astype(np.int64), begins)
    num_times = np.diff(np.append(begins, len(together)))
    return float(num_times[num_owners >= max(2, math.ceil(len(prompts) / 2))].sum() / len(together))


def _hash_ngrams(items: np.ndarray, size: int) -> np.ndarray:
    """Hash each n-gram of `size` integers of `items` [N], shape [N - size + 1]; equal n-grams have equal hashes."""
    count = max(0, len(items) - size + 1)
    found = np.zeros(count, np.uint64)
    for place in range(size):
        found = found * _HASH_MULTIPLIER + items[place : place + count].astype(np.uint64)
        found ^= found >> np.uint64(29)
    return found


def _has_repetition(rollout: Rollout) -> bool:
    grams = _hash_ngrams(rollout.token_ids[-MAX_TOKENS:], TOKEN_NGRAM_SIZE)
    return len(grams) > 0 and len(np.unique(grams)) < len(grams) / 2


def _compute_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the Pearson correlation; 0 if one of the sequences is constant."""
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)
