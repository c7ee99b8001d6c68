"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import functools
import re

from roll.config.rewards import ChoiceReward
from roll.protocols import WorkerPool
from roll.rewards.base import LONGEST_TEXT, Judgement, Verifier, in_pool
from roll.rewards.final_answer import last_boxed, last_tagged
from roll.types import Rollout

__all__ = ["choice_verifier", "chosen_letter", "score_choice"]

LONGEST_ALONE = 40
"""Characters of a line, or of an answer, that is a letter with marks around it."""
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)(?![a-zA-Z])|[${}*_]|\\[,;!() ]")
_REFUSED = re.compile(r"(?:\bnot|n't|\bnor|\bthan|\binstead of|\bover|\bunlike|\bexcept|\brule out|\bneither)\s{1,3}$")
_BEFORE = 16
"""Characters before a letter in which a word may take it back."""


class _Patterns:
    """What an answer's letters look like. Every repetition is bounded, so that each search takes linear time."""

    def __init__(self, letters: str) -> None:
        upper = f"[{re.escape(letters)}]"
        either = f"[{re.escape(letters + letters.lower())}]"
        # a small letter counts only in brackets or at the end of its sentence: `a` is mostly an article
        letter = rf"(?:\(({either})\)|\[({either})\]|({upper})(?![\w'’])|({either})(?=\s{{0,3}}(?:[.,;!:)*\]]|$)))"
        marks = r"(?:[\s*_\"'$:=]|\\\(){0,8}"
        self.stated = re.compile(
            r"\b(?:(?i:answer|choice|option|choose|select|pick|go with)\b"
            r"|(?i:it)(?:['’]s|\s(?i:is|must be|has to be))\b)"
            rf"{marks}(?:(?i:is|was|must be|would be|should be|has to be)\b{marks})?(?:(?i:option|choice)\s{{1,3}})?"
            rf"{marks}(?:\\boxed\{{)?{letter}",
            re.MULTILINE,
        )
        self.alone = re.compile(rf"\W{{0,{LONGEST_ALONE}}}({either})\W{{0,{LONGEST_ALONE}}}")
        self.capital_alone = re.compile(rf"\W{{0,{LONGEST_ALONE}}}({upper})\W{{0,{LONGEST_ALONE}}}")
        self.bracketed = re.compile(rf"(?<![A-Za-z])\(?({upper})\)")
        self.leading = re.compile(rf"\s*(?:\(({either})\)|({upper})[.):])\s*(.*)", re.DOTALL)
        self.another = re.compile(rf"(?<![A-Za-z])\(?{upper}\)?(?![A-Za-z])")


_patterns = functools.lru_cache(maxsize=8)(_Patterns)


def chosen_letter(text: str, letters: str) -> str | None:
    r"""The letter that an answer settles on, in upper case; `None` where it settles on none.

    In this order: the last `\boxed{B}` or `\boxed{(B) 5}`; the last `<answer>B</answer>`; the last "answer is (B)",
    "answer: B", "choose B", "it's B"; an answer that is nothing but the letter; the last letter in brackets or before
    one, `(B)` or `B)`, that is not taken back (`not (A)`); the last one alone on a line.

    Args:
        text: the answer.
        letters: those that may be chosen, in upper case.
    """
    text = text[-LONGEST_TEXT:]
    patterns = _patterns(letters)
    boxed = last_boxed(text)
    if boxed is not None:
        return _inside(boxed, patterns)
    tagged = last_tagged(text)
    if tagged is not None and (found := _inside(tagged, patterns)):
        return found
    stated = [
        match for match in patterns.stated.finditer(text) if not _taken_back(text, match.start(match.lastindex or 0))
    ]
    if stated:
        return str(stated[-1][stated[-1].lastindex or 0]).upper()
    if letter := _alone(text, patterns):
        return letter
    for match in reversed(list(patterns.bracketed.finditer(text))):
        if not _taken_back(text, match.start()):
            return match[1].upper()
    return next((letter for line in reversed(text.splitlines()) if (letter := _alone(line, patterns, True))), None)


def _inside(content: str, patterns: _Patterns) -> str | None:
    """The letter of a box or tag: alone, or before what it stands for, where no other letter follows."""
    bare = _STYLE.sub(" ", content[: 4 * LONGEST_ALONE]).strip()
    if letter := _alone(bare, patterns):
        return letter
    leading = patterns.leading.match(bare)
    if leading is None or patterns.another.search(leading[3]):
        return None
    return (leading[1] or leading[2]).upper()


def _alone(text: str, patterns: _Patterns, capital: bool = False) -> str | None:
    text = text.strip()
    if len(text) > LONGEST_ALONE:
        return None
    match = (patterns.capital_alone if capital else patterns.alone).fullmatch(text)
    return match[1].upper() if match else None


def _taken_back(text: str, start: int) -> bool:
    return _REFUSED.search(text[max(0, start - _BEFORE) : start].lower()) is not None


def score_choice(text: str, answer: str, letters: str) -> bool | None:
    """Whether the letter chosen is the reference's; `None` where none is chosen."""
    letter = chosen_letter(text, letters)
    return None if letter is None else letter == (chosen_letter(answer, letters) or answer.strip().upper())


def choice_verifier(config: ChoiceReward, pool: WorkerPool) -> Verifier:
    """Reads the letter in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        arguments = (rollout.text[-LONGEST_TEXT:], rollout.prompt.answer, config.letters)
        right = await in_pool(pool, score_choice, *arguments, time_limit_s=config.time_limit_s)
        if right is None:
            return Judgement(value=0.0, verdict="no answer", correct=False)
        return Judgement(value=float(right), verdict="correct" if right else "wrong", correct=right)

    return Verifier(judge=judge, decides=True)
