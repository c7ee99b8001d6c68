"""Mathematical answers that end in a box, points without brackets, and references that are too long to parse."""

from __future__ import annotations

import time

import pytest

from roll.rewards.math import MAX_REFERENCE_LENGTH, score_math


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (r"\boxed{5", "5"),
        (r"So x = 5. \boxed{5", "5"),
        (r"The answer is \boxed{42", "42"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{5} and then \boxed{6", "6"),
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}"),
        (r"<answer>\boxed{5</answer>", "5"),
        (r"\boxed{Paris", "Paris"),
        (r"\boxed{5", "5" * (MAX_REFERENCE_LENGTH + 1)),
    ],
)
def test_math_verifier_math_of_a_box_that_is_not_closed_is_no_answer(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (False, "no answer")


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"\boxed{5}", "5", True),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", True),
        ("3,4", "(3,4)", True),
        (r"\boxed{3, 4}", "(3,4)", True),
        ("The answer is 3,4", "(3,4)", True),
        ("$3,4$", "(3,4)", True),
        ("(3,4)", "3,4", True),
        ("-3,4", "(-3,4)", True),
        ("3,4,5", "(3,4,5)", True),
        ("4,3", "(3,4)", False),
        ("3.4", "(3,4)", False),
        ("34", "(3,4)", False),
        ("3,4", "[3,4]", False),
        ("3,4,5", "(3,4)", False),
    ],
)
def test_math_verifier_math_of_points_without_brackets(text: str, reference: str, right: bool) -> None:
    assert score_math(text, reference, "auto")[0] is right


LONG = ["x+", "1", "word ", "(", "1,", r"\frac{1}{2}", "7 ", "x^2+3x+", "12,345,", "$x$ ", "$", "1 cm ", r"\boxed{"]


@pytest.mark.parametrize("piece", LONG)
def test_math_verifier_math_of_a_reference_of_20000_characters_takes_no_time(piece: str) -> None:
    reference = (piece * 20_000)[:20_000]
    begin = time.process_time()
    for text in ("5", r"\boxed{5}", "The answer is $x+1$.", reference[:900]):
        assert score_math(text, reference, "auto") in ((False, "wrong"), (False, "no answer"))
    assert time.process_time() - begin < 5


def test_math_verifier_math_of_a_long_reference_is_right_as_the_same_text() -> None:
    reference = ", ".join(map(str, range(1_000)))
    assert len(reference) > MAX_REFERENCE_LENGTH
    assert score_math(reference, reference, "auto") == (True, "correct")
    assert score_math(rf"So \boxed{{{reference}}}.", reference, "auto") == (True, "correct")
    assert score_math(f"The list:\n{reference}", reference, "boxed") == (False, "no answer")
    assert score_math(reference.replace("7", "8"), reference, "auto") == (False, "wrong")
