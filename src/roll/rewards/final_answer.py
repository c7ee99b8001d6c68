"""Where an answer's text ends in its final answer: the last box, the last number, the last formula."""

from __future__ import annotations

import re

from roll.rewards.plain_number import NUMBER, tidy

__all__ = ["last_boxed", "last_formula", "last_line", "last_number"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
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


def last_number(text: str) -> str | None:
    """The last number that stands for itself (not the 2 of `cm^2` or of `H2O`), with its sign, as `tidy` writes it.

    A formula that holds it is given whole, from its last `=` on: `$\\sqrt{2}$` is no 2.
    """
    text = tidy(text)
    for match in reversed(list(NUMBER.finditer(text))):
        start = match.start()
        if text[start] == "." and text[start - 1 : start].isalnum():
            start += 1  # `Rs.500`
        if _stands_alone(text[:start][-40:]):
            formula = _formula_around(text, match.start())
            return (
                formula
                if formula is not None
                else _sign(text[:start][-8:]) + text[start : match.end()] + _percent(text, match.end())
            )
    return None


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


def _formula_around(text: str, position: int) -> str | None:
    for match in _FORMULA.finditer(text):
        if match.start() < position < match.end():
            content = next(part for part in match.groups() if part is not None)
            right = _right_side(content)
            return right if re.search(r"\d", right) and not _WORDS.search(_without_text(content)) else None
    return None


def last_formula(text: str) -> str | None:
    """Content of the last LaTeX formula; of an equation, what stands after its last `=`."""
    found = [next(part for part in groups if part) for groups in _FORMULA.findall(text)]
    formulas = [formula for formula in found if not _WORDS.search(_without_text(formula))]
    return (_right_side(formulas[-1]) or None) if formulas else None


def last_line(text: str) -> str | None:
    """The end of the last line: what follows `is`, `:` or `=`, or the whole line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    end = re.split(r"\bis\b|[:=]", lines[-1])[-1].strip().rstrip(".").strip("* ")
    return end or None


def _right_side(formula: str) -> str:
    return _RELATION.split(formula)[-1].strip()


def _without_text(formula: str) -> str:
    return re.sub(r"\\(?:text|textrm|mathrm|mbox|operatorname)\s*\{[^{}]*\}", "", formula)
