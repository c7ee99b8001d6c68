"""The spelling of formulas, and which of them only restate a question, case by case."""

from __future__ import annotations

import pytest

from roll.rewards.mathematics.notation import match_brackets, normalize_notation
from roll.rewards.mathematics.unevaluated import is_unevaluated


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234", "1,234"),  # thousands, or two numbers: decided later
        (r"2{,}220", "2220"),
        (r"10,\!080", "10080"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (r"5\text{m}", r"5\text{m}"),
        (r"2\text{i}", "2 i"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        (r"0.\dot{1}\dot{2}", r"\frac{12}{99}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"{\frac1}{2}", r"{\frac{1}}{2}"),
        (r"\frac\sqrt234", r"\frac\sqrt{2}{3}4"),
        ("x^(1/2)", "x^{1/2}"),
        ("x^12", "x^{12}"),
    ],
)
def test_math_verifier_one_spelling_for_each_thing(text: str, expected: str) -> None:
    assert normalize_notation(text) == expected


def test_math_verifier_brackets_behind_a_backslash_close_nothing() -> None:
    assert match_brackets(r"(a\)b)", "(", ")") == {0: 5}
    assert match_brackets(r"\(a)", "(", ")") == {}


@pytest.mark.parametrize(
    "text", ["84/2", r"\cdot 5", "(17)(23)", "(17)23", "17(23)", "|3|-4", r"x \approx 5+6", "x = 3+4", "17--25"]
)
def test_math_verifier_what_leaves_something_to_do_restates(text: str) -> None:
    assert is_unevaluated(text)


@pytest.mark.parametrize(
    "text",
    ["-5", "+5", "17/1", "1/0", "3/4", r"3\sqrt{13} \approx 10.82", r"x \approx 11", "|3|", r"\frac{84}{2}", "(7)"],
)
def test_math_verifier_a_number_restates_nothing(text: str) -> None:
    assert not is_unevaluated(text)
