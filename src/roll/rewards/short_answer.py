"""Score short answers by exact match and by F1 over words, as in SQuAD (arXiv 1606.05250)."""

from __future__ import annotations

import ast
import json
import math
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.rewards import ShortAnswerReward
from roll.errors import MalformedPromptError, shorten
from roll.protocols import WorkerPool
from roll.rewards.base import MAX_TEXT_LENGTH, Judgement, Verifier, run_in_pool
from roll.rewards.final_answer import find_last_tagged
from roll.types import Prompt, Rollout

__all__ = [
    "build_short_answer_verifier",
    "compare_answer",
    "compute_f1",
    "get_references",
    "is_exact_match",
    "normalize_words",
    "parse_references",
]

MAX_DEPTH = 4
"""Maximum number of levels of nested lists and objects in a cell of reference answers."""
_REFERENCE_KEYS = ("text", "value", "answer", "answers", "aliases", "normalized_value", "normalized_aliases")
_SIGNS = string.punctuation + "\u2018\u2019\u201a\u201c\u201d\u201e\u00b4\u00ab\u00bb\u2013\u2014\u2026"
"""ASCII punctuation, and the quotation marks, apostrophes, dashes and dots that models write instead."""
_PUNCTUATION = str.maketrans(_SIGNS, " " * len(_SIGNS))
_ARTICLES = {"a", "an", "the"}


def normalize_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return [word for word in text.casefold().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def _normalize_both(answer: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the normalized words of the answer and of the reference.

    If neither has any words after normalization (blood group `A`, the sign `+`), articles or signs are treated as
    words.
    """
    for words in (normalize_words, _split_with_articles, _split_words):
        given, wanted = words(answer), words(reference)
        if given or wanted:
            break
    return given, wanted


def _split_with_articles(text: str) -> list[str]:
    return text.casefold().translate(_PUNCTUATION).split()


def _split_words(text: str) -> list[str]:
    return text.casefold().split()


def is_exact_match(answer: str, reference: str) -> bool:
    """Return whether both texts have the same words in the same order."""
    given, wanted = _normalize_both(answer, reference)
    return given == wanted


def compute_f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall over words, with repetitions; 1 if both texts have no words."""
    given, wanted = _normalize_both(answer, reference)
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2.0 * common / (len(given) + len(wanted))


def compare_answer(text: str, references: Sequence[str]) -> tuple[bool, float]:
    """Return whether an answer matches one of the references, and its best F1 score over the references."""
    tagged = find_last_tagged(text)
    answer = text if tagged is None else tagged
    exact = any(is_exact_match(answer, reference) for reference in references)
    return exact, max((compute_f1(answer, reference) for reference in references), default=0.0)


def parse_references(value: Any) -> list[str]:
    """Return the reference answers in a column's cell.

    Args:
        value: A string, a number, a list of these (also as JSON or as a Python literal), or an object with these under
            `text`, `value`, `aliases`, `answer` or `answers`, as in SQuAD and TriviaQA. Null means no answers.

    Raises:
        ValueError: The cell has any other value.
    """
    return list(dict.fromkeys(_parse_nested_references(value, MAX_DEPTH)))


def _parse_nested_references(value: Any, max_depth: int) -> list[str]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, str):
        listed = _parse_list(value)
        return [value] if listed is None else _parse_nested_references(listed, max_depth - 1)
    if isinstance(value, int | float):
        return [str(value)]
    if max_depth == 0:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        known = [key for key in _REFERENCE_KEYS if key in value]
        if not known:
            keys = ", ".join(repr(key) for key in list(value)[:8]) or "none"
            raise ValueError(f"expected one of the keys {', '.join(_REFERENCE_KEYS)}, got the keys {keys}")
        return [text for key in known for text in _parse_nested_references(value[key], max_depth - 1)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _parse_nested_references(item, max_depth - 1)]
    raise ValueError(f"expected a string, a number, a list of these, or an object of these, got {shorten(value)}")


def _parse_list(text: str) -> Any:
    """Parse a list or object that is written as JSON or as a Python literal; `None` for any other string."""
    if text.strip()[:1] not in ("[", "{"):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            parsed = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return parsed if isinstance(parsed, list | dict) else None
    return None


def get_references(config: ShortAnswerReward, prompt: Prompt) -> list[str]:
    """Return all reference answers to a prompt.

    Raises:
        MalformedPromptError: The prompt has no answer, or the column `references_key` has an invalid value.
    """
    key = config.references_key
    try:
        more = [] if key is None else parse_references(prompt.metadata.get(key))
    except ValueError as error:
        raise MalformedPromptError(prompt.uid, f"column '{key}' has no valid reference answers: {error}.") from None
    references = [text for text in dict.fromkeys([prompt.answer, *more]) if text.strip()]
    if not references:
        columns = ", ".join(sorted(map(repr, prompt.metadata))) or "none"
        raise MalformedPromptError(
            prompt.uid, f"there is no reference answer: the answer and column '{key}' are empty (columns: {columns})."
        )
    return references


def build_short_answer_verifier(config: ShortAnswerReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `short_answer`. It runs in the worker pool, and accepts several references."""

    async def judge(rollout: Rollout) -> Judgement:
        references = get_references(config, rollout.prompt)
        text = rollout.text[-MAX_TEXT_LENGTH:]
        exact, best = await run_in_pool(pool, compare_answer, text, references, time_limit_s=config.time_limit_s)
        value = best if config.score == "f1" else float(exact)
        verdict = "correct" if exact else ("partly" if best > 0 and config.score == "f1" else "wrong")
        return Judgement(value=value, verdict=verdict, correct=exact)

    return Verifier(judge=judge, decides_correctness=True)
