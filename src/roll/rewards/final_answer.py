"""Extract the final answer from a text: the last box, the last number, the last formula."""

from __future__ import annotations

import re

from roll.rewards.mathematics.plain_number import NUMBER_PATTERN, is_same_number, normalize_numbers, parse_number
from roll.rewards.mathematics.units import parse_unit

__all__ = [
    "add_box_braces",
    "extract_reference",
    "find_last_box",
    "find_last_boxed",
    "find_last_formula",
    "find_last_formulas",
    "find_last_line",
    "find_last_number",
    "find_last_tagged",
    "find_marked_answer",
    "find_stated_answer",
    "find_tagged_answer",
    "has_open_box",
    "is_sentence",
    "match_spaced_number",
]

_BOX_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX_PATTERN = re.compile(r"(\\(?:boxed|fbox))\s*+(-?\d++(?:[.,]\d++)*+)(?=[\s$.,;:)]|\\[)\],;! ]|$)")
_DELIMITER_PATTERN = re.compile(r"\$\$|\$|\\[()\[\]]|\n")
_CLOSING = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_UNIT_PATTERN = re.compile(
    r"\s?(?:square |cubic )?[a-zA-Z]{1,12}(?:\s?(?:/|per )\s?[a-zA-Z]{1,12})?(?:\^\{?[23]\}?|[²³])?"
)
_NO_WORDS_PATTERN = re.compile(
    r"\\begin\s*\{[^{}]*\}(?:\s*\{[lcr|\s]*\})?|\\(?:text|textrm|mathrm|mbox|operatorname|end)\s*\{[^{}]*\}"
)
_LONG_WORD_PATTERN = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_DECIMAL_COMMA_PATTERN = re.compile(r"(?<![\d,.(\[{])(\d{1,9},)$")
_OTHER_NUMBER_PATTERN = re.compile(
    r"(\d[^\s|]{0,9})\s{0,3}([a-zA-Z]{0,12})\s{0,3}(?:\||\bor\b)\s{0,3}(?:\\\(|[$€£¥])?\s?(?:[a-zA-Z]\s?=\s?)?$"
)
_OPERATORS = ("+", "-", "*", "/", "×", "÷")
_SCALED_PATTERN = re.compile(r"\s(?:hundred|thousand|million|billion|trillion)\b")
_ROOT_PATTERN = re.compile(r"(?:√\s?\(?|\bsqrt\s?\()$")
_MINUS_PATTERN = re.compile(r"\b(?:minus|negative)\s[$€£¥]?$", re.IGNORECASE)
_SPACED_NUMBER_PATTERN = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_WORD_PATTERN = re.compile(r"[a-zA-Z]+")
_TEXT_COMMAND_PATTERN = re.compile(r"\\(?:text|textrm|mathrm|mbox)(?![a-zA-Z])")
_CORRECTION_WORDS = {
    "but",
    "not",
    "no",
    "instead",
    "rather",
    "wait",
    "actually",
    "so",
    "then",
    "therefore",
    "thus",
    "hence",
}
_CORRECTION_WORDS |= {
    "which",
    "answer",
    "since",
    "because",
    "wrong",
    "correct",
    "check",
    "final",
    "finally",
    "is",
    "first",
}
_SENTENCE_PATTERN = re.compile(r"(?<![\\a-zA-Z])(?:is|are|the|so)(?![a-zA-Z])|\n", re.IGNORECASE)
_MARKED_PATTERN = re.compile(r"#{4}[ \t]*+(\S.*)")
_STATED = "final answer is"
MAX_STATED_LENGTH = 400
_COLON = r"(?:(?<!\d)(?<!\d ):|(?<=\d):(?!\d)|(?<=\d ):(?! \d))"
"""A colon that is not part of `12:30` or `3 : 2`."""
MAX_BETWEEN_LENGTH = 70
"""Maximum number of characters between two boxes of one answer."""
_RELATION_PATTERN = re.compile(r"(?<![<>!\\])=|\\Rightarrow|\\implies")


def add_box_braces(text: str) -> str:
    r"""Add the missing braces of boxed numbers, as in some solutions of MATH: `\boxed 2` becomes `\boxed{2}`."""
    return _BARE_BOX_PATTERN.sub(r"\1{\2}", text)


def find_last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, with balanced braces; `None` if there is no closed box."""
    boxes = list(_BOX_PATTERN.finditer(text))
    found = _read_box_content(text, boxes[-1].end(), len(text)) if boxes else None
    return None if found is None else found[0]


def has_open_box(text: str) -> bool:
    r"""Return whether the last `\boxed{…}` is not closed, for example because the answer was truncated in it."""
    return _BOX_PATTERN.search(text) is not None and find_last_box(text) is None


def _read_box_content(text: str, begin: int, end: int) -> tuple[str, int] | None:
    """Return the content of the box whose brace opens just before `begin`, and the position after its closing brace.

    Return `None` if the brace is not closed before `end`.
    """
    depth = 1
    for position in range(begin, end):
        if text[position - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip(), position + 1
    return None


def find_last_boxed(text: str, *, allow_several: bool) -> str | None:
    r"""Return the content of the last box and of the boxes before it that belong to the same answer, joined by commas.
    Boxes with only `,`, `or`, `and` between them are one answer.

    Args:
        text: The answer.
        allow_several: Whether the prompt asks for several values. If so, a few other words may also occur between the
            boxes, unless one of them revokes the earlier value (`First \boxed{17}, but \boxed{1,-2}`).
    """
    begins = list(_BOX_PATTERN.finditer(text))
    if not begins or (last := _read_box_content(text, begins[-1].end(), len(text))) is None:
        return None
    contents = [last[0]]
    for box, following in zip(reversed(begins[:-1]), reversed(begins[1:]), strict=True):
        content = _read_box_content(text, box.end(), following.start())
        if content is None or not _belongs_to_answer(text[content[1] : following.start()], allow_several):
            break
        if content[0] != contents[-1]:
            contents.append(content[0])
    return ", ".join(reversed(contents))


def _belongs_to_answer(text_between: str, several: bool) -> bool:
    if len(text_between) > MAX_BETWEEN_LENGTH:
        return False
    words = _WORD_PATTERN.findall(_TEXT_COMMAND_PATTERN.sub(" ", text_between))
    separated = "," in text_between or ";" in text_between or any(word in ("and", "or") for word in words)
    if set(words) <= {"and", "or", "quad", "qquad", "lor", "text"} and "." not in text_between:
        return separated or (several and not text_between.strip()) or not text_between
    taken_back = any(word.lower() in _CORRECTION_WORDS for word in words)
    return several and separated and not taken_back and not re.search(r"[.!?:]", text_between)


def find_stated_answer(text: str) -> str | None:
    """Return the answer in the last "The final answer is … I hope it is correct".

    Return `None` without such a sentence, or if a box comes after its beginning.

    The prompt of Lewkowycz et al. (2022, arXiv 2206.14858), which many data sets still use, asks for this form.
    """
    lower = text.lower()
    end = lower.rfind("i hope it is correct")
    begin = lower.rfind(_STATED, 0, max(end, 0))
    if begin < 0 or len(lower) != len(text) or end - begin > MAX_STATED_LENGTH or _BOX_PATTERN.search(text, begin):
        return None
    stated = text[begin + len(_STATED) : end].replace('\\"', " ").lstrip(": ").strip()
    return stated.rstrip(".").strip('$*" ') or None


def find_tagged_answer(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`; `None` without the tag, or if a box comes after it."""
    tagged = find_last_tagged(text)
    if tagged is None or not tagged.strip():
        return None
    return None if _BOX_PATTERN.search(text, text.lower().rfind("</answer>")) else tagged.strip()


def find_marked_answer(text: str) -> str | None:
    """Return the text after `####` in the last line, as GSM8K writes answers; `None` without this mark."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    match = _MARKED_PATTERN.fullmatch(line.strip())
    return match[1] if match else None


def is_sentence(text: str) -> bool:
    """Return whether a text is more than a bare answer: it contains a box, or words of a sentence."""
    return any(pattern.search(text) for pattern in (_SENTENCE_PATTERN, _BOX_PATTERN)) or bool(
        _LONG_WORD_PATTERN.search(_remove_text(text))
    )


def extract_reference(reference: str) -> str:
    r"""Return the answer in a reference: in its last `\boxed{…}` (as in MATH's column `solution`), in
    `<answer>…</answer>`, or after `####` (GSM8K); else the reference itself.
    """
    reference = add_box_braces(reference)
    found = (
        find_last_boxed(reference, allow_several=False),
        find_tagged_answer(reference),
        find_marked_answer(reference),
    )
    return next((answer for answer in found if answer is not None), reference)


def find_last_formulas(text: str) -> str | None:
    """Return all formulas of the last line that has a formula, joined by commas; `None` if no line has one."""
    formulas: list[str] = []
    following = len(text)
    for begin, end in reversed(_find_formulas(text)):
        formula = text[begin:end].strip()
        if not formula or _LONG_WORD_PATTERN.search(_remove_text(formula)):
            continue
        if formulas and "\n" in text[end:following]:
            break
        formulas.append(formula)
        following = begin
    return ", ".join(reversed(formulas)) or None


def match_spaced_number(text: str) -> str | None:
    """Return the text if it is one number whose thousands are separated by spaces, else `None`."""
    return text if _SPACED_NUMBER_PATTERN.fullmatch(text.strip()) and parse_number(text) is not None else None


def find_last_tagged(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last `</tag>` and the `<tag>` before it; `None` if one of them is missing.

    The tag is not case-sensitive.
    """
    lower = text.lower()
    end = lower.rfind(f"</{tag}>")
    begin = lower.rfind(f"<{tag}>", 0, max(end, 0))
    if begin < 0 or len(lower) != len(text):  # a few capitals have longer lower-case letters
        return None if begin < 0 else find_last_tagged(lower, tag)
    return text[begin + len(tag) + 2 : end]


def find_last_number(text: str, *, with_unit: bool = False) -> str | None:
    r"""Return the last standalone number (not the 2 of `cm^2` or of `H2O`), with its sign, normalized.

    If the number is part of a formula, the part of the formula after its last `=` is returned: `$\sqrt{2}$` is not 2.

    Args:
        text: The answer.
        with_unit: Whether to include a known unit that follows the number.
    """
    text = normalize_numbers(text)
    for match in reversed(list(NUMBER_PATTERN.finditer(text))):
        start = match.start()
        comma = _DECIMAL_COMMA_PATTERN.search(text[max(0, start - 12) : start])
        if comma and re.fullmatch(r"\d\d?", match.group()):  # `2,74`
            return _find_sign(text[max(0, start - 20) : start - len(comma[1])]) + comma[1] + match.group()
        if text[start] == "." and text[start - 1 : start].isalnum():
            start += 1  # `Rs.500`
        if not _is_standalone(text[max(0, start - 40) : start]):
            continue
        before = text[max(0, start - 40) : start]
        formula = _find_formula_around(text, match.start())
        unit = _find_unit(text, match.end()) if with_unit and formula is None else ""
        number = formula or _add_sign(before, text[start : match.end()]) + (unit or _find_suffix(text, match.end()))
        other = _OTHER_NUMBER_PATTERN.search(before)
        if other and (with_unit or _is_ambiguous(other, number, text[match.end() : match.end() + 13])):
            return other.group() + number  # `5 cm | 5 m` is neither answer, nor is `$6$ or $7$`
        return number
    return None


def _is_ambiguous(alternative: re.Match[str], number: str, after: str) -> bool:
    """Return whether a number and the alternative before it (`6 or 7`) are different values of one quantity.

    Args:
        alternative: The match of the alternative, with the word after it, if any.
        number: The number.
        after: The text after the number.
    """
    first, second = parse_number(re.sub(r"\\\)$", "", alternative[1])), parse_number(number)
    named = re.match(r"[\s$]{0,2}([a-zA-Z]*)", after)
    same_thing = not alternative[2] or (named is not None and named[1] == alternative[2])
    if first is None or second is None or not same_thing:
        return False
    is_operand = alternative.string[: alternative.start()].rstrip(" $€£¥(").endswith(_OPERATORS)  # `30 + 160 or 190`
    return not is_operand and not is_same_number(first, second)


def _find_unit(text: str, end: int) -> str:
    match = _UNIT_PATTERN.match(text, end)
    return match.group() if match and parse_unit(match.group()) else ""


def _is_standalone(before: str) -> bool:
    if re.search(r"[\^_]\{?\s?[-+]?$", before):
        return False
    word = re.search(r"(\\?)[^\W\d_]+$", before)
    return word is None or bool(word.group(1))  # `\times5` but not `H2`


def _find_sign(before: str) -> str:
    """Return `-` if the text before a number ends with a minus sign that belongs to the number, else an empty string.

    In `3-4`, and after a bullet (`- 4`), the sign does not belong to the number.
    """
    match = re.search(r"(.?)(-)(\s?)[$€£¥]*$", before.replace("\n", "\x00"), re.DOTALL)
    if match is None:
        return ""
    previous, _, space = match.groups()
    if space:
        return "-" if re.search(r"[=:(]\s*-\s[$€£¥]*$", before) else ""
    return "" if previous.isalnum() or previous in tuple(")]}.-") else "-"


def _add_sign(before: str, number: str) -> str:
    """Return the number, preceded by the minus or root sign that ends the text before it, if any."""
    if _ROOT_PATTERN.search(before[-8:]):
        return rf"\sqrt{{{number}}}"
    return ("-" if _MINUS_PATTERN.search(before[-11:]) else _find_sign(before[-8:])) + number


def _find_suffix(text: str, end: int) -> str:
    """Return the percent sign, or the word such as `million`, at position `end`; empty if there is neither."""
    if re.match(r"\s?(?:%|percent\b)", text[end : end + 9]):
        return "%"
    scale = _SCALED_PATTERN.match(text, end)
    return scale.group() if scale else ""


def _find_formulas(text: str) -> list[tuple[int, int]]:
    r"""Return start and end of every formula's content: `$…$` within a line, `$$…$$`, `\(…\)`, `\[…\]`."""
    formulas: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for mark in _DELIMITER_PATTERN.finditer(text):
        if opened is None:
            opened = mark if mark.group() in _CLOSING else None
        elif mark.group() == _CLOSING[opened.group()]:
            if mark.start() > opened.end():
                formulas.append((opened.end(), mark.start()))
            opened = None
        elif opened.group() == "$" and mark.group() == "\n":
            opened = None  # the dollar sign was a currency sign
        elif opened.group() != "$$" and mark.group() in ("\\(", "\\[", "$$"):
            opened = mark  # the first was never closed
    return formulas


def _find_formula_around(text: str, position: int) -> str | None:
    for begin, end in _find_formulas(text):
        if begin <= position < end:
            content = text[begin:end]
            right = _get_right_side(content)
            return right if re.search(r"\d", right) and not _LONG_WORD_PATTERN.search(_remove_text(content)) else None
    return None


def find_last_formula(text: str, *, whole: bool = False) -> str | None:
    """Return the content of the last LaTeX formula; `None` without a formula.

    Unless `whole` is true, only the part after the last `=` of an equation is returned.
    """
    found = [text[begin:end] for begin, end in _find_formulas(text)]
    formulas = [
        formula for formula in found if formula.strip() and not _LONG_WORD_PATTERN.search(_remove_text(formula))
    ]
    if not formulas:
        return None
    return formulas[-1].strip() if whole else _get_right_side(formulas[-1]) or None


def find_last_line(text: str, *, whole: bool = False) -> str | None:
    """Return the end of the last line: the part after its last `is`, `are`, `:` or `=`, or else the whole line.

    If `whole` is true, the line is not split at `=`, so an equation stays whole. Return `None` if nothing is left.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    end = re.split(rf"\b(?:is|are)\b|{_COLON}" if whole else rf"\b(?:is|are)\b|=|{_COLON}", lines[-1])[-1]
    if whole:
        end = re.sub(
            r"^\W{0,9}(?:[a-zA-Z]{2,20}\W{1,9}){1,9}(?=[^\W\d_]\s*(?:=|[<>]|\\)|\S{0,20}\d)", "", end
        )  # `So x = 3 or x = -3`
    return end.strip().rstrip(".").strip("* ") or None


def _get_right_side(formula: str) -> str:
    return _RELATION_PATTERN.split(formula)[-1].strip()


def _remove_text(formula: str) -> str:
    return _NO_WORDS_PATTERN.sub("", formula)
