"""Multiple choice: find the letter that an answer settles on."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from roll.config.rewards import ChoiceReward
from roll.errors import MalformedPromptError, short
from roll.protocols import WorkerPool
from roll.rewards.base import LONGEST_TEXT, Judgement, Verifier, in_pool
from roll.rewards.choice_mentions import Mention, find_mentions, plain_letters
from roll.rewards.final_answer import last_boxes, last_tagged
from roll.types import Prompt, Rollout

__all__ = ["choice_verifier", "chosen_letter", "options_of", "question_of", "score_choice"]

LONGEST_ALONE = 40
"""Most characters of a line, or of an answer, that consists of a letter with marks around it."""
LONGEST_OPTION = 300
"""Most characters of an option's text."""
LONGEST_LIST = 120
"""Most characters of an answer that lists the letters (`A: no. B: no. C.`)."""
NO_LETTER = "no letter"
"""The result of `score_choice` for a reference that names no letter."""

_LABEL_END = r"[.):、][*_]{0,2}"
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)(?![a-zA-Z])|[${}*_]|\\[,;!() ]")
_ENDS = re.compile(r"[,;:.!?。]\s{0,3}[*_(]{0,3}$")
_WORDS = re.compile(r"\w+")
_INTRODUCTION = re.compile(r"^.{0,80}?(?:\b(?:is|are)\b|[:=]|答案是|答案为|选)\s*", re.IGNORECASE)


@functools.lru_cache(maxsize=8)
class _Patterns:
    """Patterns of letters that stand alone or lead a line. Every repetition is bounded: searches take linear time."""

    def __init__(self, letters: str) -> None:
        either = f"[{re.escape(letters + letters.lower())}]"
        upper = f"[{re.escape(letters)}]"
        noun = r"(?i:(?:the |correct |final )?(?:option|choice|answer|letter)|选项|选|答)"
        alone = rf"\W{{0,{LONGEST_ALONE}}}(?:{noun}\W{{0,8}})?(%s)\W{{0,{LONGEST_ALONE}}}(?:项|选项)?\W{{0,4}}"
        self.alone = re.compile(alone % either)
        self.capital_alone = re.compile(alone % upper)
        self.leading = re.compile(
            rf"[ \t>#*_-]{{0,8}}(?:(?i:option|choice)\s|选项\s?)?(?:[(\[]\s?({either})\s?[)\]][.:*_]{{0,3}}"
            rf"|({either})\s?{_LABEL_END}|({upper})\s[-–—]|[*_]{{2}}({upper})[*_]{{2}})(?=[ \t*_]|[^\W\d_]|$)(.*)"
        )
        self.explained = re.compile(
            rf"[ \t>#*_-]{{0,8}}(?:(?i:option|choice)\s)?({upper})[*_]{{0,2}}\s?"
            rf"\([^()\n]{{1,{LONGEST_OPTION}}}\)[.*_ \t]{{0,4}}"
        )


def chosen_letter(text: str, letters: str, options: Mapping[str, str] | None = None) -> str | None:
    r"""Return the letter that an answer settles on, in upper case; `None` if it settles on no letter or on several.

    The first match counts, in this order: the last `\boxed{B}` or `\boxed{(B) 5}`; the last `<answer>B</answer>`; an
    answer that is only the letter; the last statement ("the answer is (B)", "choose B", "so, B.", "B is correct",
    "答案:B", "故选B"); the only letter that starts a line (`B. Paris`); the last letter in brackets or in bold;
    the last letter alone on a line; the option whose text the answer has. A denied letter (`not (A)`, "option A is
    wrong") never counts, and a statement of two letters (`C or D`) does not count.

    Args:
        text: The answer.
        letters: The letters that may be chosen, in upper case.
        options: The text of each option by its letter, if known.
    """
    text = plain_letters(text)
    given = last_boxes(text, several=False)
    if given is None:
        given = last_tagged(text)
    if given is not None and given.strip():
        return _inside(given, letters) or _option_named(given, options)
    return _in_text(text, letters) or _option_named(text, options)


def _inside(content: str, letters: str) -> str | None:
    """Return the letter in a box or tag: alone, in front of its option's text, or in a statement."""
    bare = _STYLE.sub(" ", content).strip()
    return _in_text(bare, letters, is_whole=True)


def _in_text(text: str, letters: str, is_whole: bool = False) -> str | None:
    patterns = _Patterns(letters)
    if letter := _alone(text, patterns.alone):
        return letter
    mentions = find_mentions(text, letters)
    if stated := [mention for mention in mentions if mention.stated]:
        return _single(stated[-1])
    if fitting := {mention.letters for mention in mentions if mention.fits_alone}:
        (first, *others) = fitting
        return first[0] if len(first) == 1 and not others else None
    leading = _leading(text, patterns, mentions)
    if len(leading) == 1 and (not is_whole or {m.letters for m in mentions} <= {(letter,) for letter in leading}):
        return leading.pop()
    if is_whole:
        return None
    marked = [mention for mention in mentions if mention.marked and not mention.denied]
    if marked and not leading:
        return _single(marked[-1])
    lines = (_alone(line, patterns.capital_alone) for line in reversed(text.splitlines()))
    if letter := next((letter for letter in lines if letter), None):
        return letter
    if mentions and not leading and _ends_with(text, mentions[-1]):
        return _single(mentions[-1])
    return _left_over(mentions) if len(text) <= LONGEST_LIST else None


def _ends_with(text: str, mention: Mention) -> bool:
    """Return whether only a letter follows the last punctuation mark (`By elimination, C.`)."""
    before, behind = text[max(0, mention.begin - 8) : mention.begin], text[mention.end : mention.end + 8]
    at_end = mention.end + len(behind) == len(text) and not behind.strip(".!*_ \n")
    return at_end and not mention.denied and _ENDS.search(before) is not None


def _left_over(mentions: list[Mention]) -> str | None:
    """Return the one letter that is not denied, if all others are (`C, not D`)."""
    left = {letter for mention in mentions if not mention.denied for letter in mention.letters}
    return left.pop() if len(left) == 1 and any(mention.denied for mention in mentions) else None


def _single(mention: Mention) -> str | None:
    return mention.letters[0] if len(mention.letters) == 1 else None


def _leading(text: str, patterns: _Patterns, mentions: list[Mention]) -> set[str]:
    """Return the letters that start a line and are not denied there."""
    denied = {mention.begin for mention in mentions if mention.denied}
    single = {mention.begin for mention in mentions if len(mention.letters) == 1}
    found: set[str] = set()
    position = 0
    for line in text.splitlines(keepends=True):
        start = line[: LONGEST_OPTION + 40].rstrip("\r\n")
        match = patterns.leading.match(start)
        if match is not None:
            place = next(index for index in range(1, 5) if match[index])
            if position + match.start(place) not in denied:
                found.add(match[place].upper())
        elif (match := patterns.explained.fullmatch(start)) and position + match.start(1) in single - denied:
            found.add(match[1])  # `A (Paris)`, but not `A (or B)`
        position += len(line)
    return found


def _alone(text: str, pattern: re.Pattern[str]) -> str | None:
    text = text.strip()
    if len(text) > LONGEST_ALONE:
        return None
    match = pattern.fullmatch(text)
    return match[1].upper() if match else None


# ---- options by their texts


def options_of(text: str, letters: str) -> dict[str, str]:
    """Return the options that a question lists, by letter: lines such as `A. Paris` or `(B) Rome`.

    The letters must be the first ones in order, each once; else nothing is returned.

    Args:
        text: The question.
        letters: The letters that may be chosen, in upper case.
    """
    patterns = _Patterns(letters)
    found: dict[str, str] = {}
    for line in plain_letters(text).splitlines():
        match = patterns.leading.match(line[: LONGEST_OPTION + 40])
        if match is None:
            continue
        letter = next(match[index] for index in range(1, 5) if match[index]).upper()
        if letter in found:
            return {}
        found[letter] = match[5].strip("*_ \t")
    return found if len(found) > 1 and "".join(found) == letters[: len(found)] else {}


def _option_named(text: str, options: Mapping[str, str] | None) -> str | None:
    """Return the letter of the one option whose text this is, alone or behind "the answer is"."""
    if not options or len(text) > LONGEST_OPTION + 80:
        return None
    wanted = {letter: _words(option) for letter, option in options.items()}
    for given in (_words(text), _words(_INTRODUCTION.sub("", text.strip()))):
        same = [letter for letter, words in wanted.items() if words and words == given]
        if len(same) == 1:
            return same[0]
    return None


def _words(text: str) -> list[str]:
    return _WORDS.findall(_STYLE.sub(" ", plain_letters(text)).casefold())


# ---- the verifier


def question_of(prompt: Prompt) -> str:
    """Return the end of a prompt's last message, which may list options."""
    return prompt.messages[-1].text[-LONGEST_TEXT:] if prompt.messages else ""


def score_choice(text: str, answer: str, letters: str, question: str = "") -> bool | str | None:
    """Return whether the chosen letter equals the reference.

    Args:
        text: The answer.
        answer: The reference.
        letters: The letters that may be chosen, in upper case.
        question: The prompt; an answer may give the text of an option that the prompt lists.

    Returns:
        `None` if the answer settles on no letter, and `NO_LETTER` if the reference names no letter.
    """
    options = options_of(question, letters)
    right = chosen_letter(answer, letters, options)
    if right is None:
        return NO_LETTER
    letter = chosen_letter(text, letters, options)
    return None if letter is None else letter == right


def choice_verifier(config: ChoiceReward, pool: WorkerPool) -> Verifier:
    """Return a verifier that reads the letter in the pool."""

    async def judge(rollout: Rollout) -> Judgement:
        prompt = rollout.prompt
        arguments = (rollout.text[-LONGEST_TEXT:], prompt.answer, config.letters, question_of(prompt))
        right = await in_pool(pool, score_choice, *arguments, time_limit_s=config.time_limit_s)
        if right == NO_LETTER:
            raise MalformedPromptError(
                prompt.uid,
                f"the reference {short(prompt.answer)} names none of the letters {config.letters}, nor an option that "
                "the prompt lists: give a letter, or change `letters`.",
            )
        if right is None:
            return Judgement(value=0.0, verdict="no answer", correct=False)
        return Judgement(value=float(right), verdict="correct" if right else "wrong", correct=bool(right))

    return Verifier(judge=judge, decides=True)
