"""Short answers to questions: exact match and F1 over words, as SQuAD scores them (arXiv 1606.05250)."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence

from roll.config.rewards import ShortAnswerReward
from roll.protocols import WorkerPool
from roll.rewards.base import LONGEST_TEXT, Judgement, Verifier, in_pool
from roll.rewards.final_answer import last_tagged
from roll.types import Rollout

__all__ = ["compared", "exact_match", "f1", "normalised_words", "short_answer_verifier"]

_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))
_ARTICLES = {"a", "an", "the"}


def normalised_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return [word for word in text.casefold().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def _compared(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """The words of both; where neither has any (blood group `A`, the sign `+`), those that `normalised_words` drops."""
    for words in (normalised_words, _with_articles, _as_written):
        given, wanted = words(answer), words(reference)
        if given or wanted:
            break
    return given, wanted


def _with_articles(text: str) -> list[str]:
    return text.casefold().translate(_PUNCTUATION).split()


def _as_written(text: str) -> list[str]:
    return text.casefold().split()


def exact_match(answer: str, reference: str) -> bool:
    """Whether both have the same words in the same order."""
    given, wanted = _compared(answer, reference)
    return given == wanted


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over words, counted as often as they occur; 1 where both have none."""
    given, wanted = _compared(answer, reference)
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2.0 * common / (len(given) + len(wanted))


def compared(text: str, references: Sequence[str]) -> tuple[bool, float]:
    """Whether an answer is one of the references, and the best F1 score with one of them."""
    tagged = last_tagged(text)
    answer = text if tagged is None else tagged
    exact = any(exact_match(answer, reference) for reference in references)
    return exact, max((f1(answer, reference) for reference in references), default=0.0)


def short_answer_verifier(config: ShortAnswerReward, pool: WorkerPool) -> Verifier:
    """Compares in the pool with the reference, or with each of several (the column that `references_key` names)."""

    async def judge(rollout: Rollout) -> Judgement:
        more = rollout.prompt.metadata.get(config.references_key, ()) if config.references_key else ()
        references = [text for text in (rollout.prompt.answer, *map(str, more)) if text]
        text = rollout.text[-LONGEST_TEXT:]
        exact, best = await in_pool(pool, compared, text, references, time_limit_s=config.time_limit_s)
        value = best if config.score == "f1" else float(exact)
        verdict = "correct" if exact else ("partly" if best > 0 and config.score == "f1" else "wrong")
        return Judgement(value=value, verdict=verdict, correct=exact)

    return Verifier(judge=judge, decides=True)
