"""Where an answer's text ends in its final answer: the last box, the last number, the last formula."""

from __future__ import annotations

import re

from roll.rewards.plain_number import NUMBER, tidy
from roll.rewards.units import unit_of

__all__ = ["last_boxed", "last_boxes", "last_formula", "last_formulas", "last_line", "last_number", "last_tagged"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DELIMITER = re.compile(r"\$\$|\$|\\[()\[\]]|\n")
_CLOSING = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
_UNIT = re.compile(r"\s?(?:square |cubic )?[a-zA-Z]{1,12}(?:\s?(?:/|per )\s?[a-zA-Z]{1,12})?(?:\^\{?[23]\}?|[²³])?")
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_RELATION = re.compile(r"(?<![<>!\\])=|\\approx|\\equiv|\\Rightarrow|\\implies")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`, braces balanced; `None` where there is none or it is not closed."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    begin = boxes[-1].end()
    depth = 1
    for position in range(begin, len(text)):
        if text[position - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def last_boxes(text: str) -> str | None:
    """What the boxes of the last line that has any hold, with commas between them; `None` where there is none."""
    for line in reversed(text.splitlines()):
        places = [match.start() for match in _BOX.finditer(line)]
        if places:
            parts = [line[begin:end] for begin, end in zip(places, [*places[1:], len(line)], strict=True)]
            found = [last_boxed(part) for part in parts]
            return ", ".join(box for box in found if box) if all(found) else last_boxed(text)
    return None


def last_formulas(text: str) -> str | None:
    """Whole formulas of the last line that has any, with commas between them."""
    for line in reversed(text.splitlines()):
        found = [line[begin:end].strip() for begin, end in _formulas(line)]
        found = [formula for formula in found if formula and not _WORDS.search(_without_text(formula))]
        if found:
            return ", ".join(found)
    return None


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last `</answer>` and the `<answer>` before it, in any case; `None` without both."""
    lower = text.lower()
    end = lower.rfind(f"</{tag}>")
    begin = lower.rfind(f"<{tag}>", 0, max(end, 0))
    if begin < 0 or len(lower) != len(text):  # a few capitals have longer small letters
        return None if begin < 0 else last_tagged(lower, tag)
    return text[begin + len(tag) + 2 : end]


def last_number(text: str, *, with_unit: bool = False) -> str | None:
    """The last number that stands for itself (not the 2 of `cm^2` or of `H2O`), with its sign, as `tidy` writes it.

    A formula that holds it is given whole, from its last `=` on: `$\\sqrt{2}$` is no 2.

    Args:
        text: the answer.
        with_unit: give the unit behind it too, where it is a known one.
    """
    text = tidy(text)
    for match in reversed(list(NUMBER.finditer(text))):
        start = match.start()
        if text[start] == "." and text[start - 1 : start].isalnum():
            start += 1  # `Rs.500`
        if not _stands_alone(text[max(0, start - 40) : start]):
            continue
        formula = _formula_around(text, match.start())
        if formula is not None:
            return formula
        sign = _sign(text[max(0, start - 8) : start])
        unit = _unit(text, match.end()) if with_unit else ""
        return sign + text[start : match.end()] + (unit or _percent(text, match.end()))
    return None


def _unit(text: str, end: int) -> str:
    match = _UNIT.match(text, end)
    return match.group() if match and unit_of(match.group()) else ""


def _stands_alone(before: str) -> bool:
    if re.search(r"[\^_]\{?\s?[-+]?$", before):
        return False
    word = re.search(r"(\\?)[^\W\d_]+$", before)
    return word is None or bool(word.group(1))  # `\times5` but not `H2`


def _sign(before: str) -> str:
    """`-` where the number is negative; in `3-4`, and after a bullet, the sign is not the number's."""
    match = re.search(r"(.?)(-)(\s?)[$€£¥]*$", before.replace("\n", "\x00"), re.DOTALL)
    if match is None:
        return ""
    previous, _, space = match.groups()
    if space:
        return "-" if re.search(r"[=:(]\s*-\s[$€£¥]*$", before) else ""
    return "" if previous.isalnum() or previous in tuple(")]}.-") else "-"


def _percent(text: str, end: int) -> str:
    return "%" if re.match(r"\s?(?:%|percent\b)", text[end : end + 9]) else ""


def _formulas(text: str) -> list[tuple[int, int]]:
    """Begin and end of the content of every formula: `$…$` within a line, `$$…$$`, `\\(…\\)`, `\\[…\\]`. One pass."""
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
            opened = None  # a dollar sign of money
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
    """Content of the last LaTeX formula; of an equation, what stands after its last `=`, unless `whole`."""
    found = [text[begin:end] for begin, end in _formulas(text)]
    formulas = [formula for formula in found if formula.strip() and not _WORDS.search(_without_text(formula))]
    if not formulas:
        return None
    return formulas[-1].strip() if whole else _right_side(formulas[-1]) or None


def last_line(text: str, *, whole: bool = False) -> str | None:
    """The end of the last line: what follows `is`, `are`, `:` or `=` (not that where `whole`), or the whole line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    end = re.split(r"\b(?:is|are)\b|:" if whole else r"\b(?:is|are)\b|[:=]", lines[-1])[-1]
    if whole:
        end = re.sub(
            r"^\W{0,9}(?:[a-zA-Z]{2,20}\W{1,9}){1,9}(?=[^\W\d_]\s*(?:=|[<>]|\\)|\S{0,20}\d)", "", end
        )  # `So x = 3 or x = -3`
    return end.strip().rstrip(".").strip("* ") or None


def _right_side(formula: str) -> str:
    return _RELATION.split(formula)[-1].strip()


def _without_text(formula: str) -> str:
    return re.sub(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}", "", formula)
