"""Marks of a reward that is being hacked: what a policy does that found a way to be paid without solving the task.

Each is a figure of one step's answers; `alarms` says when one is too high. None is a proof: they say where to look.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from roll.types import Group, Rollout

__all__ = ["BASELINE_STEPS", "hacking_metrics", "repeated_text_share", "shared_ngram_share"]

BASELINE_STEPS = 5
"""First steps of a run, whose answers' length is the measure for later ones."""
FEWEST_WORDS = 12
"""Shorter answers may well be equal: `The answer is 7.`"""
WORD_NGRAM, TOKEN_NGRAM = 8, 4
MOST_WORDS = 500
"""Of each answer that are looked at."""


def hacking_metrics(groups: Sequence[Group], first_lengths: Sequence[float]) -> dict[str, float]:
    """What a step's answers show.

    Args:
        groups: all that were generated.
        first_lengths: mean length of answers in the run's first steps, as far as it got.
    """
    scored = [rollout for group in groups for rollout in group.scored]
    if not scored:
        return {}
    words = [(rollout.prompt.uid, rollout.text.casefold().split()[:MOST_WORDS]) for rollout in scored]
    lengths = [float(len(rollout.token_ids)) for rollout in scored]
    metrics = {
        "hacking/repeated_text_share": repeated_text_share(words),
        "hacking/shared_ngram_share": shared_ngram_share(words),
        "hacking/self_repetition_share": _mean(_repeats_itself(rollout) for rollout in scored),
        "hacking/length_reward_correlation": _correlation(lengths, [_value(rollout) for rollout in scored]),
    }
    decided = [set(r.reward.decisions.values()) for r in scored if r.reward and len(r.reward.decisions) > 1]
    if decided:
        metrics["hacking/disagreement_share"] = _mean(len(says) > 1 for says in decided)
    if len(first_lengths) >= BASELINE_STEPS:
        metrics["hacking/length_ratio"] = statistics.fmean(lengths) / max(statistics.fmean(first_lengths), 1e-9)
    return metrics


def _value(rollout: Rollout) -> float:
    return rollout.reward.value if rollout.reward is not None else 0.0


def _mean(values: Iterable[float]) -> float:
    values = [float(value) for value in values]
    return sum(values) / len(values) if values else 0.0


def repeated_text_share(answers: Sequence[tuple[str, list[str]]]) -> float:
    """Share of longer answers whose words were all given, in the same order, to another prompt too.

    Args:
        answers: prompt's uid and words of each.
    """
    long = [(uid, tuple(words)) for uid, words in answers if len(words) >= FEWEST_WORDS]
    asked: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for uid, words in long:
        asked[words].add(uid)
    return _mean(len(asked[words]) > 1 for _, words in long)


def shared_ngram_share(answers: Sequence[tuple[str, list[str]]]) -> float:
    """Share of the answers' runs of `WORD_NGRAM` words that answers to half of the prompts or more have, and to two.

    Args:
        answers: prompt's uid and words of each.
    """
    asked: dict[int, set[str]] = defaultdict(set)
    grams = [(uid, [hash(gram) for gram in _ngrams(words, WORD_NGRAM)]) for uid, words in answers]
    for uid, own in grams:
        for gram in own:
            asked[gram].add(uid)
    enough = max(2, math.ceil(len({uid for uid, _ in answers}) / 2))
    return _mean(len(asked[gram]) >= enough for _, own in grams for gram in own)


def _ngrams(items: Sequence[Hashable], size: int) -> list[tuple[Hashable, ...]]:
    return [tuple(items[i : i + size]) for i in range(len(items) - size + 1)]


def _repeats_itself(rollout: Rollout) -> bool:
    grams = _ngrams(rollout.token_ids.tolist(), TOKEN_NGRAM)
    return len(grams) > 0 and len(set(grams)) < len(grams) / 2


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's; 0 where one does not vary."""
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)
