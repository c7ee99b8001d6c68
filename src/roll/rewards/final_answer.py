"""Extract the final answer from a text: the last box, the last number, the last formula."""

from __future__ import annotations

import re

from roll.rewards.mathematics.plain_number import NUMBER, number_of, same_number, tidy
from roll.rewards.mathematics.units import unit_of

__all__ = [
    "answer_in_tag",
    "box_is_open",
    "boxes_with_braces",
    "is_sentence",
    "last_boxed",
    "last_boxes",
    "last_formula",
    "last_formulas",
    "last_line",
    "last_number",
    "last_tagged",
    "marked_answer",
    "reference_answer",
    "stated_answer",
    "whole_number",
]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"(\\(?:boxed|fbox))\s*+(-?\d++(?:[.,]\d++)*+)(?=[\s$.,;:)]|\\[)\],;! ]|$)")
_DELIMITER = re.compile(r"\$\$|\$|\\[()\[\]]|\n")
_CLOSING = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_UNIT = re.compile(r"\s?(?:square |cubic )?[a-zA-Z]{1,12}(?:\s?(?:/|per )\s?[a-zA-Z]{1,12})?(?:\^\{?[23]\}?|[²³])?")
_NO_WORDS = re.compile(
    r"\\begin\s*\{[^{}]*\}(?:\s*\{[lcr|\s]*\})?|\\(?:text|textrm|mathrm|mbox|operatorname|end)\s*\{[^{}]*\}"
)
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_DECIMAL_COMMA = re.compile(r"(?<![\d,.(\[{])(\d{1,9},)$")
_OTHER = re.compile(
    r"(\d[^\s|]{0,9})\s{0,3}([a-zA-Z]{0,12})\s{0,3}(?:\||\bor\b)\s{0,3}(?:\\\(|[$€£¥])?\s?(?:[a-zA-Z]\s?=\s?)?$"
)
_OPERATORS = ("+", "-", "*", "/", "×", "÷")
_SCALED = re.compile(r"\s(?:hundred|thousand|million|billion|trillion)\b")
_ROOT = re.compile(r"(?:√\s?\(?|\bsqrt\s?\()$")
_MINUS = re.compile(r"\b(?:minus|negative)\s[$€£¥]?$", re.IGNORECASE)
_BLANKS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_WORD = re.compile(r"[a-zA-Z]+")
_TEXT_COMMAND = re.compile(r"\\(?:text|textrm|mathrm|mbox)(?![a-zA-Z])")
_TAKING_BACK = {"but", "not", "no", "instead", "rather", "wait", "actually", "so", "then", "therefore", "thus", "hence"}
_TAKING_BACK |= {"which", "answer", "since", "because", "wrong", "correct", "check", "final", "finally", "is", "first"}
_SENTENCE = re.compile(r"(?<![\\a-zA-Z])(?:is|are|the|so)(?![a-zA-Z])|\n", re.IGNORECASE)
_MARKED = re.compile(r"#{4}[ \t]*+(\S.*)")
_STATED = "final answer is"
LONGEST_STATED = 400
_COLON = r"(?:(?<!\d)(?<!\d ):|(?<=\d):(?!\d)|(?<=\d ):(?! \d))"
"""A colon that is not part of `12:30` or `3 : 2`."""
LONGEST_BETWEEN = 70
"""Most characters between two boxes of one answer."""
_RELATION = re.compile(r"(?<![<>!\\])=|\\Rightarrow|\\implies")


def boxes_with_braces(text: str) -> str:
    r"""Return the text with braces around boxed numbers without braces: `\boxed 2`, as in some solutions of MATH."""
    return _BARE_BOX.sub(r"\1{\2}", text)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, braces balanced; `None` if there is no box or it is not closed."""
    boxes = list(_BOX.finditer(text))
    found = _content(text, boxes[-1].end(), len(text)) if boxes else None
    return None if found is None else found[0]


def box_is_open(text: str) -> bool:
    r"""Return whether the last `\boxed{…}` is not closed, for example because the answer was cut off in it."""
    return _BOX.search(text) is not None and last_boxed(text) is None


def _content(text: str, begin: int, end: int) -> tuple[str, int] | None:
    """Return the content of a box that opens at `begin`, and its end; `None` if it does not close before `end`."""
    depth = 1
    for position in range(begin, end):
        if text[position - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip(), position + 1
    return None


def last_boxes(text: str, *, several: bool) -> str | None:
    r"""Return the content of the last box and of the boxes before it that belong to the same answer, joined by commas.

    Boxes with only `,`, `or`, `and` between them are one answer.

    Args:
        text: The answer.
        several: Whether several values are asked for; then a few words may stand between the boxes too, if none of them
            takes back what came before (`First \boxed{17}, but \boxed{1,-2}`).
    """
    begins = list(_BOX.finditer(text))
    if not begins or (last := _content(text, begins[-1].end(), len(text))) is None:
        return None
    found = [last[0]]
    for box, following in zip(reversed(begins[:-1]), reversed(begins[1:]), strict=True):
        content = _content(text, box.end(), following.start())
        if content is None or not _belongs(text[content[1] : following.start()], several):
            break
        if content[0] != found[-1]:
            found.append(content[0])
    return ", ".join(reversed(found))


def _belongs(between: str, several: bool) -> bool:
    if len(between) > LONGEST_BETWEEN:
        return False
    words = _WORD.findall(_TEXT_COMMAND.sub(" ", between))
    separated = "," in between or ";" in between or any(word in ("and", "or") for word in words)
    if set(words) <= {"and", "or", "quad", "qquad", "lor", "text"} and "." not in between:
        return separated or (several and not between.strip()) or not between
    taken_back = any(word.lower() in _TAKING_BACK for word in words)
    return several and separated and not taken_back and not re.search(r"[.!?:]", between)


def stated_answer(text: str) -> str | None:
    """Return the answer in the last "The final answer is … I hope it is correct", unless a box comes after it.

    The form is that of the prompt of Lewkowycz et al. (2022, arXiv 2206.14858), which many data sets still use.
    """
    lower = text.lower()
    end = lower.rfind("i hope it is correct")
    begin = lower.rfind(_STATED, 0, max(end, 0))
    if begin < 0 or len(lower) != len(text) or end - begin > LONGEST_STATED or _BOX.search(text, begin):
        return None
    stated = text[begin + len(_STATED) : end].replace('\\"', " ").lstrip(": ").strip()
    return stated.rstrip(".").strip('$*" ') or None


def answer_in_tag(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`; `None` without the tag, or if a box comes after it."""
    tagged = last_tagged(text)
    if tagged is None or not tagged.strip():
        return None
    return None if _BOX.search(text, text.lower().rfind("</answer>")) else tagged.strip()


def marked_answer(text: str) -> str | None:
    """Return the text behind `####` in the last line, as GSM8K writes answers."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    match = _MARKED.fullmatch(line.strip())
    return match[1] if match else None


def is_sentence(text: str) -> bool:
    """Return whether a text has a box, or words of a sentence, so that the answer must be extracted from it."""
    return any(pattern.search(text) for pattern in (_SENTENCE, _BOX)) or bool(_WORDS.search(_without_text(text)))


def reference_answer(reference: str) -> str:
    r"""Return the answer in a reference: in its last `\boxed{…}` (as in MATH's column `solution`), in
    `<answer>…</answer>`, or behind `####` (GSM8K); else the reference itself.
    """
    reference = boxes_with_braces(reference)
    found = (last_boxes(reference, several=False), answer_in_tag(reference), marked_answer(reference))
    return next((answer for answer in found if answer is not None), reference)


def last_formulas(text: str) -> str | None:
    """Return the whole formulas of the last line that ends with any, joined by commas."""
    found: list[str] = []
    following = len(text)
    for begin, end in reversed(_formulas(text)):
        formula = text[begin:end].strip()
        if not formula or _WORDS.search(_without_text(formula)):
            continue
        if found and "\n" in text[end:following]:
            break
        found.append(formula)
        following = begin
    return ", ".join(reversed(found)) or None


def whole_number(text: str) -> str | None:
    """Return the text if it is one number whose thousands are separated by blanks, else `None`."""
    return text if _BLANKS.fullmatch(text.strip()) and number_of(text) is not None else None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last `</answer>` and the `<answer>` before it, in any case; `None` without both."""
    lower = text.lower()
    end = lower.rfind(f"</{tag}>")
    begin = lower.rfind(f"<{tag}>", 0, max(end, 0))
    if begin < 0 or len(lower) != len(text):  # a few capitals have longer lower-case letters
        return None if begin < 0 else last_tagged(lower, tag)
    return text[begin + len(tag) + 2 : end]


def last_number(text: str, *, with_unit: bool = False) -> str | None:
    r"""Return the last standalone number (not the 2 of `cm^2` or of `H2O`), with its sign, as `tidy` writes it.

    If the number is part of a formula, the formula is returned whole, from its last `=` on: `$\sqrt{2}$` is not 2.

    Args:
        text: The answer.
        with_unit: Whether to return a known unit behind the number too.
    """
    text = tidy(text)
    for match in reversed(list(NUMBER.finditer(text))):
        start = match.start()
        comma = _DECIMAL_COMMA.search(text[max(0, start - 12) : start])
        if comma and re.fullmatch(r"\d\d?", match.group()):  # `2,74`
            return _sign(text[max(0, start - 20) : start - len(comma[1])]) + comma[1] + match.group()
        if text[start] == "." and text[start - 1 : start].isalnum():
            start += 1  # `Rs.500`
        if not _stands_alone(text[max(0, start - 40) : start]):
            continue
        before = text[max(0, start - 40) : start]
        formula = _formula_around(text, match.start())
        unit = _unit(text, match.end()) if with_unit and formula is None else ""
        found = formula or _signed(before, text[start : match.end()]) + (unit or _suffix(text, match.end()))
        other = _OTHER.search(before)
        if other and (with_unit or _contradicts(other, found, text[match.end() : match.end() + 13])):
            return other.group() + found  # `5 cm | 5 m` is neither answer, nor is `$6$ or $7$`
        return found
    return None


def _contradicts(other: re.Match[str], found: str, behind: str) -> bool:
    """Return whether `6 or 7` is ambiguous: two different numbers of the same thing."""
    first, second = number_of(re.sub(r"\\\)$", "", other[1])), number_of(found)
    named = re.match(r"[\s$]{0,2}([a-zA-Z]*)", behind)
    same_thing = not other[2] or (named is not None and named[1] == other[2])
    if first is None or second is None or not same_thing:
        return False
    is_operand = other.string[: other.start()].rstrip(" $€£¥(").endswith(_OPERATORS)  # `30 + 160 or 190`
    return not is_operand and not same_number(first, second)


def _unit(text: str, end: int) -> str:
    match = _UNIT.match(text, end)
    return match.group() if match and unit_of(match.group()) else ""


def _stands_alone(before: str) -> bool:
    if re.search(r"[\^_]\{?\s?[-+]?$", before):
        return False
    word = re.search(r"(\\?)[^\W\d_]+$", before)
    return word is None or bool(word.group(1))  # `\times5` but not `H2`


def _sign(before: str) -> str:
    """Return `-` if the number is negative; in `3-4`, and after a bullet, the sign does not belong to the number."""
    match = re.search(r"(.?)(-)(\s?)[$€£¥]*$", before.replace("\n", "\x00"), re.DOTALL)
    if match is None:
        return ""
    previous, _, space = match.groups()
    if space:
        return "-" if re.search(r"[=:(]\s*-\s[$€£¥]*$", before) else ""
    return "" if previous.isalnum() or previous in tuple(")]}.-") else "-"


def _signed(before: str, number: str) -> str:
    """Return the number with its sign or a root that is written before it."""
    if _ROOT.search(before[-8:]):
        return rf"\sqrt{{{number}}}"
    return ("-" if _MINUS.search(before[-11:]) else _sign(before[-8:])) + number


def _suffix(text: str, end: int) -> str:
    """Return a percent sign, or a word such as `million`, right behind a number."""
    if re.match(r"\s?(?:%|percent\b)", text[end : end + 9]):
        return "%"
    scale = _SCALED.match(text, end)
    return scale.group() if scale else ""


def _formulas(text: str) -> list[tuple[int, int]]:
    r"""Return start and end of every formula's content: `$…$` within a line, `$$…$$`, `\(…\)`, `\[…\]`. One pass."""
    found: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for mark in _DELIMITER.finditer(text):
        if opened is None:
            opened = mark if mark.group() in _CLOSING else None
        elif mark.group() == _CLOSING[opened.group()]:
            if mark.start() > opened.end():
                found.append((opened.end(), mark.start()))
            opened = None
        elif opened.group() == "$" and mark.group() == "\n":
            opened = None  # the dollar sign was a currency sign
        elif opened.group() != "$$" and mark.group() in ("\\(", "\\[", "$$"):
            opened = mark  # the first was never closed
    return found


def _formula_around(text: str, position: int) -> str | None:
    for begin, end in _formulas(text):
        if begin <= position < end:
            content = text[begin:end]
            right = _right_side(content)
            return right if re.search(r"\d", right) and not _WORDS.search(_without_text(content)) else None
    return None


def last_formula(text: str, *, whole: bool = False) -> str | None:
    """Return the content of the last LaTeX formula; of an equation, the part after its last `=`, unless `whole`."""
    found = [text[begin:end] for begin, end in _formulas(text)]
    formulas = [formula for formula in found if formula.strip() and not _WORDS.search(_without_text(formula))]
    if not formulas:
        return None
    return formulas[-1].strip() if whole else _right_side(formulas[-1]) or None


def last_line(text: str, *, whole: bool = False) -> str | None:
    """Return the end of the last line: the part after `is`, `are`, `:` or `=` (not `=` if `whole`), or all of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    end = re.split(rf"\b(?:is|are)\b|{_COLON}" if whole else rf"\b(?:is|are)\b|=|{_COLON}", lines[-1])[-1]
    if whole:
        end = re.sub(
            r"^\W{0,9}(?:[a-zA-Z]{2,20}\W{1,9}){1,9}(?=[^\W\d_]\s*(?:=|[<>]|\\)|\S{0,20}\d)", "", end
        )  # `So x = 3 or x = -3`
    return end.strip().rstrip(".").strip("* ") or None


def _right_side(formula: str) -> str:
    return _RELATION.split(formula)[-1].strip()


def _without_text(formula: str) -> str:
    return _NO_WORDS.sub("", formula)
