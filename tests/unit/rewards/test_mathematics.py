r"""Answers that are more than a number: what equals what, what only restates the question, what a hostile one costs."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards.math import prepare_worker, score_math
from roll.rewards.mathematics import parser_caches, symbolic
from roll.rewards.mathematics.compare import is_same_answer
from roll.rewards.mathematics.notation import normalize_notation
from roll.rewards.mathematics.shape import TooDeepError, parse_shape
from roll.rewards.mathematics.symbolic import ComparisonTimeoutError, call_with_limit, has_same_value, is_too_large
from roll.rewards.mathematics.unevaluated import is_unevaluated
from roll.rewards.mathematics.units import parse_unit, split_percent, split_unit


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    """As a worker of the pool: no time limit runs while libraries are imported."""
    prepare_worker()


RIGHT = [
    (r"\boxed{3x}", "3 x"),
    (r"\boxed{5 N}", "5"),
    (r"\boxed{3 oz}", "3"),
    ("The time is 5 pm", "5"),
    (r"\boxed{7 \text{ units squared}}", "7"),
    (r"\boxed{7}", r"7 \text{ squared meters}"),
    (r"\boxed{7 \text{ million}}", "7000000"),
    (r"\boxed{7 \text{ million dollars}}", r"7 \text{ million}"),
    ("The answer is 3.5 million people.", "3500000"),
    ("There is 32 - 28 = $4 million left.", "4"),
    ("The answer is minus 7", "-7"),
    ("The answer is √7", r"\sqrt{7}"),
    ("The answer is 3/4 or 0.75", "0.75"),
    ("That is 50% or 0.5.", "0.5"),
    ("The answer is 1.5 hours or 90 minutes", "90"),
    ("That is 2 dozen or 24 eggs", "24"),
    ("This makes $30 + $160 or $190", "190"),
    ("She has 2 or 3 left, so 12", "12"),
    (r"\boxed{1, 2}", "a=1, b=2"),
    (r"\boxed{2,1}", "x_1=1,x_2=2"),
    (r"\boxed{(1,2)}", "x=1, y=2"),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{1, 2, 3}", r"\{3,2,1\}"),
    ("The solutions are 1, 2 and 3", "1,2,3"),
    (r"\boxed{x=1 \text{ or } x=2}", r"\{1,2\}"),
    (r"\boxed{\frac{1\pm\sqrt5}{2}}", r"\frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2}"),
    (r"\boxed{\emptyset}", r"\{\}"),
    ("So x = 3 or x = -3.", r"\{-3, 3\}"),
    ("The solutions are $x = 1$ and $x = 2$.", "1, 2"),
    ("Hence\nx is \\boxed{1} or \\boxed{2}.", r"\{1,2\}"),
    (r"\boxed{k=2,n=3}", "n=3, k=2"),
    (r"\boxed{\left(\frac{1}{2}, -3\right)}", "(0.5,-3)"),
    (r"\boxed{[0,1)}", "[0, 1)"),
    (r"\boxed{(1,2,3)}", "[1,2,3]"),
    (r"\boxed{(-\infty, 2] \cup (3, \infty)}", r"(3,\infty)\cup(-\infty,2]"),
    (r"\boxed{x \le 2}", r"(-\infty,2]"),
    (r"\boxed{1<x<3}", "(1,3)"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    (
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}}",
        r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
    ),
    (r"\boxed{6\sqrt{3} \text{ cm}^2}", r"6\sqrt{3}"),
    (r"\boxed{500 \text{ m}}", r"0.5 \text{ km}"),
    (r"\boxed{12\pi\text{ cm}}", r"0.12\pi\text{ m}"),
    ("It moves 500 m.", "0.5 km"),
    ("The speed is 36 km/h", "10 m/s"),
    (r"\boxed{36^\circ}", "36"),
    ("It costs 50 cents", "0.5 dollars"),
    (r"\boxed{y=2x+3}", "y = 3+2x"),
    (r"\boxed{2x+3y=6}", "4x+6y-12=0"),
    ("Hence $x^2+y^2=1$.", "x^2+y^2 = 1"),
    (r"\boxed{f(x) = 2x}", "2x"),
    (r"\boxed{5 > x}", "x < 5"),
    (r"\boxed{50\%}", r"\frac{1}{2}"),
    (r"\boxed{\frac{100}{3}\%}", r"\frac{1}{3}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{1.4142}", r"\sqrt{2}"),
    (r"\boxed{0.\overline{3}}", r"\frac13"),
    (r"\boxed{\binom{5}{2}}", "10"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{e^{i\pi}}", "-1"),
    (r"\boxed{\cos 60^\circ}", r"\frac12"),
    (r"\boxed{\sqrt{2}\sin(30°)\tan 45^{\circ}}", r"\frac{\sqrt{2}}{2}"),
    (r"\boxed{2\pi r(r+h)}", r"2\pi r^2 + 2\pi r h"),
    (r"\boxed{|x-2|}", "|2-x|"),
    (r"\boxed{x^{\frac{1}{3}}}", r"\sqrt[3]{x}"),
    (r"\boxed{2^{2016}}", "2^{2016}"),
    (r"\boxed{2^{20160000}}", "2^{20160000}"),
    (r"\boxed{10{,}000x}", "10000x"),
    (r"\boxed{\ln 4}", r"2\ln 2"),
    (r"\boxed{\text{no solution}}", "No solution"),
]

WRONG = [
    (r"\boxed{-56 t^{2}}", "-56 x^{2}"),
    (r"\boxed{-56}", "-56 x^{2}"),
    (r"\boxed{-3}", "-3 i"),
    (r"\boxed{3 x}", "3"),
    (r"\boxed{5}", "5 ab"),
    (r"\boxed{-1_7}", "-1"),
    (r"\boxed{7 \text{ fails}}", "7"),
    (r"\boxed{7 \text{ plus two}}", "7"),
    (r"\boxed{7 \text{ squared}}", "7"),
    ("\\boxed{7 squared}", "7"),
    (r"\boxed{7 \text{ half}}", "7"),
    (r"\boxed{7 \text{ million}}", "7000"),
    ("The answer is 7 million.", r"7 \text{ thousand}"),
    ("The answer is minus 7", "7"),
    ("The answer is negative 7.", "7"),
    ("The answer is √7", "7"),
    ("The answer is sqrt(7)", "7"),
    ("The answer is 6 or 7", "7"),
    ("The answer is 6 apples or 7 apples", "7"),
    ("The answer is $6 or $7", "7"),
    ("The answer is $6$ or $7$.", "7"),
    (r"The answer is \(6\) or \(7\).", "7"),
    ("Either $x=6$ or $x=7$", "7"),
    (r"\boxed{2, 1}", "a=1, b=2"),
    (r"\boxed{a=2,b=1}", "1,2"),
    (r"\boxed{7 \text{ or } 8}", "7"),
    (r"\boxed{1}, \boxed{3}", "1,2"),
    ("First \\boxed{1}.\nThen \\boxed{2}", "1,2"),
    (r"\boxed{k=3,n=2}", "n=3, k=2"),
    (r"\boxed{0=0}", "y=2x+3"),
    (r"\boxed{\cos 60}", r"\frac12"),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{1,2}", r"\{1,2,3\}"),
    (r"\boxed{1,1,2}", r"\{1,2,3\}"),
    (r"\boxed{[1,2]}", "(1,2)"),
    (r"\boxed{(2,1,3)}", "(1,2,3)"),
    (r"\boxed{(-\infty,2)}", r"(-\infty,2]"),
    (r"\boxed{\infty}", r"-\infty"),
    (r"\boxed{x<2}", "x>2"),
    (r"\boxed{x<2}", r"x \le 2"),
    (r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{\begin{pmatrix} 1 & 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\boxed{5 \text{ m}}", r"5\text{ cm}"),
    (r"\boxed{5 \text{ m}}", r"5\text{ kg}"),
    (r"\boxed{5 \text{ cm}^2}", r"5\text{ cm}"),
    ("The speed is 10 km/h", "10 m/s"),
    (r"\boxed{y=2x+4}", "y = 3+2x"),
    (r"\boxed{x=5}", "y=5"),
    (r"\boxed{2x+3y=7}", "4x+6y=12"),
    (r"\boxed{x^2+2x}", "x^2+2x+1"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{1.4143}", r"\sqrt{2}"),
    (r"\boxed{1.414}", r"\sqrt{2}"),
    (r"\boxed{x}", "y"),
    (r"\boxed{2x}", "x"),
    (r"\boxed{\sqrt{x^2}}", "x"),
    (r"\boxed{3+4i}", "3-4i"),
    (r"\boxed{\frac{1+\sqrt5}{2}}", r"\frac{1\pm\sqrt{5}}{2}"),
    (r"\boxed{blue}", "green"),
    (r"\boxed{no solution}", r"(-\infty,2]"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1"),
]

NOTATION = [
    (r"\boxed{18x^2-24x+58=0}", "9x^2-12x+29=0"),
    (r"$\left(\begin{array}{ccccc}0&1&2&3&4\end{array}\right)$", r"\begin{pmatrix}0&1&2&3&4\end{pmatrix}"),
    (r"\boxed{10080}", r"10,\!080"),
    (r"\boxed{10,\!080}", "10080"),
    ("It is 10080.", r"10,\!080"),
    (r"\boxed{2{,}220}", "2220"),
    (r"\boxed{2220}", "2{,}220"),
    (r"\boxed{10\,080}", "10080"),
    ("1000", "1 000"),
    ("1 000", "1000"),
    (r"\boxed{1 000}", "1000"),
    (r"\boxed{32348}", r"\$32,\!348"),
    (r"\boxed{\$32,\!348}", "32348"),
    (r"\$32,\!348", r"\$32,\!348"),
    (r"\boxed{3\sqrt{13} \approx 10.82}", r"3\sqrt{13}"),
    (r"$3\sqrt{13} \approx 10.82$", r"3\sqrt{13}"),
    (r"\boxed{3\sqrt{13} \approx 10.82}", "10.82"),
    (r"\boxed{(2,2)} \text{ and } \boxed{(6,2)}", "(2,2),(6,2)"),
    (r"First \boxed{17}, but \boxed{1,-2}", "1,-2"),
    ("So\n$$\n1,-2\n$$", "1,-2"),
    ("So\n$$\n\\begin{pmatrix}1\\\\2\\end{pmatrix}\n$$", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"so $x \in [-2,7]$", "[-2,7]"),
    (r"\boxed{√51}", r"\sqrt{51}"),
    ("It is √51", r"\sqrt{51}"),
    (r"\boxed{x<2 \text{ or } x>3}", r"(-\infty,2)\cup(3,\infty)"),
    (r"\boxed{|AB|=1}", "1"),
    ("$|AB|=1$", "1"),
    (r"\boxed{1}", "|AB|=1"),
    (r"\boxed{\langle 1,2\rangle}", "(1,2)"),
    (r"\boxed{(1,2)}", r"\langle 1,2\rangle"),
    (r"\boxed{½}", r"\frac12"),
    ("It is ½.", "0.5"),
    (r"\boxed{½}", "0.5"),
    (r"\boxed{0.5}", "½"),
    (r"\boxed{0.\dot{3}}", r"\frac13"),
    (r"\boxed{0.\dot{3}}", "1/3"),
    (r"\boxed{]1,2[}", "(1,2)"),
    (r"\boxed{]-\infty,2]}", r"(-\infty,2]"),
    (r"\boxed{\text{no solution}}", r"\emptyset"),
    ("There is no solution.", r"\emptyset"),
    (r"\boxed{\emptyset}", "no solution"),
    (r"\boxed{\cfrac{1}{2}}", r"\frac12"),
    (r"\boxed{\cfrac{1}{2}}", "0.5"),
    (r"\boxed{x \equiv 3 \pmod 7}", "3"),
    (r"\boxed{x \equiv 3 \pmod 7}", r"x \equiv 3 \pmod{7}"),
    (r"\boxed{3}", r"x \equiv 3 \pmod{7}"),
    (r"\boxed{x \equiv 10 \pmod 7}", r"x \equiv 3 \pmod{7}"),
    (r"\boxed{52_8}", "52_8"),
    (r"\boxed{52_{8}}", "52_8"),
    (r"\boxed{3+2\mathrm{i}}", "3+2i"),
    (r"\boxed{2\imath+3}", "3+2i"),
    (r"\boxed{(1+i)^2}", "2i"),
    (r"\boxed{\frac{1}{i}}", "-i"),
    (r"\boxed{17 \text{ any text}}", "17"),
]

MISREAD = [
    (r"\boxed{1-5051/2^{101}}", "1-5051 / 2^{100}"),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}"),
    (r"\boxed{i=[1,2)}", "i^2=3"),  # sympy subtracts no interval from a number
    (r"\boxed{10x^2-12x+29=0}", "9x^2-12x+29=0"),  # neither has a real solution
    (r"\boxed{\log_{36}(218)=\frac{3}{2}}", r"\log_{36}(216)=\frac{3}{2}"),
    (r"\boxed{\cos \frac{\pi}{4} \cdot 2=1}", r"\cos \frac{\pi}{3} \cdot 2=1"),
    (r"\boxed{x^2+4=0}", "x^2+1=0"),
    (r"\boxed{80, 10}", r"10,\!080"),
    (r"\boxed{10}", r"10,\!080"),
    (r"\boxed{80}", r"10,\!080"),
    (r"\boxed{17 \approx 5}", "5"),
    (r"$17 \approx 5$", "5"),
    (r"\boxed{x = 17 \text{ or } x = 5}", "5"),
    (r"\boxed{\geq 5}", "5"),
    (r"\boxed{17 \mid 5}", "5"),
    (r"\boxed{5 \text{ is wrong}}", "5"),
    (r"\boxed{x \ge 5}", "5"),
    (r"\boxed{\text{not } 5}", "5"),
    (r"\boxed{52_8}", "52_9"),
    (r"\boxed{52_9}", "52_8"),
    (r"\boxed{52}", "52_8"),
    (r"\boxed{42}", "52_8"),
    (r"\boxed{52_8}", "52"),
    (r"\boxed{3-2i}", "3+2i"),
    (r"\boxed{x \equiv 4 \pmod 7}", r"x \equiv 3 \pmod{7}"),
    (r"\boxed{x \equiv 3 \pmod 5}", r"x \equiv 3 \pmod{7}"),
    (r"\boxed{\text{blah 5}}", "5"),
    (r"\boxed{blah 5 blah 7}", "7"),
    (r"\boxed{[1,2[}", "(1,2)"),
    (r"\boxed{]1,2]}", "[1,2)"),
    (r"\boxed{7} or \boxed{8}", "8"),
    (r"\boxed{3\sqrt{13}\approx 11.82}", "11.82"),
    (r"\boxed{x<2 \text{ or } x>4}", r"(-\infty,2)\cup(3,\infty)"),
    (r"\boxed{\pi(R^2-r^2)}", "0"),
    (r"\boxed{2}", r"2\sqrt{1.0000001}"),
    (r"\boxed{5, 5 \text{ or } 6}", "5"),
    (r"\boxed{,}", "5"),
    (r"\boxed{or}", "5"),
    ("The answer is ,", "5"),
    (r"\boxed{,}", "1,2"),
    (r"\boxed{or}", r"\sqrt{2}"),
    ("The answer is ,", "x^2"),
    (r"\boxed{5 cm | 5 m}", "5 cm"),
    (r"\boxed{5 cm | 5 m}", "5 m"),
    ("5 cm | 5 m", "5 cm"),
    ("5 cm | 5 m", "5 m"),
    (r"\boxed{5\text{ cm} | 5\text{ m}}", r"5\text{ m}"),
    (r"\boxed{5\text{ cm} \text{ or } 5\text{ m}}", r"5\text{ m}"),
]

RESTATED = [
    (r"17\cdot23", "391"),
    (r"17\times23", "391"),
    ("(17)(23)", "391"),
    ("17·23", "391"),
    (r"17\;\cdot\;23", "391"),
    ("17*23", "391"),
    ("17(23)", "391"),
    ("17 × 23", "391"),
    (r"\left(17\right)\left(23\right)", "391"),
    (r"17\cdot(23)", "391"),
    (r"x=17\cdot 23", "391"),
    (r"{17}{\cdot}{23}", "391"),
    (r"17 \ast 23", "391"),
    (r"\frac{782}{2}+0", "391"),
    ("400-9", "391"),
    ("20^2-9", "391"),
    ("391+0", "391"),
    (r"391\cdot 1", "391"),
    (r"\frac{17\cdot 46}{2}", "391"),
    (r"\text{17}\cdot\text{23}", "391"),
    ("(17)23", "391"),
    (r"\sum_{k=1}^{1} 391", "391"),
    (r"17\;+\;25", "42"),
    ("17--25", "42"),
    ("84/2", "42"),
    ("7!/120", "42"),
    (r"\gcd(84,126)", "42"),
    (r"\gcd (84, 126)", "42"),
    (r"\operatorname{gcd}(84,126)", "42"),
    ("gcd(84,126)", "42"),
    (r"\text{gcd}(84,126)", "42"),
    (r"\max(42,3)", "42"),
    (r"\lfloor 42.5 \rfloor", "42"),
    (r"84 \div 2", "42"),
    ("84÷2", "42"),
    (r"\frac{7!}{120}", "42"),
    ("3+4", "7"),
    (r"142 \bmod 100", "42"),
    ("−3+45", "42"),
    ("84:2", "42"),
    ("6 7", "42"),
    (r"6{\times}7", "42"),
    (r"(6) \cdot 7", "42"),
    (r"6\left(7\right)", "42"),
    (r"2\cdot 3\cdot 7", "42"),
    (r"42\%100", "42"),
    ("21+21", "42"),
    (r"\binom{7}{2}\cdot 2", "42"),
    (r"\mathrm{lcm}(6,7)", "42"),
    ("0+42", "42"),
    (r"\left|-42\right|+0", "42"),
    ("(40)+(2)", "42"),
    ("40+2=40+2", "42"),
    ("6⋅7", "42"),
    ("6•7", "42"),
    (r"6\bullet 7", "42"),
    ("6\u22177", "42"),
    ("6 x 7", "42"),
    ("42 - 0", "42"),
    (r"\sqrt{1764}\cdot 1", "42"),
    (r"6\sqrt{49}", "42"),
]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    prepare_worker()


@pytest.mark.parametrize(("text", "reference"), [*RIGHT, *NOTATION])
def test_math_verifier_a_right_answer_is_accepted(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (True, "correct")


@pytest.mark.parametrize(("text", "reference"), [*WRONG, *MISREAD])
def test_math_verifier_a_wrong_answer_is_rejected(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto")[0] is False


@pytest.mark.parametrize(("text", "reference"), RESTATED)
def test_math_verifier_a_calculation_is_no_answer_to_a_number(text: str, reference: str) -> None:
    for written in (rf"\boxed{{{text}}}", f"${text}$", rf"\boxed{{x = {text}}}"):
        assert score_math(written, reference, "auto")[0] is False


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (r"2^{10}", "1024"),
        (r"\sqrt{1764}", "42"),
        ("5!", "120"),
        (r"\binom{5}{2}", "10"),
        (r"\frac{84}{2}", "42"),
        (r"4.2\cdot 10^1", "42"),
        ("-(-42)", "42"),
        (r"42\text{ apples}", "42"),
        ("6/4", "1.5"),
        (r"1\frac12", "1.5"),
    ],
)
def test_math_verifier_one_notation_of_a_number_is_an_answer(text: str, reference: str) -> None:
    assert not is_unevaluated(text)
    assert score_math(rf"\boxed{{{text}}}", reference, "auto")[0]


def trees(depth: int) -> st.SearchStrategy[tuple[str, sympy.Expr]]:
    """A formula in LaTeX, and independently the same as sympy computes it."""
    numbers = st.integers(1, 9).map(lambda n: (str(n), sympy.Integer(n)))
    leaves = st.one_of(numbers, st.sampled_from([("x", sympy.Rational(7, 5)), (r"\pi ", sympy.pi)]))
    if depth == 0:
        return leaves
    below = trees(depth - 1)
    return st.one_of(
        leaves,
        st.tuples(below, below).map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        st.tuples(below, below).map(lambda p: (f"({p[0][0]}-{p[1][0]})", p[0][1] - p[1][1])),
        st.tuples(below, below).map(lambda p: (rf"{p[0][0]} \cdot {p[1][0]}", p[0][1] * p[1][1])),
        st.tuples(below, numbers).map(lambda p: (rf"\frac{{{p[0][0]}}}{{{p[1][0]}}}", p[0][1] / p[1][1])),
        st.tuples(below, st.integers(0, 4)).map(lambda p: (f"({p[0][0]})^{{{p[1]}}}", p[0][1] ** p[1])),
        below.map(lambda p: (rf"\sqrt{{({p[0]})^2}}", sympy.sqrt(p[1] ** 2))),
        below.map(lambda p: (rf"\sin({p[0]})", sympy.sin(p[1]))),
    )


@settings(max_examples=12, deadline=None)
@given(tree=trees(2))
def test_math_verifier_a_formula_equals_itself_written_otherwise_and_nothing_next_to_it(
    tree: tuple[str, sympy.Expr],
) -> None:
    text, _ = tree
    assert is_same_answer(f"1 + ({text}) - 1", text)
    assert not is_same_answer(f"({text}) + 1", text)
    assert not is_same_answer(f"({text}) + 0.0000001", text)


def test_math_verifier_a_variable_may_be_written_as_a_sum() -> None:
    assert is_same_answer("1 + (x) - 1", "x") and is_same_answer(r"\frac{2x}{2}", "x")
    assert not is_same_answer("1 + (x) - 2", "x") and not is_same_answer("y", "x")
    assert not has_same_value(r"\{1, 2\}", "x") and not has_same_value("x=1", "x")  # neither has a value of its own


HOSTILE = {
    "a tower of powers": r"\boxed{10^{10^{10}}}",
    "a long tower": r"\boxed{2^{2^{2^{2^{2^2}}}}}",
    "a plain tower": r"\boxed{10**10**10}",
    "a tower without braces": "$" + "x^" * 400 + "2$",
    "a factorial": r"\boxed{1000000!}",
    "factorials of factorials": r"\boxed{((100!)!)!}",
    "a binomial": r"\boxed{\binom{10000000}{5000000}}",
    "exponentials": r"\boxed{\exp(\exp(\exp(100)))}",
    "a huge angle": r"\boxed{\sin(10^{10^{5}})}",
    "nested radicals": r"\boxed{" + r"\sqrt{" * 200 + "2" + "}" * 201,
    "many radicals": r"\boxed{" + r"\sqrt{2}+" * 100 + "1}",
    "nested fractions": r"\boxed{" + r"\frac{1}{1+" * 60 + "2" + "}" * 61,
    "nested brackets": r"\boxed{" + "(" * 400 + "2" + ")" * 400 + "}",
    "nested lists": r"\boxed{" + "[" * 400 + "]" * 400 + "}",
    "nested sets": r"\boxed{" + r"\{" * 300 + r"\}" * 300 + "}",
    "open brackets": "(1," * 5_000,
    "deep braces": "{" * 20_000,
    "a long number": r"\boxed{" + "9" * 900 + "}",
    "a megabyte of digits": "8" * 1_000_000,
    "a megabyte of formulas": "$x$ " * 250_000,
    "a megabyte of open boxes": r"\boxed{" * 140_000,
    "open formulas": r"\(" * 10_000,
    "open displays": r"\[" * 10_000,
    "dollar signs": "$" * 20_000,
    "open dollar signs": "$$a" * 6_000,
    "numbers": "1 " * 10_000 + "$",
    "signs": "-" * 20_000 + "5",
    "equations": "=".join(["1"] * 5_000),
    "fractions without arguments": r"\frac" * 4_000,
    "a long period": r"\boxed{0." + "3" * 900 + "}",
    "a power of a sum": r"\boxed{(x+1)^{100000}}",
    "a long sum": r"\boxed{" + "+".join(["x"] * 450) + "}",
    "whitespace": "1" + " " * 19_000,
    "slashes": "1/" * 10_000,
    "words with digits": "H2" * 10_000,
    "exponents": "1e" * 10_000,
    "commas": "1,111" * 5_000,
    "mixed numbers": "1 1/" * 5_000,
    "a large set": r"\boxed{\{" + ",".join(map(str, range(10, 99))) + r"\}}",
    "an open text": r"\boxed{x" + r" \text{a} " * 14 + "!}",
    "many texts": r"\boxed{x" + r" \text{a} " * 90 + "!}",
    "percent signs": r"\boxed{5" + " " * 900 + "}",
    "open matrices": r"\boxed{" + r"\begin{pmatrix}" * 60 + "}",
    "sums of large powers": r"\boxed{" + ",".join([f"x^{{4000}}+x^{{{n}}}+1" for n in range(3000, 3012)]) + "}",
    "many boxes": r"\boxed{1}, " * 1_900,
    "a binomial of letters": r"\boxed{\binom{n}{k}" * 1_000,
    "equivalences": r"\boxed{" + r"1 \equiv " * 100 + r"6 \pmod{8}}",
    "approximations": r"\boxed{" + r"1 \approx " * 100 + "8}",
    "percent and currency": r"\boxed{" + r"\%$." * 240 + "}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_math_verifier_hostile_answers_cost_little(kind: str) -> None:
    prepare_worker()
    for reference in ("7", "x^2+1", r"\{1,2\}"):
        started = time.process_time()
        assert score_math(HOSTILE[kind], reference, "auto", 1.0)[0] is False
        assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "text", [r"\boxed{,}", r"\boxed{or}", "The answer is ,", r"\boxed{;}", r"\boxed{\lor}", r"\boxed{=}"]
)
@pytest.mark.parametrize("reference", ["1,2", r"\{1,2\}", "5", r"\sqrt{2}", "x=5", "(1,2)", r"[0,1)\cup(2,3)", "yes"])
def test_math_verifier_separators_alone_are_no_answer(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto")[0] is False


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                *"0123456789+-*/^=.,;$%(){}[]|<>!_&x i",
                "\\",
                "\\\\",
                "or",
                "and",
                r"\frac",
                r"\sqrt",
                r"\pm",
                r"\cup",
                r"\le ",
                r"\begin{pmatrix}",
                r"\end{pmatrix}",
                r"\text{a}",
                r"\boxed{",
                r"\approx ",
                r"\equiv ",
                r"\pmod",
                r"\in ",
                "½",
                "√",
            ]
        ),
        max_size=30,
    )
)
def test_math_verifier_readers_of_an_answer_never_fail(pieces: list[str]) -> None:
    text = "".join(pieces)
    clean = normalize_notation(text)
    parse_shape(clean)
    is_unevaluated(text)
    split_unit(text)
    split_percent(text)


@pytest.mark.parametrize(
    ("reader", "piece"),
    [
        (reader, piece)
        for reader in (normalize_notation, parse_shape, is_unevaluated, split_unit, split_percent, is_too_large)
        for piece in [
            "(",
            ")",
            "{",
            "}",
            " ",
            r"\text{a} ",
            r"\frac",
            "1,",
            ",",
            "1/",
            "^",
            "%",
            "$",
            r"\ ",
            "]1,2[",
            "x=",
            r"\cup",
            r"\begin{pmatrix}",
            "1 \\\\ ",
            "9",
            "a",
            r"\sqrt[",
            "√1",
            "½",
            "-",
            ".",
            r"\,000",
            " or ",
        ]
    ],
)
def test_math_verifier_readers_take_linear_time(reader: object, piece: str) -> None:
    """Thirty times the longest answer that is compared takes no more than a fraction of a second."""
    assert callable(reader)
    started = time.process_time()
    with contextlib.suppress(TooDeepError):
        reader((piece * 30_000)[:30_000])
    assert time.process_time() - started < 8.0  # a quadratic one takes minutes; other work on the machine may triple it


def test_math_verifier_what_explodes_is_refused_by_its_looks() -> None:
    assert is_too_large(r"\sum x^{10^{10}}")
    assert is_too_large("9^9^9")
    assert is_too_large("f" + "(" * 40)
    assert is_too_large("a!!")
    assert is_too_large(r"\binom{10000000}{5000000}")
    assert not is_too_large(r"\int_0^1 x^{2} dx + e^{x^2} + 2^{2016} + \binom{100}{50}")


def test_math_verifier_a_slow_comparison_is_interrupted() -> None:
    prepare_worker()
    with pytest.raises(ComparisonTimeoutError):
        call_with_limit(0.5, has_same_value, r"\int e^{x^{2}} \sin x^{3} \log x dx", "7")
    assert has_same_value(r"\sqrt{4}", "2")  # and no alarm is left behind


def test_math_verifier_an_alarm_that_a_destructor_swallows_rings_again_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGALRM)

    def compare() -> None:
        Interrupted()
        signal.raise_signal(signal.SIGALRM)

    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with pytest.raises(ComparisonTimeoutError):
        call_with_limit(60.0, compare)
    assert not said
    Unheard = type("Unheard", (), {"__del__": lambda _: 1 / 0})
    call_with_limit(60.0, Unheard)
    assert len(said) == 1  # everything else is heard


def test_math_verifier_a_matrix_is_compared_like_any_other_value() -> None:
    two = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
    assert has_same_value(two, two)
    assert not has_same_value(two, r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}")
    assert not has_same_value("x", two)
    assert not has_same_value(two, "x")


def test_math_verifier_an_alarm_that_rings_as_a_comparison_ends_stays_inside() -> None:
    """At each of the calls and returns that the interpreter reports while a limited function begins, runs and ends."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    outcomes = []
    try:
        for moment in range(40):
            left = itertools.count(moment, -1)

            def profiled(*_: object, left: Iterator[int] = left) -> None:
                if next(left) == 0:
                    signal.raise_signal(signal.SIGALRM)

            sys.setprofile(profiled)
            try:
                outcomes.append(call_with_limit(60.0, int, "7"))
            except ComparisonTimeoutError:
                outcomes.append(None)
            finally:
                sys.setprofile(None)
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert None in outcomes and set(outcomes) == {None, 7}


def test_math_verifier_units_by_hand() -> None:
    speed, there = parse_unit("km/h"), parse_unit(r"\text{ m}/\text{s}")
    assert speed is not None and there is not None
    assert speed.dimension == there.dimension == (("length", 1), ("time", -1))
    assert speed.factor / there.factor == Fraction(1000, 3600)
    area = parse_unit("square feet")
    assert area is not None and area.factor == Fraction(3048, 10000) ** 2
    cube, litre = parse_unit("cm^3"), parse_unit("mL")
    assert cube is not None and cube == litre
    assert parse_unit("apples") is None and parse_unit("") is None
    assert split_unit(r"\pi r^2 h") == (r"\pi r^2 h", None)
    assert split_unit("2 x") == ("2 x", None)
    assert split_unit(r"6\sqrt{3} \text{ apples}") == (r"6\sqrt{3}", None)


def test_math_verifier_what_the_parser_remembers_of_new_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_worker()
    usual = parser_caches.count_cached()
    monkeypatch.setattr(parser_caches, "MAX_CACHED_STATES", usual + 300)
    pieces = [r"\frac{a}{b}", r"\sqrt{c}", r"\sin x", r"|y|", r"(z)^{2}", r"n!", r"\binom{k}{2}", r"\log_2 t"]
    remembered = []
    for first in pieces:
        for second in pieces:
            symbolic._parse(f"{first}+2{second}{first}")
            remembered.append(parser_caches.count_cached())
    assert max(remembered) <= usual + 300
    assert min(remembered[1:]) < remembered[0]  # it began anew at least once, and understands as before
    assert has_same_value(r"\frac{x^2-1}{x-1}", "x+1") and not has_same_value(r"\sqrt{x}", "x")
