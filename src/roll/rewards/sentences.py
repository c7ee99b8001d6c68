"""Split text into words and sentences by rules, without a model, so the result is the same everywhere."""

from __future__ import annotations

import re

__all__ = ["count_capital_words", "count_words", "split_sentences"]

_ABBREVIATIONS = {"mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "etc", "e.g", "i.e", "inc", "ltd", "co"}
_ABBREVIATIONS |= {"corp", "fig", "no", "vol", "pp", "ca", "cf", "al", "dept", "est", "gen", "col", "capt", "lt"}
_ABBREVIATIONS |= {"sgt", "rev", "hon", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov"}
_ABBREVIATIONS |= {"dec", "a.m", "p.m", "u.s", "u.k", "ph.d"}
_SENTENCE_END_PATTERN = re.compile(
    r"(?P<mark>[.!?…]+|[。\uff01\uff1f।؟])(?P<closing>[\"'”’)\]*_]*)(?P<space>\s+|$)|(?P<east>[。\uff01\uff1f।])"
)
_LAST_WORD_PATTERN = re.compile(r"[\w.]+$")
_WORD_PATTERN = re.compile(r"\w+")
_CAPITAL_WORD_PATTERN = re.compile(r"(?:[^\W\d_]\.){2,}|\w+(?:-\w+)*")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences.

    Each sentence ends with `.`, `!`, `?` or a similar mark, but not after an abbreviation, an initial, or a list
    number.
    """
    sentences: list[str] = []
    begin = 0
    word = _WORD_PATTERN.search(text)  # the next word; marks without a word between them are examined once
    for match in _SENTENCE_END_PATTERN.finditer(text):
        if word is None or word.start() >= match.end():
            continue
        if match["east"] is None and match["mark"].startswith(".") and not _ends_sentence(text, begin, match):
            continue
        sentences.append(text[begin : match.end()].strip())
        begin = match.end()
        word = _WORD_PATTERN.search(text, begin)
    return [*sentences, text[begin:].strip()] if word is not None else sentences


def _ends_sentence(text: str, begin: int, match: re.Match[str]) -> bool:
    """Return whether the period or ellipsis in `match` ends the sentence that starts at `begin`."""
    following = text[match.end() : match.end() + 1]
    if len(match["mark"]) > 1:  # an ellipsis
        return not following.islower()
    word = _LAST_WORD_PATTERN.search(text[max(begin, match.start() - 40) : match.start()])
    last = word.group() if word else ""
    if last.casefold() in _ABBREVIATIONS:
        return not following
    if len(last) == 1 and last.isupper() and last != "I":
        return not following  # an initial
    if last.isdigit():
        line = text[max(0, match.start() - 200) : match.start()].rpartition("\n")[2]
        return line.strip() != last  # the number of a list entry
    return True


def count_words(text: str) -> int:
    """Return the number of runs of letters, digits and underscores."""
    return sum(1 for _ in _WORD_PATTERN.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of words in all capitals; a hyphenated word is one word, and so is `U.S.`."""
    return sum(word.isupper() for word in _CAPITAL_WORD_PATTERN.findall(text))
