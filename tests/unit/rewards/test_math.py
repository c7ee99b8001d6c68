"""Mathematical answers: what counts as the final answer, and what equals the reference."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.final_answer import find_last_box, find_last_number
from roll.rewards.math import score_math
from roll.rewards.mathematics.plain_number import parse_number

RIGHT = [
    # the last number counts
    ("The answer is 7.", "7"),
    ("3 + 4 = 7", "7"),
    ("7\n\n", "7"),
    ("**7**", "7"),
    ("first 3, then 7", "7"),
    ("3+7", "7"),
    # numbers as people write them
    ("7.0", "7"),
    ("007", "7"),
    (".5", "1/2"),
    ("7 / 2", "3.5"),
    ("It is 1 1/2 cups", "3/2"),
    ("total 1,234", "1234"),
    ("1\u202f234", "1234"),
    ("3e8 m/s", "300000000"),
    (r"3 \times 10^8", "300000000"),
    ("-4", "-4"),
    ("\u22124", "-4"),
    ("x = - 4", "-4"),
    ("- 4 apples", "4"),
    ("9 -4 is not asked, but 5-4", "4"),
    # money, units, percent
    ("It costs $18.00", "18"),
    ("costs $3 + $4 = $7", "7"),
    ("paid $10, so 2 left for a $", "2"),
    ("-$5", "-5"),
    ("Rs.500", "500"),
    ("The area is 25 cm^2.", "25"),
    ("He drinks 5 glasses of H2O", "5"),
    ("90°", "90"),
    ("40%", "40"),
    ("40 percent", "0.4"),
    ("0.4", "40%"),
    # boxes and formulas
    (r"\boxed{7} or 8", "7"),
    (r"\boxed{3} and then \boxed{7}", "7"),
    (r"\boxed {7}", "7"),
    (r"so \boxed{x = 5}", "5"),
    (r"\boxed{\text{7}}", "7"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{25\text{ cm}^2}", "25"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\dfrac{3}{4}}", "3/4"),
    (r"\boxed{\frac34}", "0.75"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"),
    (r"$\frac{1}{2}$", "0.5"),
    (r"$25 \text{ cm}^2$", "25"),
    (r"\[ x = 7 \]", "7"),
    (r"\(7\)", "7"),
    # through math-verify
    (r"\boxed{\sqrt{16}}", "4"),
    (r"\boxed{\sqrt{2}}", r"\sqrt{2}"),
    (r"The answer is $\frac{\sqrt{8}}{2}$", r"\sqrt{2}"),
    (r"\boxed{\frac{\pi}{2}}", r"\pi/2"),
    ("$1 + x^2$", "x^2+1"),
    ("The answer is x^2 + 1.", "x^2+1"),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    # words
    (r"\boxed{\text{(B)}}", "B"),
    ("The answer is blue.", "Blue"),
    # a fraction without finite decimals, rounded correctly
    ("0.3333", "1/3"),
    ("0.6667", "2/3"),
]
WRONG = [
    ("The answer is 8.", "7"),
    ("It is 7, no, 8", "7"),
    ("70", "7"),
    ("1.7", "7"),
    ("7.5", "7"),
    ("-7", "7"),
    ("5-4", "-4"),
    (r"\boxed{8} though I said 7", "7"),
    (r"\boxed{3+4}", "7"),
    ("$3 + 4$", "7"),
    (r"\boxed{3 \times 4}", "12"),
    (r"\boxed{18x}", "18"),
    (r"\boxed{x=3\\7}", "x=3"),
    (r"\boxed{7\\x=3}", "x=3"),
    (r"\boxed{3\\7}", "3"),
    (r"\boxed{x=3 = 7 \lor x=3}", "x=3"),
    (r"\boxed{x=7 \vee x=3}", "x=3"),
    (r"\boxed{x}", "7"),
    (r"\boxed{x \in \mathbb{R}}", "x=3"),
    (r"\boxed{\infty - \infty}", "7"),
    (r"\boxed{nan}", "7"),
    (r"\boxed{6, 7}", "7"),
    (r"\boxed{7 \pm 1}", "7"),
    (r"\boxed{0=0}", "y=2x+1"),
    (r"\boxed{0(y-2x-1)=0}", "y=2x+1"),
    (r"\boxed{5^2}", "5"),
    (r"$\sqrt{2}$", "2"),
    (r"\boxed{(2,1)}", "(1,2)"),
    ("green", "blue"),
    ("0.33", "1/3"),
    ("0.3334", "1/3"),
    ("5/0", "5"),
    ("1/2/3", "1/2"),
]


@pytest.mark.parametrize(("text", "reference"), RIGHT)
def test_math_verifier_a_right_answer_is_accepted(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (True, "correct")


@pytest.mark.parametrize(("text", "reference"), WRONG)
def test_math_verifier_a_wrong_answer_is_rejected(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (False, "wrong")


@pytest.mark.parametrize("text", ["", "no idea", "x", "\n"])
def test_math_verifier_no_number_where_one_is_asked_for_is_no_answer(text: str) -> None:
    assert score_math(text, "7", "auto") == (False, "no answer")


def test_math_verifier_extract_says_what_is_looked_at() -> None:
    both = r"\boxed{7}, that is 8"
    assert [score_math(both, "7", kind)[0] for kind in ("auto", "boxed", "last_number")] == [True, True, False]
    assert score_math("7", "7", "boxed") == (False, "no answer")
    assert score_math(r"\boxed{7", "7", "boxed") == (False, "no answer")


def test_math_verifier_only_the_end_of_an_endless_answer_is_read() -> None:
    assert score_math("1 " * 1_000_000 + "so 7", "7", "auto") == (True, "correct")
    assert score_math("7" * 1_000_000, "7", "auto") == (False, "wrong")
    assert score_math("7 " + "x" * 1_000_000, "7", "auto") == (False, "no answer")


def test_math_verifier_boxes_may_hold_braces() -> None:
    assert find_last_box(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert find_last_box(r"\fbox{ \{1, 2\} }") == r"\{1, 2\}"
    assert find_last_box(r"\boxed{1} \boxed{2") is None
    assert find_last_box("nothing") is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 12, b", "12"),
        ("12,345.60 euros", "12,345.60"),
        ("cm^2", None),
        ("x_1", None),
        ("10^{-3}", "10"),
        ("so = -3.", "-3"),
        ("(-3)", "-3"),
        ("50 %", "50%"),
        ("5--4", "4"),
    ],
)
def test_math_verifier_the_last_number_that_stands_for_itself(text: str, number: str | None) -> None:
    assert find_last_number(text) == number


@settings(max_examples=300, deadline=None)
@given(value=st.integers(-(10**12), 10**12), decimals=st.integers(0, 4))
def test_math_verifier_a_number_equals_itself_however_it_is_written_and_no_neighbour(value: int, decimals: int) -> None:
    exact = Fraction(value, 10**decimals)
    sign, digits = "-" if value < 0 else "", str(abs(value)).rjust(decimals + 1, "0")
    whole, point = (digits[: len(digits) - decimals], digits[len(digits) - decimals :])
    plain = f"{sign}{whole}.{point}" if decimals else f"{sign}{whole}"
    grouped = f"{sign}{int(whole):,}" + (f".{point}" if decimals else "")
    for written in (plain, grouped, f"${plain}$", f"{exact.numerator}/{exact.denominator}", f"\\text{{{plain}}}"):
        found = parse_number(written)
        assert found is not None and found.value == exact
        assert score_math(f"So the answer is {written}.", plain, "auto")[0]
        assert score_math(f"Thus \\boxed{{{written}}}", plain, "auto")[0]
    assert not score_math(f"So the answer is {plain}.", f"{exact + Fraction(1, 10**decimals)}", "auto")[0]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="0123456789+-*/^=.,$%\\{}()[] \nabxboxedfrac", max_size=60))
def test_math_verifier_extraction_never_fails(text: str) -> None:
    find_last_number(text)
    find_last_box(text)
    parse_number(text)


def test_math_verifier_importing_the_verifier_imports_no_heavy_library() -> None:
    program = (
        "import sys, roll.rewards.math, roll.rewards.python, roll.rewards.reasoning_gym, roll.cluster.pool\n"
        "heavy = {'torch', 'transformers', 'sympy', 'math_verify', 'reasoning_gym', 'ray', 'vllm'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
