"""Multiple choice: extract the option letter from an answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from roll.config.rewards import ChoiceReward
from roll.errors import MalformedPromptError, shorten
from roll.protocols import WorkerPool
from roll.rewards.base import MAX_TEXT_LENGTH, Judgement, Verifier, run_in_pool
from roll.rewards.choice_mentions import Mention, find_mentions, normalize_letters
from roll.rewards.final_answer import find_last_boxed, find_last_tagged
from roll.types import Prompt, Rollout, describe_content

__all__ = ["build_choice_verifier", "extract_letter", "get_question", "parse_options", "score_choice"]

MAX_LONE_LENGTH = 40
"""Maximum number of characters of a line or an answer that consists only of a letter and punctuation."""
MAX_OPTION_LENGTH = 300
"""Maximum number of characters of an option's text."""
MAX_LIST_LENGTH = 120
"""Maximum number of characters of an answer that lists several letters (`A: no. B: no. C.`)."""
NO_LETTER = "no letter"
"""The result of `score_choice` for a reference without a letter."""

_LABEL_END = r"[.):、][*_]{0,2}"
_STYLE_PATTERN = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)(?![a-zA-Z])|[${}*_]|\\[,;!() ]")
_CLAUSE_END_PATTERN = re.compile(r"[,;:.!?。]\s{0,3}[*_(]{0,3}$")
_WORD_PATTERN = re.compile(r"\w+")
_INTRODUCTION_PATTERN = re.compile(r"^.{0,80}?(?:\b(?:is|are)\b|[:=]|答案是|答案为|选)\s*", re.IGNORECASE)


@functools.lru_cache(maxsize=8)
class _Patterns:
    """Compiled patterns for a letter that stands alone or starts a line.

    Every repetition is bounded, so a search takes linear time.
    """

    def __init__(self, letters: str) -> None:
        either = f"[{re.escape(letters + letters.lower())}]"
        upper = f"[{re.escape(letters)}]"
        noun = r"(?i:(?:the |correct |final )?(?:option|choice|answer|letter)|选项|选|答)"
        alone = rf"\W{{0,{MAX_LONE_LENGTH}}}(?:{noun}\W{{0,8}})?(%s)\W{{0,{MAX_LONE_LENGTH}}}(?:项|选项)?\W{{0,4}}"
        self.alone = re.compile(alone % either)
        self.capital_alone = re.compile(alone % upper)
        self.leading = re.compile(
            rf"[ \t>#*_-]{{0,8}}(?:(?i:option|choice)\s|选项\s?)?(?:[(\[]\s?({either})\s?[)\]][.:*_]{{0,3}}"
            rf"|({either})\s?{_LABEL_END}|({upper})\s[-–—]|[*_]{{2}}({upper})[*_]{{2}})(?=[ \t*_]|[^\W\d_]|$)(.*)"
        )
        self.explained = re.compile(
            rf"[ \t>#*_-]{{0,8}}(?:(?i:option|choice)\s)?({upper})[*_]{{0,2}}\s?"
            rf"\([^()\n]{{1,{MAX_OPTION_LENGTH}}}\)[.*_ \t]{{0,4}}"
        )


def extract_letter(text: str, letters: str, options: Mapping[str, str] | None = None) -> str | None:
    r"""Return the letter that an answer chooses, in upper case; `None` if it chooses no letter or several letters.

    The first match is used, in this order: the last `\boxed{B}` or `\boxed{(B) 5}`; the last `<answer>B</answer>`; an
    answer that is only the letter; the last statement ("the answer is (B)", "choose B", "so, B.", "B is correct",
    "答案:B", "故选B"); the only letter that starts a line (`B. Paris`); the last letter in brackets or in bold; the
    last letter alone on a line; the option whose text the answer repeats. A denied letter (`not (A)`, "option A is
    wrong") and a statement of two letters (`C or D`) are ignored.

    Args:
        text: The answer.
        letters: The letters that may be chosen, in upper case.
        options: The text of each option by its letter, if known.
    """
    text = normalize_letters(text)
    given = find_last_boxed(text, allow_several=False)
    if given is None:
        given = find_last_tagged(text)
    if given is not None and given.strip():
        return _parse_boxed_choice(given, letters) or _match_option(given, options)
    return _parse_choice(text, letters) or _match_option(text, options)


def _parse_boxed_choice(content: str, letters: str) -> str | None:
    """Extract the option letter from the content of a box or tag; return `None` if there is none.

    The letter may stand alone, precede the text of its option, or occur in a statement.
    """
    bare = _STYLE_PATTERN.sub(" ", content).strip()
    return _parse_choice(bare, letters, is_whole=True)


def _parse_choice(text: str, letters: str, is_whole: bool = False) -> str | None:
    patterns = _Patterns(letters)
    if letter := _match_lone_letter(text, patterns.alone):
        return letter
    mentions = find_mentions(text, letters)
    if stated := [mention for mention in mentions if mention.is_stated_answer]:
        return _get_single_letter(stated[-1])
    # If several letters are each said to be the only one that fits, the answer contradicts itself and chooses none.
    if fitting := {mention.letters for mention in mentions if mention.is_only_fitting}:
        (first, *others) = fitting
        return first[0] if len(first) == 1 and not others else None
    leading = _find_leading_letters(text, patterns, mentions)
    # Inside a box, another letter makes the content ambiguous: `B. or C` is not B.
    if len(leading) == 1 and (not is_whole or {m.letters for m in mentions} <= {(letter,) for letter in leading}):
        return leading.pop()
    if is_whole:
        return None
    marked = [mention for mention in mentions if mention.is_emphasized and not mention.is_denied]
    if marked and not leading:
        return _get_single_letter(marked[-1])
    lines = (_match_lone_letter(line, patterns.capital_alone) for line in reversed(text.splitlines()))
    if letter := next((letter for letter in lines if letter), None):
        return letter
    if mentions and not leading and _ends_with_letter(text, mentions[-1]):
        return _get_single_letter(mentions[-1])
    return _find_letter_not_denied(mentions) if len(text) <= MAX_LIST_LENGTH else None


def _ends_with_letter(text: str, mention: Mention) -> bool:
    """Return whether `mention` ends the text and directly follows a punctuation mark (`By elimination, C.`).

    The result is false for a denied mention.
    """
    before, after = text[max(0, mention.begin - 8) : mention.begin], text[mention.end : mention.end + 8]
    at_end = mention.end + len(after) == len(text) and not after.strip(".!*_ \n")
    return at_end and not mention.is_denied and _CLAUSE_END_PATTERN.search(before) is not None


def _find_letter_not_denied(mentions: list[Mention]) -> str | None:
    """Return the only letter that is not denied: `C` for `C, not D`.

    Return `None` if no letter is denied, or if the number of remaining letters is not one.
    """
    # If no letter is denied, the only letter is merely mentioned.
    left = {letter for mention in mentions if not mention.is_denied for letter in mention.letters}
    return left.pop() if len(left) == 1 and any(mention.is_denied for mention in mentions) else None


def _get_single_letter(mention: Mention) -> str | None:
    return mention.letters[0] if len(mention.letters) == 1 else None


def _find_leading_letters(text: str, patterns: _Patterns, mentions: list[Mention]) -> set[str]:
    """Return the letters that start a line and are not denied there."""
    denied = {mention.begin for mention in mentions if mention.is_denied}
    single = {mention.begin for mention in mentions if len(mention.letters) == 1}
    letters: set[str] = set()
    position = 0
    for line in text.splitlines(keepends=True):
        start = line[: MAX_OPTION_LENGTH + 40].rstrip("\r\n")
        match = patterns.leading.match(start)
        if match is not None:
            place = next(index for index in range(1, 5) if match[index])
            if position + match.start(place) not in denied:
                letters.add(match[place].upper())
        elif (match := patterns.explained.fullmatch(start)) and position + match.start(1) in single - denied:
            letters.add(match[1])  # `A (Paris)`, but not `A (or B)`
        position += len(line)
    return letters


def _match_lone_letter(text: str, pattern: re.Pattern[str]) -> str | None:
    text = text.strip()
    if len(text) > MAX_LONE_LENGTH:
        return None
    match = pattern.fullmatch(text)
    return match[1].upper() if match else None


# ---- options by their texts


def parse_options(text: str, letters: str) -> dict[str, str]:
    """Return the text of each option that a question lists, by letter: lines such as `A. Paris` or `(B) Rome`.

    The lines must use the first letters of `letters` (at least two), in order and each once; otherwise the result is
    empty.

    Args:
        text: The question.
        letters: The letters that may be chosen, in upper case.
    """
    patterns = _Patterns(letters)
    options: dict[str, str] = {}
    for line in normalize_letters(text).splitlines():
        match = patterns.leading.match(line[: MAX_OPTION_LENGTH + 40])
        if match is None:
            continue
        letter = next(match[index] for index in range(1, 5) if match[index]).upper()
        if letter in options:
            return {}
        options[letter] = match[5].strip("*_ \t")
    return options if len(options) > 1 and "".join(options) == letters[: len(options)] else {}


def _match_option(text: str, options: Mapping[str, str] | None) -> str | None:
    """Return the letter of the option whose text equals `text`, or `None` if there is not exactly one.

    An introduction such as "the answer is" is removed from `text` first.
    """
    if not options or len(text) > MAX_OPTION_LENGTH + 80:
        return None
    wanted = {letter: _split_words(option) for letter, option in options.items()}
    for given in (_split_words(text), _split_words(_INTRODUCTION_PATTERN.sub("", text.strip()))):
        same = [letter for letter, words in wanted.items() if words and words == given]
        if len(same) == 1:
            return same[0]
    return None


def _split_words(text: str) -> list[str]:
    return _WORD_PATTERN.findall(_STYLE_PATTERN.sub(" ", normalize_letters(text)).casefold())


# ---- the verifier


def get_question(prompt: Prompt) -> str:
    """Return the last `MAX_TEXT_LENGTH` characters of a prompt's last message, which may list options."""
    return describe_content(prompt.messages[-1].content)[-MAX_TEXT_LENGTH:] if prompt.messages else ""


def score_choice(text: str, answer: str, letters: str, question: str = "") -> bool | str | None:
    """Return whether the letter that an answer chooses equals the reference.

    Args:
        text: The answer.
        answer: The reference.
        letters: The letters that may be chosen, in upper case.
        question: The prompt; an answer may repeat the text of an option that the prompt lists.

    Returns:
        True if both letters are equal, otherwise False; `None` if the answer chooses no letter; `NO_LETTER` if the
        reference contains no letter.
    """
    options = parse_options(question, letters)
    right = extract_letter(answer, letters, options)
    if right is None:
        return NO_LETTER
    letter = extract_letter(text, letters, options)
    return None if letter is None else letter == right


def build_choice_verifier(config: ChoiceReward, pool: WorkerPool) -> Verifier:
    """Build the verifier of the reward `choice`, which compares letters in the worker pool."""

    async def judge(rollout: Rollout) -> Judgement:
        prompt = rollout.prompt
        arguments = (rollout.text[-MAX_TEXT_LENGTH:], prompt.answer, config.letters, get_question(prompt))
        right = await run_in_pool(pool, score_choice, *arguments, time_limit_s=config.time_limit_s)
        if right == NO_LETTER:
            raise MalformedPromptError(
                prompt.uid,
                f"the reference {shorten(prompt.answer)} contains neither one of the letters {config.letters} nor an "
                "option of the prompt: set the reference to a letter, or change `letters`.",
            )
        if right is None:
            return Judgement(value=0.0, verdict="no answer", correct=False)
        return Judgement(value=float(right), verdict="correct" if right else "wrong", correct=bool(right))

    return Verifier(judge=judge, decides_correctness=True)
