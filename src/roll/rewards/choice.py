"""Multiple choice: which letter an answer settles on."""

from __future__ import annotations

import re

from roll.config.rewards import ChoiceReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier
from roll.rewards.final_answer import last_boxed
from roll.types import Rollout

__all__ = ["choice_verifier", "chosen_letter"]

_LONGEST = 20_000
"""Characters at the end of an answer that are looked at."""


def chosen_letter(text: str, letters: str) -> str | None:
    r"""The letter that an answer settles on, in upper case; `None` where it settles on none.

    In this order: the last `\boxed{B}`; the last "answer is (B)", "answer: B", "choose B", "option B"; an answer that
    is nothing but the letter; the last letter in brackets or before one, `(B)` or `B)`; the last one alone on a line.

    Args:
        text: the answer.
        letters: those that may be chosen, in upper case.
    """
    text = text[-_LONGEST:]
    options = f"[{re.escape(letters)}]"
    boxed = last_boxed(text)
    if boxed is not None:
        inside = re.fullmatch(rf"(?:\\text\s*\{{)?\s*\(?({options})\)?\.?\s*\}}?", boxed, re.IGNORECASE)
        return inside[1].upper() if inside else None
    patterns = (
        rf"\b(?:answer|choice|option|choose|select|pick)\b(?:\s+(?:is|was|would\s+be))?\s*[:=]?\s*(?:option\s+)?"
        rf"[*_\"'(\[]*({options})\b(?!')",
        rf"^\W*({options})\W*$",
        rf"(?<![A-Za-z])\(?({options})\)",
    )
    for number, pattern in enumerate(patterns):
        flags = re.IGNORECASE if number == 0 else 0
        flags |= re.MULTILINE if number == 2 else 0
        found = re.findall(pattern, text if number != 1 else text.strip(), flags)
        if found:
            return str(found[-1]).upper()
    lines = [m[1] for line in text.splitlines() if (m := re.fullmatch(rf"\W*({options})\W*", line))]
    return lines[-1].upper() if lines else None


def choice_verifier(config: ChoiceReward, pool: WorkerPool) -> Verifier:
    """Compares in place: the patterns run in linear time over a bounded text."""

    async def judge(rollout: Rollout) -> Judgement:
        letter = chosen_letter(rollout.text, config.letters)
        reference = chosen_letter(rollout.prompt.answer, config.letters) or rollout.prompt.answer.strip().upper()
        if letter is None:
            return Judgement(value=0.0, verdict="no answer", correct=False)
        right = letter == reference
        return Judgement(value=float(right), verdict="correct" if right else "wrong", correct=right)

    return Verifier(judge=judge, decides=True)
