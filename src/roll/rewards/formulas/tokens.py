"""LaTeX and plain formulas as tokens: one spelling for each thing, nothing that is only layout."""

from __future__ import annotations

import re

from roll.rewards.formulas.nodes import NotUnderstoodError, TooLargeError

__all__ = ["CLOSING", "OPENING", "RELATIONS", "SEPARATOR", "split", "tokens_of"]

MOST_CHARACTERS = 1_000
MOST_TOKENS = 600
SEPARATOR = ","
OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
CLOSING = set(OPENING.values())
RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\ne"}

_UNICODE = {
    "−": "-",
    "–": "-",
    "×": "\\times ",
    "⋅": "\\cdot ",
    "·": "\\cdot ",
    "÷": "/",
    "π": "\\pi ",
    "∞": "\\infty ",
    "√": "\\sqrt ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "≈": "=",
    "\u222a": "\\cup ",
    "∈": "\\in ",
    "±": "\\pm ",
    "²": "^{2}",
    "³": "^{3}",
    "°": "^{\\circ}",
    "∅": "\\emptyset ",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "λ": "\\lambda ",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
}
_FOREIGN = re.compile("|".join(map(re.escape, _UNICODE)))
_LAYOUT = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle|textstyle|quad|qquad|limits|boxed(?=\s*[^\s{]))(?![a-zA-Z])\.?"
    r"|\\[,;:! ]|~|\$|\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))|\\(?:degree|circ)(?![a-zA-Z])"
)
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![a-zA-Z]))|\\degree(?![a-zA-Z])")
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)")
_SAME = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\dbinom": "\\binom",
    "\\tbinom": "\\binom",
    "\\leq": "\\le",
    "\\leqslant": "\\le",
    "\\geq": "\\ge",
    "\\geqslant": "\\ge",
    "\\neq": "\\ne",
    "\\lt": "<",
    "\\gt": ">",
    "\\approx": "=",
    "\\equiv": "=",
    "\\cdot": "*",
    "\\times": "*",
    "\\ast": "*",
    "\\div": "/",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\lvert": "|",
    "\\rvert": "|",
    "\\vert": "|",
    "\\varnothing": "\\emptyset",
    "\\%": "%",
    "\\lor": SEPARATOR,
    "\\land": SEPARATOR,
    ";": SEPARATOR,
    "**": "^",
    "<=": "\\le",
    ">=": "\\ge",
    "!=": "\\ne",
}
_NAMES = {
    **{name: f"\\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "pi")},
    **{name: f"\\{name}" for name in ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "gcd", "lcm")},
    "infty": "\\infty",
    "infinity": "\\infty",
    "oo": "\\infty",
    "inf": "\\infty",
    "and": SEPARATOR,
    "or": SEPARATOR,
    "asin": "\\arcsin",
    "acos": "\\arccos",
    "atan": "\\arctan",
    "abs": "\\abs",
}
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<text>\\(?:text|textbf|textrm|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{[^{}]*\})"
    r"|(?P<thousands>\d{1,3}(?:\{,\}\d{3})+(?!\d)(?:\.\d+)?)"
    r"|(?P<repeating>\d*\.\d*\\overline\s*\{\s*\d{1,40}\s*\})"
    r"|(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<command>\\[a-zA-Z]+|\\[{}%|&])"
    r"|(?P<pair>\*\*|<=|>=|!=)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<mark>.)",
    re.DOTALL,
)
_MARKS = set("+-*/^=<>(){}[]|!%,;_")
_AMBIGUOUS = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")


def tokens_of(text: str) -> list[str]:
    """The formula as tokens: numbers, single letters, commands, marks; `,` also for `and` and `or`.

    Raises:
        NotUnderstoodError: it holds words, or signs that are not known here.
        TooLargeError: it is longer than any sensible answer.
    """
    if len(text) > MOST_CHARACTERS:
        raise TooLargeError
    text = _FOREIGN.sub(lambda match: _UNICODE[match.group()], text)
    if _AMBIGUOUS.search(text):
        raise NotUnderstoodError  # `(1,234)` is a number in brackets or a point
    if _TRIGONOMETRY.search(text):
        text = _DEGREE.sub(r"\\frac{\\pi}{180}", text)
    found: list[str] = []
    for match in _TOKEN.finditer(_LAYOUT.sub(" ", text)):
        kind, token = match.lastgroup, match.group()
        if kind == "space":
            continue
        if kind == "text":
            found += _words(token[token.index("{") + 1 : -1].strip())
        elif kind == "word":
            found += _words(token)
        elif kind == "thousands":
            found.append(token.replace("{,}", ""))
        elif kind == "repeating":
            found.append("".join(token.split()))
        elif kind == "mark" and token not in _MARKS:
            raise NotUnderstoodError
        else:
            found.append(_SAME.get(token, token))
    if len(found) > MOST_TOKENS:
        raise TooLargeError
    return found


def _words(word: str) -> list[str]:
    """A name as a command, up to two letters as variables; other words are not for this reader."""
    if word.lower() in _NAMES:
        return [_NAMES[word.lower()]]
    if not word:
        return []
    if len(word) > 2 or not word.isalpha():
        raise NotUnderstoodError
    return list(word)


def split(tokens: list[str], at: set[str]) -> list[list[str]]:
    """The parts between the tokens in `at` that stand outside all brackets.

    Raises:
        NotUnderstoodError: brackets are not balanced.
    """
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        if token in OPENING:
            depth += 1
        elif token in CLOSING:
            depth -= 1
            if depth < 0:
                raise NotUnderstoodError
        if depth == 0 and token in at:
            parts.append([])
        else:
            parts[-1].append(token)
    if depth:
        raise NotUnderstoodError
    return parts
