r"""Normalize notation and remove layout: `\left(\tfrac12,√3\right)` becomes `(\frac{1}{2},\sqrt{3})`.

Every pass takes time linear in the length of the text.
"""

from __future__ import annotations

import re

from roll.rewards.mathematics.plain_number import VULGAR_FRACTIONS

__all__ = ["convert_decimals", "convert_degrees", "match_brackets", "normalize_notation"]


def _parse_replacements(text: str) -> dict[str, str]:
    r"""Parse a table such as `− – as -; ÷ as /; ≤ ⩽ as \le` into the replacement of each sign or command.

    A space is added to a replacement that ends with a command, to separate the command from a following letter.
    """
    replacements: dict[str, str] = {}
    for entry in text.split("; "):
        others, _, one = entry.rpartition(" as ")
        replacements |= dict.fromkeys(others.split(), one + (" " if re.search(r"\\[a-zA-Z]+$", one) else ""))
    return replacements


_UNICODE = _parse_replacements(
    "− – as -; \u2217 ⋅ · • as \\cdot; × as \\times; ÷ as /; π as \\pi; ∞ as \\infty; √ as \\sqrt; ≤ ⩽ as \\le; "
    "≥ ⩾ as \\ge; ≠ as \\ne; ≈ as \\approx; ≡ as \\equiv; \u222a as \\cup; ∩ as \\cap; ∈ as \\in; \u2228 as \\lor; "
    "± as \\pm; ∓ as \\mp; ° as ^\\circ; ∅ as \\emptyset; \u211d as \\mathbb{R}; θ as \\theta; α as \\alpha; "
    "β as \\beta; γ as \\gamma; λ as \\lambda; "
    "μ as \\mu; φ as \\phi; ω as \\omega; \u0131 as i; ⟨ as (; ⟩ as ); \u2223 as |"
)
_UNICODE |= dict.fromkeys("\u00a0\u2009\u202f\n\t", " ")
_UNICODE |= {sign: "\\frac{" + value.replace("/", "}{") + "}" for sign, value in VULGAR_FRACTIONS.items()}
_SIGN_PATTERN = re.compile("|".join(map(re.escape, _UNICODE)))
_SUPERSCRIPT_PATTERN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_COMMAND_PATTERN = re.compile(r"\\(?:q?quad|[a-zA-Z]+|.)", re.DOTALL)
_DOUBLED_BACKSLASH_PATTERN = re.compile(
    r"\\\\(?=(?:left|right|[dt]?frac|sqrt|leq?|geq?|text|pi|cup|infty|in|cdot|times|pm|circ)(?![a-zA-Z]))"
)
_LAYOUT = {"\\left", "\\right", "\\mleft", "\\mright", "\\displaystyle", "\\textstyle", "\\quad", "\\qquad", "\\limits"}
_LAYOUT |= {"\\,", "\\;", "\\:", "\\!", "\\ ", "\\(", "\\)", "\\[", "\\]", "\\$", "\\boldsymbol", "\\rm", "\\bf"}
_LAYOUT |= {f"\\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")}
_COMMAND_ALIASES = _parse_replacements(
    r"\leq \leqslant as \le; \geq \geqslant as \ge; \neq as \ne; \lt as <; \gt as >; \simeq as \approx; \div as /; "
    r"\ast \bullet as \cdot; \lbrace as \{; \rbrace as \}; \lbrack as [; \rbrack as ]; \langle as (; \rangle as ); "
    r"\lvert \rvert \vert as |; \varnothing as \emptyset; \imath as i; \degree \textdegree as ^\circ; \vee as \lor; "
    r"\wedge as \land; \% as %; \infin as \infty; \colon as :"
)
_COMMAND_ALIASES |= {"\\thinspace": " ", "\\dbinom": "\\binom", "\\tbinom": "\\binom"}
_COMMAND_ALIASES |= dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac")
_WORD_PATTERN = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}(?![a-zA-Z])")
_COMMAND_BY_WORD = {
    **{name: f"\\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "pi")},
    **{name: f"\\{name}" for name in ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "gcd", "lcm", "cup")},
    **{"infty": "\\infty", "infinity": "\\infty", "oo": "\\infty", "inf": "\\infty", "percent": "%"},
}
_TEXT_COMMAND_PATTERN = re.compile(
    r"\\(?:text|textbf|textrm|textit|textnormal|mathrm|mathit|mbox|operatorname\*?)\s*\{\s*([^{}]*?)\s*\}"
)
_UNIT_LETTERS = frozenset("msghlL")
_VALUE_END = frozenset("0123456789})i")
_OPERATORS_PATTERN = re.compile(r"\*\*|<=|>=|!=|\*")
_PLAIN_OPERATORS = {"**": "^", "<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ", "*": "\\cdot "}
_REPEATING_DECIMAL_PATTERN = re.compile(
    r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d{1,40})\s*\}?(?:\s*\\dot\s*\{?(\d)\}?)?"
)
_DECIMAL_PATTERN = re.compile(r"(?<!\d)(\d*)\.(\d+)")
_POWER_PATTERN = re.compile(r"\^\s*(-?\d{2,}|-\d)")
_SUBSCRIPT_PATTERN = re.compile(r"_\s*(\d{2,})")
_DEGREE_PATTERN = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))")
_TRIGONOMETRIC_PATTERN = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_ROOT_SIGN_PATTERN = re.compile(r"√\s*(\d+)")
_ARGUMENT_PATTERN = re.compile(
    r"\\sqrt\s*\[[^\[\]]*\]|\\[{}]|\\(?:frac|binom|sqrt)(?![a-zA-Z])|\\[a-zA-Z]+|.", re.DOTALL
)
_GROUPED_DIGITS_PATTERN = re.compile(
    r"(?<![\d,.])\d{1,3}(?:(?:,\\!\s?|\\!,|\s?\{\s?,\s?\}\s?|\\[, ]|,)\d{3})+(?![\d,])"
)


def normalize_notation(text: str) -> str:
    """Convert a text to normalized LaTeX without layout commands.

    Thousands separators are removed, except plain commas, which may separate values.
    """
    # In a matrix, two backslashes separate rows.
    if "\\begin" not in text:
        text = _DOUBLED_BACKSLASH_PATTERN.sub(r"\\", text)  # a doubled escape
    # Thousands are joined before `_COMMAND_PATTERN` removes the thin spaces between them.
    text = _GROUPED_DIGITS_PATTERN.sub(_join_thousands, text)
    text = _SUPERSCRIPT_PATTERN.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _ROOT_SIGN_PATTERN.sub(r"\\sqrt{\1}", text)
    text = _SIGN_PATTERN.sub(lambda match: _UNICODE[match.group()], text)
    text = _TEXT_COMMAND_PATTERN.sub(_replace_word, text)
    text = _COMMAND_PATTERN.sub(_replace_command, text).replace("$", " ").replace("~", " ")
    text = _OPERATORS_PATTERN.sub(lambda match: _PLAIN_OPERATORS[match.group()], text)
    text = _WORD_PATTERN.sub(lambda match: _COMMAND_BY_WORD.get(match.group().lower(), match.group()), text)
    text = _REPEATING_DECIMAL_PATTERN.sub(_convert_repeating, text)
    text = _POWER_PATTERN.sub(r"^{\1}", _SUBSCRIPT_PATTERN.sub(r"_{\1}", text))
    return _brace_arguments(_add_braces(text)).strip()


def _join_thousands(match: re.Match[str]) -> str:
    found = match.group()
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+", found):
        return found
    return re.sub(r"\D", "", found)


def _replace_command(match: re.Match[str]) -> str:
    command = match.group()
    return " " if command in _LAYOUT else _COMMAND_ALIASES.get(command, command)


def _replace_word(match: re.Match[str]) -> str:
    r"""Replace `\text{i}` with `i`, `\operatorname{gcd}` with `\gcd`, `\text{ or }` with ` or `; keep other words."""
    word = match[1]
    before = match.string[: match.start()][-4:].rstrip("\\ ,;!~")
    is_unit = word in _UNIT_LETTERS and before[-1:] in _VALUE_END
    if (len(word) < 2 and not is_unit) or word.lower() in ("or", "and"):
        return f" {word} "
    if word.lower() in _COMMAND_BY_WORD:
        return _COMMAND_BY_WORD[word.lower()] + " "
    return f"\\text{{{word}}}"


def _convert_repeating(match: re.Match[str]) -> str:
    r"""Convert a repeating decimal to a fraction: `0.1\overline{6}` becomes `\frac{15}{90}`."""
    whole, fixed, period, last = match.groups()
    period += last or ""
    every, before = int((whole or "0") + fixed + period), int((whole or "0") + fixed)
    return f"\\frac{{{every - before}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def convert_decimals(text: str) -> str:
    r"""Convert decimals to fractions, so that nothing is rounded: `0.25x` becomes `{\frac{25}{100}}x`."""
    return _DECIMAL_PATTERN.sub(
        lambda match: f"{{\\frac{{{int(match[1] + match[2])}}}{{1{'0' * len(match[2])}}}}}", text
    )


def convert_degrees(text: str) -> str:
    r"""Convert degrees to fractions of π if the text has a trigonometric function; otherwise drop the degree signs."""
    return _DEGREE_PATTERN.sub(r"\\cdot \\frac{\\pi }{180}" if _TRIGONOMETRIC_PATTERN.search(text) else "", text)


def match_brackets(text: str, opening: str, closing: str) -> dict[int, int]:
    """Map the position of each opening bracket to the position of its closing bracket.

    Brackets after a backslash and unmatched brackets are ignored.
    """
    found: dict[int, int] = {}
    incomplete_commands: list[int] = []
    for position, character in enumerate(text):
        if character == opening and text[position - 1 : position] != "\\":
            incomplete_commands.append(position)
        elif character == closing and incomplete_commands and text[position - 1 : position] != "\\":
            found[incomplete_commands.pop()] = position
    return found


def _add_braces(text: str) -> str:
    r"""Replace the parentheses after `^` and `\sqrt` with braces: `x^(1/2)` becomes `x^{1/2}`."""
    ends = match_brackets(text, "(", ")")
    characters = list(text)
    for match in re.finditer(r"(?:\^|\\sqrt)\s*\(", text):
        begin = match.end() - 1
        if begin in ends:
            characters[begin], characters[ends[begin]] = "{", "}"
    return "".join(characters)


def _brace_arguments(text: str) -> str:
    r"""Add the missing braces of arguments: `\frac12` becomes `\frac{1}{2}`, and `\sqrt3` becomes `\sqrt{3}`."""
    parts: list[str] = []
    incomplete_commands: list[
        list[int]
    ] = []  # commands that lack arguments: depth of braces, number of missing arguments
    depth = 0
    for match in _ARGUMENT_PATTERN.finditer(text):
        token = match.group()
        wanted = bool(incomplete_commands) and incomplete_commands[-1][0] == depth
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            while incomplete_commands and incomplete_commands[-1][0] > depth:
                incomplete_commands.pop()
            _record_argument(incomplete_commands, depth)
        elif token.startswith(("\\frac", "\\binom", "\\sqrt")):
            _record_argument(incomplete_commands, depth)
            incomplete_commands.append([depth, 1 if token.startswith("\\sqrt") else 2])
        elif wanted and not token.isspace():
            if token.isalnum() or token.startswith("\\"):
                token = f"{{{token}}}"
            _record_argument(incomplete_commands, depth)
        parts.append(token)
    return "".join(parts)


def _record_argument(incomplete_commands: list[list[int]], depth: int) -> None:
    """Record one argument of the innermost incomplete command, if the command is at this depth of braces.

    A command that has all of its arguments is removed from `incomplete_commands`.
    """
    if incomplete_commands and incomplete_commands[-1][0] == depth:
        incomplete_commands[-1][1] -= 1
        if incomplete_commands[-1][1] == 0:
            incomplete_commands.pop()
