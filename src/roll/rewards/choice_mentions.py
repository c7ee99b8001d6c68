"""Find mentions of option letters in a text, and classify each: stated as the answer, denied, or neither.

    text ──► letters ──► groups (`A or B` is one) ──► left context, right context ──► Mention

Every pattern is bounded and is tried once per letter, so the time is linear in the length of the text.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass

from roll.rewards.base import MAX_TEXT_LENGTH
from roll.rewards.choice_languages import CONJUNCTIONS, is_denied, is_only_fitting_letter, is_stated

__all__ = ["Mention", "find_mentions", "normalize_letters"]

LEFT_CHARS = 120
"""Number of characters before a letter that are searched for words that introduce it."""
MAX_LETTERS = 1_000
"""Maximum number of letters that are examined, from the end of a text; this bounds the time."""
RIGHT_CHARS = 80
"""Number of characters after a letter that are searched for a confirmation or a denial."""

_SIMPLIFIED = str.maketrans("應該選擇項為對錯誤還確顯綜題認覺", "应该选择项为对错误还确显综题认觉")
_MARKS = r"(?:[\s*_\"'“”\u2018’$:=(\[【{<>~–—-]|\\\(|\\boxed\{|\\text(?:bf|rm)?\{|\\mathrm\{|\\mathbf\{){0,12}"
_ARTICLE = r"(?:(?:the|an?|my)\s{1,3})?"
_NOUN = r"(?:(?:option|choice|answer|letter|candidate)\b|选项|选择)"
_VERB = r"(?:is|was|are|be|must be|would be|should be|has to be|will be|remains|becomes)\b"
_SUBJECT = r"\b(?:answers?|ans|solution|choice|option|selection|response)\b"
_ANSWER_IS_PATTERN = re.compile(
    rf"{_SUBJECT}(?P<between>(?:(?!{_SUBJECT})[^.!?。\n]){{0,70}}?)"
    rf"(?:\b{_VERB}|[:=]){_MARKS}(?:(?:probably|clearly|likely|thus|therefore|simply|both|either)\s{{1,3}})?"
    rf"{_ARTICLE}(?:{_NOUN})?{_MARKS}$",
    re.IGNORECASE,
)
_ANSWER_PATTERN = re.compile(
    rf"(?:\b(?:answers?|ans\.?|final answer|final)|\b(?:correct|right|best)\s{{1,3}}{_NOUN}){_MARKS}$", re.IGNORECASE
)
_CHOOSES_PATTERN = re.compile(
    r"\b(?P<verb>choose|chose|choosing|chosen|select|selected|selecting|pick|picked|picking|opt(?:ed|ing)? for"
    rf"|(?:go|going|went) (?:with|for)|settle(?:d)? on|mark){_MARKS}{_ARTICLE}(?:{_NOUN})?{_MARKS}$",
    re.IGNORECASE,
)
_IT_IS_PATTERN = re.compile(
    rf"(?:\b(?:it|that|this|which)(?:['’]s|\s(?:is|must be|has to be|should be|would be))|\bleav(?:es|ing)"
    r"(?:\s(?:us|me))?(?:\swith)?|\bwe (?:get|conclude|deduce)(?:\sthat)?|\bmust be)"
    rf"(?:\s{{1,3}}(?:only|just|clearly))?{_MARKS}{_ARTICLE}(?:{_NOUN})?{_MARKS}$",
    re.IGNORECASE,
)
_CONCLUSION_PATTERN = re.compile(
    r"(?:(?:^|[\s.,;!?*])(?:therefore|thus|hence|so|then|consequently|accordingly|finally|but|rather|instead|no|yes|yeah"
    r"|overall|in conclusion|definitely|certainly|probably|most likely|i(?:['’]d| would)? (?:think|believe|guess|say)"
    r"|(?:think|believe|say) it['’]s)"
    rf"|故|所以|因此|因而|于是|综上|而是)[,:]?{_MARKS}{_ARTICLE}(?:{_NOUN})?{_MARKS}$",
    re.IGNORECASE,
)
"""Words after which a letter is treated as the answer only if the sentence ends directly after it."""
_CHINESE_PATTERN = re.compile(
    rf"(?:(?:答案|正确选项|选项|答|正确的|所以|因此|那么|认为|觉得)(?:应该|应当|应|就|只能|显然)?(?:是|为|选择?|[:】\]])"
    rf"|(?:正确|最佳)?(?:答案|正确选项){_MARKS}|(?<![不没])(?:应该?|故|本题|所以|因此|我)?选择?(?:项|[:]|了)?)"
    rf"{_MARKS}(?:选项|选)?{_MARKS}$"
)
_REJECTED_PATTERN = re.compile(
    r"(?:\b(?:not|nor|neither|than|instead of|unlike|except|excludes?|excluding"
    r"|rul(?:e|es|ed|ing) out|reject(?:s|ed|ing)?|eliminat(?:e|es|ed|ing)|dismiss(?:es|ed)?|discard(?:s|ed)?"
    r"|without|over|versus|vs\.?|if|whether)|n['’]t"
    rf"|不选|不能选|不应选|不是|并非|而非|不为|排除|除了|除去){_MARKS}{_ARTICLE}(?:(?:be|both|either)\s{{1,3}})?"
    rf"(?:{_NOUN})?{_MARKS}$",
    re.IGNORECASE,
)
_NEGATED_PATTERN = re.compile(
    r"\b(?:not|never|if|unless|whether|cannot|wrong|incorrect|without|nor|neither|false)\b|n['’]t\b|不|非|错",
    re.IGNORECASE,
)
_BEING_VERB = (
    r"(?:is|are|was|were|can|could|would|does|do|did|must|should|seems?|looks?|may|might|be|both|all|also|just|too|clearly"
    r"|obviously|simply|definitely|therefore|thus)\s{1,3}"
)
_CONDITION_PATTERN = re.compile(r"\bif\s$", re.IGNORECASE)
_CLOSING = r"(?:[)\]}】*_\"'”’$.]|\\\)|\\\]|\s){0,12}"
_DENIED_PATTERN = re.compile(
    rf"{_CLOSING}(?:{_NOUN}\s{{0,3}})?(?:\(\s?|[:–—-]\s{{0,3}})?(?:{_BEING_VERB}){{0,4}}(?:(?:is|are|was|were|ca|could|would"
    r"|does|do|did)n['’]t|cannot\b|wrong\b|incorrect\b|false\b|out\b|eliminated\b|ruled out\b|impossible\b|excluded\b"
    rf"|never\b|no\b|rejected\b|invalid\b|fails?\b|not (?:it|correct|right|true|the)\b)"
    rf"|{_CLOSING}(?:{_NOUN}\s{{0,3}})?(?:{_BEING_VERB}){{1,4}}not\b|{_CLOSING}(?:选?项|都|均|也|是|为|显然){{0,3}}(?:错|不|误|排除)|{_CLOSING}[?]"
    r"|\s?还是",
    re.IGNORECASE,
)
_CONFIRMED_PATTERN = re.compile(
    rf"{_CLOSING}(?P<between>[^.!?。\n,;]{{0,50}}?)(?:\b(?:is|are|must be|seems|looks|appears|has to be"
    r"|would be|it is)"
    r"\s{1,3}(?:(?:the|clearly|definitely|indeed|therefore|thus|most|only|a|one)\s{1,3}){0,3}"
    r"(?:correct|right|answer|best|true|valid|appropriate|accurate|better)\b"
    r"|^ ?the (?:correct|right|best|only) (?:answer|choice|option)\b"
    r"|\bis the only (?:option|choice|answer|one|candidate) (?:(?:that|which|to) )?(?:works?|fits?|meets?|left"
    r"|remaining|satisf\w{1,5}|match\w{0,3}|remains)\b"
    rf"|\bfits best\b|\bit is{_CLOSING}(?:$|\n))|{_CLOSING}(?:项|选项)?(?:是|为|才)?(?:正确|对的?(?:[。,.]|$)|最佳)",
    re.IGNORECASE,
)
_REASON_PATTERN = re.compile(
    rf"{_CLOSING},?\s{{0,3}}(?:because|since|as it|as the|weil|denn|porque|parce que|perché|因为)\b", re.IGNORECASE
)
_SENTENCE_START_PATTERN = re.compile(r"(?:^|[.!?。\n])[\s*_\"'(\[]{0,6}$")
_SENTENCE_END_PATTERN = re.compile(rf"{_CLOSING}(?:$|[.,;:!。\n])")
_LOWER_END_PATTERN = re.compile(r"\s{0,3}(?:[.,;!:)*\]}。]|\\\)|\$|$|\n)")
_SEPARATOR_PATTERN = re.compile(
    r"(?:[\s)\]}】*_]|\\\)){0,6}(?:[,、;/&+(]|\s?\b(?:or|and|nor|maybe|perhaps|possibly|probably|even"
    rf"|{CONJUNCTIONS})\b|或者?"
    r"|和|与|及|以及|还是){0,5}\s{0,3}"
    r"(?:[\s(\[{【*_]|\\\(){0,6}(?:(?:option|choice)s?\s{1,3}|选项)?(?:[(\[{【*_]){0,4}"
)
_CLAUSE_PATTERN = re.compile(
    rf"{_CLOSING}(?:is|was|has|does|being|because|since|would|can|could|seems|looks|says|gives|makes|doesn|isn|ist|es|est|è|é"
    r"|weil|porque|是|错|不)\b"
    rf"|{_CLOSING}[是错不]",
    re.IGNORECASE,
)
_BRACKETED_PATTERN = re.compile(r"[(\[【]\s?$")
_MARKED_PATTERN = re.compile(r"(?:\*\*|__)[\s(\[]?$")


@dataclass(frozen=True, slots=True)
class Mention:
    """A mention of one letter, or of several letters together (`A or B`)."""

    letters: tuple[str, ...]
    """The letters in upper case, without repetition, in the order of the text."""
    is_stated_answer: bool
    """True if the text says that this is the answer."""
    is_denied: bool
    """True if the text says that this is not the answer."""
    is_emphasized: bool
    """True if the letter is in brackets, before a bracket (`B)`), or in bold."""
    is_only_fitting: bool
    """True if the text says that only this letter fits, which is weaker than stating that it is the answer."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Letter:
    letter: str
    begin: int
    end: int
    marked: bool
    is_lower: bool


def normalize_letters(text: str) -> str:
    """Convert full-width letters and signs to ASCII, and traditional to simplified Chinese.

    Only the last `MAX_TEXT_LENGTH` characters are returned.
    """
    return unicodedata.normalize("NFKC", text[-MAX_TEXT_LENGTH:]).translate(_SIMPLIFIED)[-MAX_TEXT_LENGTH:]


@functools.lru_cache(maxsize=8)
def _compile_letter_pattern(letters: str) -> re.Pattern[str]:
    upper, lower = re.escape(letters), re.escape(letters.lower())
    return re.compile(rf"(?<![A-Za-z0-9_'’\\])[{upper}{lower}](?![A-Za-z0-9_]|['’][A-Za-z])")


def find_mentions(text: str, letters: str) -> list[Mention]:
    """Return the mentions of option letters, in the order of the text.

    A lower-case letter is accepted only in brackets, or if the words before it announce an answer and the sentence ends
    after it, since `a` is usually an article.

    Args:
        text: A text as `normalize_letters` returns it.
        letters: The letters that may be chosen, in upper case.
    """
    groups: list[list[_Letter]] = []
    for letter in _find_letters(text, letters):
        if groups and _continues_list(text, groups[-1][-1], letter):
            groups[-1].append(letter)
        else:
            groups.append([letter])
    return [mention for group in groups if (mention := _make_mention(text, group)) is not None]


def _find_letters(text: str, letters: str) -> list[_Letter]:
    found: list[_Letter] = []
    for match in _compile_letter_pattern(letters).finditer(text):
        begin, end = match.span()
        before = text[max(0, begin - 4) : begin]
        bracketed = _BRACKETED_PATTERN.search(before) is not None and text[end : end + 2].lstrip()[:1] in (
            ")",
            "]",
            "】",
        )
        is_lower = match.group().islower()
        marked = bracketed or (not is_lower and (text[end : end + 1] == ")" or bool(_MARKED_PATTERN.search(before))))
        if is_lower and not bracketed and not _LOWER_END_PATTERN.match(text, end):
            continue
        found.append(_Letter(match.group().upper(), begin, end, marked, is_lower and not bracketed))
    return found[-MAX_LETTERS:]


def _continues_list(text: str, before: _Letter, letter: _Letter) -> bool:
    """Return whether `letter` belongs to the same list as the letter `before` it, as B does in `A or B`."""
    between = text[before.end : letter.begin]
    if len(between) > 24 or "\n" in between or letter.is_lower != before.is_lower:
        return False
    if not _SEPARATOR_PATTERN.fullmatch(between):
        return False
    # In `A, B is wrong`, the clause is about B alone, so B starts a mention of its own.
    return "or" in between or _CLAUSE_PATTERN.match(text, letter.end) is None


def _make_mention(text: str, group: list[_Letter]) -> Mention | None:
    first, last = group[0], group[-1]
    left = text[max(0, first.begin - LEFT_CHARS) : first.begin]
    right = text[last.end : last.end + RIGHT_CHARS]
    denied = (
        _DENIED_PATTERN.match(right) is not None or _REJECTED_PATTERN.search(left) is not None or is_denied(left, right)
    )
    stated = not denied and (_is_stated_in_english_or_chinese(left, right) or is_stated(left, right))
    if first.is_lower and not stated:
        return None
    return Mention(
        letters=tuple(dict.fromkeys(letter.letter for letter in group)),
        is_stated_answer=stated,
        is_denied=denied,
        is_emphasized=any(letter.marked for letter in group),
        is_only_fitting=not denied and is_only_fitting_letter(left, right),
        begin=first.begin,
        end=last.end,
    )


def _is_stated_in_english_or_chinese(left: str, right: str) -> bool:
    """Return whether the text around a letter says that it is the answer; `is_stated` covers other languages."""
    if _SENTENCE_START_PATTERN.search(left) and _REASON_PATTERN.match(right):
        return True
    found = _ANSWER_IS_PATTERN.search(left)
    if found is not None and not _NEGATED_PATTERN.search(found["between"]):
        return True
    chosen = _CHOOSES_PATTERN.search(left)
    if chosen is not None:
        return _NEGATED_PATTERN.search(left[max(0, chosen.start() - 20) : chosen.start()]) is None
    meant = _IT_IS_PATTERN.search(left)
    if meant is not None:
        return _CONDITION_PATTERN.search(left[max(0, meant.start() - 4) : meant.start()]) is None
    if _ANSWER_PATTERN.search(left) or _CHINESE_PATTERN.search(left):
        return True
    if _CONCLUSION_PATTERN.search(left) and _SENTENCE_END_PATTERN.match(right):
        return True
    confirmed = _CONFIRMED_PATTERN.match(right)
    return confirmed is not None and not _NEGATED_PATTERN.search(confirmed["between"] or "")
