"""Answers that are more than a number: what equals what, how the fast verifier agrees with the slow one, its bounds."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rewards import math as mathematics
from roll.rewards.formulas import NotUnderstoodError, TooLargeError, same_answer
from roll.rewards.formulas.compute import compute, inexact
from roll.rewards.formulas.parse import parse_value
from roll.rewards.formulas.tokens import tokens_of
from roll.rewards.math import prepare_worker, quick_verdict, score_math
from roll.rewards.slow_math import looks_explosive, symbolically_equal
from roll.rewards.units import split_unit, unit_of

RIGHT = [
    # sets and lists
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
    # points and intervals
    (r"\boxed{\left(\frac{1}{2}, -3\right)}", "(0.5,-3)"),
    (r"\boxed{[0,1)}", "[0, 1)"),
    (r"\boxed{(1,2,3)}", "[1,2,3]"),
    (r"\boxed{(-\infty, 2] \cup (3, \infty)}", r"(3,\infty)\cup(-\infty,2]"),
    (r"\boxed{x \le 2}", r"(-\infty,2]"),
    (r"\boxed{1<x<3}", "(1,3)"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    # matrices
    (
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & \frac{8}{2} \end{pmatrix}}",
        r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]",
    ),
    # units
    (r"\boxed{6\sqrt{3} \text{ cm}^2}", r"6\sqrt{3}"),
    (r"\boxed{500 \text{ m}}", r"0.5 \text{ km}"),
    (r"\boxed{12\pi\text{ cm}}", r"0.12\pi\text{ m}"),
    ("It moves 500 m.", "0.5 km"),
    ("The speed is 36 km/h", "10 m/s"),
    (r"\boxed{36^\circ}", "36"),
    ("It costs 50 cents", "0.5 dollars"),
    # equations
    (r"\boxed{y=2x+3}", "y = 3+2x"),
    (r"\boxed{2x+3y=6}", "4x+6y-12=0"),
    (r"Hence $x^2+y^2=1$.", "x^2+y^2 = 1"),
    (r"\boxed{f(x) = 2x}", "2x"),
    (r"\boxed{5 > x}", "x < 5"),
    # percent
    (r"\boxed{50\%}", r"\frac{1}{2}"),
    (r"\boxed{\frac{100}{3}\%}", r"\frac{1}{3}"),
    # values
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1"),
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
]


@pytest.mark.parametrize(("text", "reference"), RIGHT)
def test_a_right_answer_is_accepted(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (True, "correct")


@pytest.mark.parametrize(("text", "reference"), WRONG)
def test_a_wrong_answer_is_rejected(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto") == (False, "wrong")


def test_typical_formulas_never_need_the_slow_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> bool:
        raise AssertionError("the slow verifier was asked")

    monkeypatch.setattr(mathematics, "symbolically_equal", slow)
    assert all(score_math(text, reference, "auto")[0] for text, reference in RIGHT)
    assert not any(score_math(text, reference, "auto")[0] for text, reference in WRONG)


FORMS = [
    ["2", r"\frac{4}{2}", r"\sqrt{4}", "1+1", r"2^1", r"\log_{10} 100", r"\frac{2x}{x}"],
    [r"\frac{1}{2}", "0.5", r"2^{-1}", r"\sin\frac{\pi}{6}", r"\frac{x}{2x}"],
    [r"\sqrt{2}", r"\frac{2}{\sqrt{2}}", r"2^{\frac{1}{2}}", r"2\cos\frac{\pi}{4}"],
    ["x^2+2x+1", "(x+1)^2", "x(x+2)+1", "(x+1)(1+x)"],
    ["x+1", "1+x", r"\frac{x^2-1}{x-1}"],
    [r"\pi", r"\frac{2\pi}{2}", r"\pi + 0"],
    [r"\frac{a+b}{2}", r"\frac{a}{2}+\frac{b}{2}", "0.5(a+b)"],
    [r"\{1,2\}", r"\{2,1\}", r"\{2,\frac{2}{2}\}"],
    ["(1,3)", r"(1,\sqrt{9})"],
    ["[1,3]", r"[1,\frac{6}{2}]"],
    [r"(-\infty,3)", r"(-\infty,1+2)"],
    ["x=3", r"x=\sqrt{9}"],
    [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&1+1\\3&4\end{pmatrix}"],
    ["3+2i", "2i+3"],
    [r"e^{2x}", r"(e^x)^2", r"e^x e^x"],
]


def test_the_fast_verifier_says_what_the_slow_one_says() -> None:
    """Every form with every other, in both orders: equal within a class; whatever is decided is decided alike."""
    prepare_worker()
    texts = [(text, index) for index, forms in enumerate(FORMS) for text in forms]
    decided, wrong = 0, []
    for (answer, i), (reference, j) in itertools.product(texts, texts):
        try:
            fast = same_answer(answer, reference)
        except NotUnderstoodError:
            continue
        decided += 1
        if fast != (i == j):
            wrong.append((answer, reference, fast))
    assert not wrong
    assert decided >= 0.9 * len(texts) ** 2
    sample = [pair for k, pair in enumerate(itertools.product(texts, texts)) if k % 7 == 0]
    slow_differs = []
    for (answer, _), (reference, _) in sample:
        try:
            fast = same_answer(answer, reference)
        except NotUnderstoodError:
            continue
        if symbolically_equal(answer, reference, 20.0) != fast:
            slow_differs.append((answer, reference, fast))
    assert slow_differs == []


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


@settings(max_examples=150, deadline=None)
@given(tree=trees(3))
def test_formulas_have_the_values_that_sympy_computes(tree: tuple[str, sympy.Expr]) -> None:
    text, expected = tree
    value = compute(parse_value(tokens_of(text)), {"x": Fraction(7, 5)})
    exact = sympy.N(expected, 60)
    difference = abs(sympy.Float(str(inexact(value)), 60) - exact)
    assert difference <= sympy.Float("1e-30") * max(1, abs(exact))


@settings(max_examples=150, deadline=None)
@given(tree=trees(2))
def test_a_formula_equals_itself_written_otherwise_and_nothing_next_to_it(tree: tuple[str, sympy.Expr]) -> None:
    text, _ = tree
    assert same_answer(f"1 + ({text}) - 1", text)
    assert not same_answer(f"({text}) + 1", text)
    assert not same_answer(f"({text}) + 0.0000001", text)


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
    "white space": "1" + " " * 19_000,
    "slashes": "1/" * 10_000,
    "words with digits": "H2" * 10_000,
    "exponents": "1e" * 10_000,
    "commas": "1,111" * 5_000,
    "mixed numbers": "1 1/" * 5_000,
    "a large set": r"\boxed{\{" + ",".join(map(str, range(10, 99))) + r"\}}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_cost_little_and_never_reach_the_slow_verifier(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: object) -> bool:
        raise AssertionError("the slow verifier was asked")

    if kind != "a large set":
        monkeypatch.setattr(mathematics, "symbolically_equal", slow)
    for reference in ("7", r"\sqrt{2}", "x^2+1", r"\{1,2\}"):
        started = time.process_time()
        assert score_math(HOSTILE[kind], reference, "auto")[0] is False
        assert time.process_time() - started < 1.0


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_compared_in_place_holds_nobody_up(kind: str) -> None:
    started = time.process_time()
    for reference in ("7", r"\sqrt{2}", "x^2+1", r"\{1,2\}", "y=x+8"):
        for extract in ("auto", "last_number"):
            found = quick_verdict(HOSTILE[kind], reference, extract)
            assert found is None or found[0] is False
    assert (time.process_time() - started) / 10 < 0.1


@pytest.mark.parametrize("reference", ["7", "1/3", "0.5 km", "40%", "1234", "-3.5"])
def test_what_is_decided_in_place_is_what_the_worker_would_say(reference: str) -> None:
    texts = [text for text, _ in [*RIGHT, *WRONG]]
    texts += [
        "7",
        "It is 7.0",
        "x = 7",
        "0.3333",
        "500 m",
        "0.4",
        "40 percent",
        "$1,234$",
        "-3.5",
        "",
        "3 + 4",
        r"\boxed{3+4}",
    ]
    decided = 0
    for text in texts:
        found = quick_verdict(text, reference, "auto")
        if found is not None:
            decided += 1
            assert found == score_math(text, reference, "auto")
    assert decided > 12
    assert quick_verdict(r"\boxed{\int_0^1 x dx}", "7", "auto") is None


def test_what_explodes_only_in_the_slow_verifier_is_refused_by_its_looks() -> None:
    assert looks_explosive(r"\sum x^{10^{10}}")
    assert looks_explosive("9^9^9")
    assert looks_explosive("f" + "(" * 40)
    assert looks_explosive("a!!")
    assert not looks_explosive(r"\int_0^1 x^{2} dx + e^{x^2} + 2^{2016}")


def test_a_slow_verification_is_interrupted() -> None:
    prepare_worker()
    with pytest.raises(TimeoutError):
        symbolically_equal(r"\int e^{x^{2}} \sin x^{3} \log x dx", "7", 0.5)
    assert symbolically_equal(r"\sqrt{4}", "2", 20.0)  # and no alarm is left behind


@pytest.mark.parametrize("text", ["", "1,234x", "f(x)", r"\foo", "{", "1..2", r"\sqrt12", "101_2", "a^b^"])
def test_what_is_not_understood_is_left_to_the_slow_verifier(text: str) -> None:
    with pytest.raises(NotUnderstoodError):
        same_answer(text, "x+1")


def test_a_reference_that_is_too_large_is_not_the_answers_fault() -> None:
    with pytest.raises(NotUnderstoodError):
        same_answer("7", "2^{2^{100}}")
    with pytest.raises(TooLargeError):
        same_answer("2^{2^{100}}", "7")


def test_units_by_hand() -> None:
    speed, there = unit_of("km/h"), unit_of(r"\text{ m}/\text{s}")
    assert speed is not None and there is not None
    assert speed.dimension == there.dimension == (("length", 1), ("time", -1))
    assert speed.factor / there.factor == Fraction(1000, 3600)
    area = unit_of("square feet")
    assert area is not None and area.factor == Fraction(3048, 10000) ** 2
    cube, litre = unit_of("cm^3"), unit_of("mL")
    assert cube is not None and cube == litre
    assert unit_of("apples") is None and unit_of("") is None
    assert split_unit(r"\pi r^2 h") == (r"\pi r^2 h", None)
    assert split_unit("2 x") == ("2 x", None)
    assert split_unit(r"6\sqrt{3} \text{ apples}") == (r"6\sqrt{3}", None)
