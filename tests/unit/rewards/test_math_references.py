r"""Mathematics: the reference's own text is right in every form, references in boxes, tags, units, time."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config.data import FileData
from roll.data.bad_rows import BadRowCollector
from roll.data.prompts import PromptReader
from roll.rewards.final_answer import extract_reference
from roll.rewards.math import prepare_worker, score_math
from roll.rewards.mathematics.same_text import normalize_text
from roll.rewards.mathematics.symbolic import is_too_large


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare_worker()


REFERENCES = [
    "12:30 PM",
    "Alice is taller",
    "\\pm 2",
    "\\boxed{\\text{Monday}}",
    "True",
    "x = 2 and y = 3",
    "10:45",
    "3:2",
    "1:2:3",
    "even",
    "\\text{odd}",
    "no real solutions",
    "July 4, 1776",
    "Monday",
    "Rs. 500",
    "AB = CD",
    "2 hours 30 minutes",
    "5 apples and 3 oranges",
    "n is even",
    "x+1",
    "x^2 + 2x + 1",
    "\\frac{1}{2}",
    "(1,2)",
    "[0, 1)",
    "1, 2, 3",
    "x > 3",
    "A",
    "B and C",
    "\\angle ABC",
    "\\text{(A)}",
    "5 \\text{ cm}",
    "$18.90",
    "\\$18.90",
    "50%",
    "f(x) = x^2",
    "\\sqrt{2} \\approx 1.414",
    "-3",
    "1/3",
    "3 \\frac{1}{2}",
    "e^{i\\pi}",
    "\\{1,2\\}",
    "H2O",
    "CO_2",
    "Yes",
    "No",
    "Saturday, March 5",
    "p implies q",
    "\\text{Alice is taller}",
    "x \\in [1,2]",
    "2 \\pm \\sqrt{3}",
    "10^{-3} m",
    "3.0 × 10^8 m/s",
    "$x=1$ or $x=2$",
    "a_n = 2n+1",
    "None",
    "infinity",
    "undefined",
    "does not exist",
    "DNE",
    "0.1\\overline{6}",
    "1,234",
    "1.234,56",
    "12 o'clock",
    "3 hours",
    "quarter past 3",
    "9 a.m.",
    "north",
    "30 degrees",
    "30^\\circ",
    "the set of all primes",
    "It is impossible to tell",
    "2:1 ratio",
    "6 - 7",
    "7 or 8",
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "x^2+y^2=1",
    "y is at most 3",
    "17 \\cdot 23",
    "3+4",
    "|x-2|",
    "5!",
    "no",
    "a: 3, b: 4",
    "1st",
    "2nd place",
    "Team A",
    "Peter's",
    "α+β",
    "答案",
    "北京",
    "√2",
    "½",
    "x ≤ 3",
    "∞",
    "∅",
    "4π",
    "90°",
    "It's half past ten: 10:30",
]
FORMS = [
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "The answer is {}.",
    "The answer is {}",
    "**{}**",
    "Answer: {}",
    "<answer>\n{}\n</answer>\nI hope this helps.",
    "Some work with 7.\n\n{}",
    "#### {}",
    "The final answer is {}. I hope it is correct.",
    "The answer is ${}$.",
    "So the answer is \\({}\\).",
    "<answer>{}</answer> because 2 + 2 is 4.",
    "Final Answer: **{}**",
    "It is {}.",
    "So it's {}.",
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_math_verifier_math_identical_text_is_right_in_every_form(reference: str) -> None:
    wrong = []
    for form in FORMS:
        if "$" in reference and "${}$" in form:
            continue
        right, _ = score_math(form.format(reference), reference, "auto", 60)
        wrong += [] if right else [form]
    assert not wrong


@given(st.text(max_size=60), st.sampled_from(["{}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}."]))
def test_math_verifier_math_identical_text_is_right_whatever_it_is(text: str, form: str) -> None:
    """Braces that do not match open no box, and marks of tags and boxes are read as such."""
    if re.search(r"[{}<>\\#\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", text) or not normalize_text(text):
        return
    assert score_math(form.format(text), text, "auto", 60)[0] is True


@pytest.mark.parametrize("reference", ["", " ", "$", "\\boxed{}", "\\text{ }", ".", "**"])
@pytest.mark.parametrize("text", ["", " ", "$$", "\\boxed{}", "<answer></answer>", ".", "****", "The answer is ."])
def test_math_verifier_math_empty_answer_is_never_right(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto")[0] is False


OTHER_TEXTS = [
    ("12:30 PM", "12:30 AM"),
    ("12:31 PM", "12:30 PM"),
    ("Bob is taller", "Alice is taller"),
    ("It is not 12:30 PM", "12:30 PM"),
    ("taller", "Alice is taller"),
    (r"\boxed{3}", r"\pm 3"),
    (r"\boxed{\pm 3}", "3"),
    ("2**3", "2*3"),
    ("a_1", "a 1"),
    (r"\boxed{\text{Tuesday}}", r"\boxed{\text{Monday}}"),
    ("n is odd", "n is even"),
]


@pytest.mark.parametrize(("text", "reference"), OTHER_TEXTS)
def test_math_verifier_math_other_text_is_wrong(text: str, reference: str) -> None:
    assert score_math(text, reference, "auto")[0] is False


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("<answer>x+1</answer>", "1+x", True),
        ("<answer>x+1</answer> That is all, since 2 is even.", "x+1", True),
        ("<answer>x+1</answer>", "1", False),  # no number is picked out of it
        ("<answer>42</answer> because 6 times 7 is 42, not 43.", "42", True),
        ("<answer>41</answer> and not 42", "42", False),
        ("<answer>The total is 42 apples.</answer> 3", "42", True),
        ("<answer>x = 42</answer>", "42", True),
        ("<answer>3+4</answer>", "7", False),
        (r"<answer>$\frac{1}{2}$</answer>", "0.5", True),
        (r"<answer>So it is \boxed{5}.</answer> 6", "5", True),
        (r"\boxed{5} <answer>6</answer>", "6", True),
        (r"<answer>5</answer> \boxed{6}", "6", True),  # the last of both
        (r"<answer>5</answer> \boxed{6}", "5", False),
        ("<answer></answer> 5", "5", True),
        ("<answer>(1,2)</answer>", "(1, 2)", True),
        ("<answer>5 cm</answer>", "5 m", False),
        ("It is 7.\n#### 72", "72", True),
        ("#### x+1", "1+x", True),
        ("#### Final answer\nIt is 5", "5", True),
    ],
)
def test_math_verifier_math_reads_answers_in_tags_and_behind_marks(text: str, reference: str, right: bool) -> None:
    assert score_math(text, reference, "auto")[0] is right


SOLUTION = r"We have $2x = 1$, so $x=\boxed{\frac{1}{2}}$. (The other root, $3$, is not allowed.)"


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (SOLUTION, r"\frac{1}{2}"),
        (r"First \boxed{1}. Then \boxed{\frac{\sqrt{2}}{3}}.", r"\frac{\sqrt{2}}{3}"),
        (r"$x = \boxed{1}$ or $\boxed{2}$", "1, 2"),
        (r"\boxed{\text{Monday}}", r"\text{Monday}"),
        (r"\fbox{7}", "7"),
        (r"so there are $\boxed 7$ of them, out of 9", "7"),  # as some solutions of MATH write it
        (r"$x=\boxed3,$ and $y = 1$", "3"),
        (r"$\boxed{1}$, then $\boxed -2.5.$", "-2.5"),
        (r"put it in \boxed form: 5", r"put it in \boxed form: 5"),
        ("48 / 2 = 24\n48 + 24 = 72\n#### 72", "72"),
        ("<answer>7</answer>", "7"),
        (r"\boxed{7", r"\boxed{7"),  # never closed
        ("7", "7"),
    ],
)
def test_math_verifier_math_reference_is_the_answer_that_a_solution_ends_with(reference: str, answer: str) -> None:
    assert extract_reference(reference) == answer


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"so it is $\boxed 7$ of 9", "7", True),
        (r"so it is $\boxed 7$ of 9", "9", False),
        ("The ratio is 3 : 2.", "3:2", True),
        ("Answer: 3 : 2", "3:2", True),
        ("The ratio is 3:2.", "3 : 2", True),
        ("The ratio is 2 : 3.", "3:2", False),
        ("For 2024: 5", "3:2", False),
        (r"\boxed{12{:}30}", "12:30", True),
        (r"\boxed{12\!:\!30}", "12:30", True),
        ("12:30PM", "12:30 PM", True),
        (r"\boxed{12:30 \text{ p.m.}}", "12:30 PM", True),
        ("It ends at noon. Answer: 12:30 p. m.", "12:30 PM", True),
        (r"\boxed{12:30 \text{ a.m.}}", "12:30 PM", False),
        (r"\boxed{12:30}", "12:30 PM", False),
    ],
)
def test_math_verifier_math_reads_bare_boxes_ratios_and_times_of_day(text: str, reference: str, right: bool) -> None:
    assert score_math(text, reference, "auto")[0] is right


def test_math_verifier_math_scores_against_solutions_of_published_columns() -> None:
    for text, right in (
        (r"\boxed{0.5}", True),
        (r"\boxed{\frac12}", True),
        (r"\boxed{3}", False),
        ("It is 1/2.", True),
    ):
        assert score_math(text, SOLUTION, "auto")[0] is right
    assert score_math("So 72 clips.", "48/2 = 24\n#### 72", "auto")[0] is True


NESTED_BOX = r"(?s).*\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"


def test_math_verifier_math_recipe_for_nested_boxes_is_that_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert f"answer_pattern: '{NESTED_BOX}'" in page
    config = FileData(source="file", path="x.jsonl", answer_pattern=NESTED_BOX, reward="math")  # type: ignore[arg-type]
    for box in ("7", r"\frac{1}{2}", r"\frac{\sqrt{2}}{3}", r"\text{a}^{x_{\text{b}}}"):
        row = {config.prompt_key: "p", config.answer_key: rf"No \boxed{{0}}, $x=\boxed{{{box}}}$. So {{it}} is."}
        assert PromptReader(config, "d", BadRowCollector()).read(row, "1", "row 1").answer == box


UNITS: list[tuple[str, str, bool]] = [
    (r"5 cm \text{7 m}", "5 cm", False),
    (r"5 cm \text{7 m}", "5 m", False),
    (r"5 cm \text{7 m}", "5", False),
    (r"5 \text{ (7)}", "5", False),
    (r"6\sqrt{3} cm \text{7 m}", r"6\sqrt{3} cm", False),
    ("5 cm of rope", "5 cm", True),
    ("5 cm of rope", "5 m", False),
    ("5 m of rope", "500 cm of rope", True),
    (r"2\pi \text{ cm of rope}", r"2\pi m", False),
    ("5 in total", "5 cm", True),  # no inch
    ("5 square meters of carpet", "5 cm", False),
    ("5 square meters of carpet", "5 m", False),  # of another dimension, and both are units of their own
    (r"5 \text{ cm}^2", "5", True),
    (r"5 \text{ m2}", "5", True),
    (r"\text{\$}18.90", r"\$18.90", True),
    (r"\$18.90", r"\text{\$}18.90", True),
    (r"\text{USD }18.90", "18.9", True),
    (r"\text{Rs. }500", "500", True),
    (r"-\text{\$}5", "-5", True),
    (r"\text{7}5", "5", False),
]


@pytest.mark.parametrize(("answer", "reference", "right"), UNITS)
def test_math_verifier_math_units_and_currencies(answer: str, reference: str, right: bool) -> None:
    assert score_math(rf"\boxed{{{answer}}}", reference, "auto")[0] is right


HOSTILE = [
    "x^" + " " * 950 + "x",
    "|" * 900,
    r"\|" * 450,
    "-" * 900,
    "+ " * 450,
    "x_" * 450,
    "\u00bd" * 900,
    "5" + "\u00b2" * 900,
    r"\int " * 190,
    r"\pm " * 190,
    "|x" * 450,
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_math_verifier_math_hostile_repetition_is_refused_by_its_looks(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser, whose time grows faster than its input, sees no more of them than a usual answer has."""
    seen: list[int] = []
    from roll.rewards.mathematics import symbolic

    parsed = symbolic._parse
    monkeypatch.setattr(symbolic, "_parse", lambda text: seen.append(len(text)) or parsed(text))
    right, verdict = score_math(rf"\boxed{{{body}}}", "x+1", "auto")
    assert (right, verdict) in [(False, "too large"), (False, "wrong")]
    assert max(seen, default=0) < 100


@pytest.mark.parametrize(
    "piece", [" ", "^ ", "^{ (", "5 ", "5 )", "\\binom ", "\\exp (", "^5 }", "- ", "_{ a", "\\Gamma( "]
)
def test_math_verifier_math_looks_are_judged_in_linear_time(piece: str) -> None:
    def seconds(size: int) -> float:
        text = "x^" + (piece * size)[:size] + "x"
        started = time.process_time()
        is_too_large(text)
        return time.process_time() - started

    assert seconds(3_900) < 40 * (seconds(390) + 0.005)  # blanks behind `^` took 60 times as long for 4 times as many


def test_math_verifier_math_usual_answers_are_not_refused_by_their_looks() -> None:
    usual: list[Any] = [
        r"\|x\| + |y| \le |x+y|",
        "x - -1",
        r"\int_0^1 x\,dx",
        r"\sum_{k=1}^n k^2",
        "a_1 + a_2 + a_3 + a_4",
    ]
    usual += ["+".join(f"x_{{{n}}}^2" for n in range(40)), r"2 \cdot " * 20 + "2", r"x_1 x_2 x_3 x_4 x_5 x_6"]
    assert not [text for text in usual if is_too_large(text)]
