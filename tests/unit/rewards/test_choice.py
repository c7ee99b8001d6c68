"""Multiple choice: which letter an answer settles on."""

# ruff: noqa: RUF001 (Chinese answers have full-width signs)

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import RewardList, expand_rewards
from roll.errors import UnscorableError
from roll.protocols import Reward
from roll.rewards import build_reward
from roll.rewards.choice import extract_letter, parse_options, score_choice
from roll.rewards.choice_mentions import MAX_LETTERS, find_mentions
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]


def build(pool: LocalWorkerPool, *entries: Any) -> Reward:
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(list(entries))), pool)


CHOSEN = [
    ("Option C is wrong, so D.", "D"),
    ("C. Paris", "C"),
    ("Therefore, C", "C"),
    ("Therefore, C.", "C"),
    ("c", "C"),
    ("c.", "C"),
    ("(c)", "C"),
    ("c) Paris", "C"),
    ("c. paris", "C"),
    ("the answer is c", "C"),
    ("answer: c", "C"),
    ("Answer: b", "B"),
    ("**c**", "C"),
    ("\\boxed{c}", "C"),
    ("\\boxed{C}", "C"),
    ("(C)", "C"),
    ("**C**", "C"),
    ("\\boxed{Option C}", "C"),
    ("\\boxed{\\text{(C)}}", "C"),
    ("\\boxed{C. Paris}", "C"),
    ("\\boxed{\\text{C: Paris}}", "C"),
    ("$\\boxed{\\mathrm{C}}$", "C"),
    ("<answer>The answer is C</answer>", "C"),
    ("<answer>Option C</answer>", "C"),
    ("<answer>\nC\n</answer>", "C"),
    ("The answer is not C but D.", "D"),
    ("It isn't C, it's D.", "D"),
    ("Not C, but D.", "D"),
    ("It can't be C. It must be D.", "D"),
    ("C is incorrect. D is correct.", "D"),
    ("C is the correct answer.", "C"),
    ("B is the best choice.", "B"),
    ("I would eliminate A and B, leaving C.", "C"),
    ("A and B are wrong, so C.", "C"),
    ("The answer is C because B is wrong.", "C"),
    ("The answer is C, not D.", "C"),
    ("The answer is C, and D is wrong.", "C"),
    ("The answer is C, A is too small.", "C"),
    ("The answer is C. Wait, no, it's D.", "D"),
    ("Is it C? No, it is D.", "D"),
    ("The answer is C or D. On reflection, the answer is D.", "D"),
    ("I choose C", "C"),
    ("I'd go with C.", "C"),
    ("I'm going with option C.", "C"),
    ("My answer would be C.", "C"),
    ("The answer to this question is C.", "C"),
    ("The correct option is (C).", "C"),
    ("The correct choice: C", "C"),
    ("Correct answer: C", "C"),
    ("Final answer: C", "C"),
    ("Ans: C", "C"),
    ("Answer - C", "C"),
    ("Answer = C", "C"),
    ("Option C", "C"),
    ("Choice (C)", "C"),
    ("I think C.", "C"),
    ("So C", "C"),
    ("Thus: C", "C"),
    ("Hence the answer is C.", "C"),
    ("So the correct answer is **C. Paris**.", "C"),
    ("**Answer: C**", "C"),
    ("**Answer:** C", "C"),
    ("### Answer\nC", "C"),
    ("Answer:\n\nC", "C"),
    ("The answer is: **(C) Paris**", "C"),
    ('The answer is "C".', "C"),
    ("The answer is $C$.", "C"),
    ("The answer is \\textbf{C}", "C"),
    ("A. London is wrong.\nB. Berlin is wrong.\nC. Paris is the capital.\nThe answer is C.", "C"),
    ("A) no\nB) yes\n\nB", "B"),
    ("A. London\nB. Berlin\nC. Paris\n\nC", "C"),
    ("C. Paris\n\nParis has been the capital since 987.", "C"),
    ("(C) Paris", "C"),
    ("C) Paris", "C"),
    ("C: Paris", "C"),
    ("C - Paris", "C"),
    ("**C. Paris**", "C"),
    ("**C** Paris", "C"),
    ("- C. Paris", "C"),
    ("Option A is wrong. Option B is wrong. Option D is wrong. Therefore C is right.", "C"),
    ("Neither A nor B. The answer is C.", "C"),
    ("Unlike A, option C is correct.", "C"),
    ("Both A and C look right, but the best answer is C.", "C"),
    ("Considering (A) and (C), I believe (C).", "C"),
    ("We can rule out B. It must be D", "D"),
    ("The answer is D, rather than A.", "D"),
    ("I chose C", "C"),
    ("Answer is (b).", "B"),
    ("it's b", "B"),
    ("So, the answer is option (d): four.", "D"),
    ("C it is.", "C"),
    ("The answer is C.\n\nA is wrong because it is too small. B is wrong.", "C"),
    ("The answer is C, since A and B are too small", "C"),
    ("The correct answer is not A or B; it is D.", "D"),
    ("A? No. B? No. So C.", "C"),
    ("Answer: C (not D)", "C"),
    ("If the answer is A, then B is false. So the answer is C.", "C"),
    ("C is right and D is wrong", "C"),
    ("D is wrong and C is right", "C"),
    ("C, because D is wrong.", "C"),
    ("The best answer would be option C: Paris", "C"),
    ("Only C is correct", "C"),
    ("Statement C is true", "C"),
    ("Answer: C is correct", "C"),
    ("I would say C", "C"),
    ("I'd say C", "C"),
    ("C!", "C"),
    ("My final choice is C", "C"),
    ("Select C", "C"),
    ("Therefore option C", "C"),
    ("Therefore, option C is the answer", "C"),
    ("Therefore the correct option is C)", "C"),
    ("The answer is C) Paris", "C"),
    ("The answer is [C]", "C"),
    ("The answer is C\n", "C"),
    ("Correct Answer: **C) Paris**", "C"),
    ("Answer:C", "C"),
    ("answer:c", "C"),
    ("ANSWER: C", "C"),
    ("\\[\\boxed{C}\\]", "C"),
    ("Answer: \\(C\\)", "C"),
    ("$C$", "C"),
    ("the answer must be C", "C"),
    ("the answer should be C", "C"),
    ("It has to be C", "C"),
    ("the answer can only be C", "C"),
    ("C seems right", "C"),
    ("C looks correct", "C"),
    ("Definitely C.", "C"),
    ("not D but C", "C"),
    ("C, not D", "C"),
    ("C rather than D", "C"),
    ("C instead of D", "C"),
    ("A or B, but I choose B", "B"),
    ("I initially thought A, but it's C.", "C"),
    ("At first I chose A, but then I chose C", "C"),
    ("A is not correct, B is not correct, C is correct", "C"),
    ("Answer: C. A is not correct because it is small.", "C"),
    ("The answer could be C.", "C"),
    ("The answer might be C, but it is D.", "D"),
    ("Answer is C; D is close.", "C"),
    ("The answer is C. Not D.", "C"),
    ("Let's see. A: no. B: no. C: yes.", "C"),
    ("A: wrong\nB: wrong\nC: right", "C"),
    ("A - incorrect\nB - incorrect\nC - correct", "C"),
    ("A. Wrong.\nB. Correct.\nC. Wrong.\nD. Wrong.", "B"),
    ("A: False\nB: True\nC: False\nD: False", "B"),
    ("(A) is false. (B) is true.", "B"),
    ("I pick B; it is not A.", "B"),
    ("Between A and B, B is better.", "B"),
    ("the answer is B or C, most likely B", "B"),
    ("My answer: B\nConfidence: 90%", "B"),
    ("Answer: B\n\nExplanation: A is a distractor.", "B"),
    ('{"answer": "C"}', "C"),
    ('{"answer":"c"}', "C"),
    ("answer=C", "C"),
    ("The answer is option C", "C"),
    ("The answer is the option C", "C"),
    ("The answer is letter C", "C"),
    ("Answer: Option (C)", "C"),
    ("The correct answer is thus C", "C"),
    ("This makes C the correct answer.", "C"),
    ("which makes (C) the best answer", "C"),
    ("The only option left is C.", "C"),
    ("That leaves us with C.", "C"),
    ("By elimination, C.", "C"),
    ("We conclude C.", "C"),
    ("We conclude that C is the answer.", "C"),
    ("C was not mentioned; the answer is B", "B"),
    ("B", "B"),
    ("**D**", "D"),
    ("So \\boxed{B}.", "B"),
    ("\\boxed{\\text{A}}", "A"),
    ("The answer is C.", "C"),
    ("the answer is (b)", "B"),
    ("Answer: D because A and B are wrong", "D"),
    ("A is tempting. I choose option B.", "B"),
    ("Not (A), rather (C)", "C"),
    ("Thinking...\nE\n", "E"),
    ("\\boxed{(B) 5}", "B"),
    ("\\boxed{\\textbf{(B)}}", "B"),
    ("\\boxed{\\textbf{(B) }5}", "B"),
    ("**Answer:** B", "B"),
    ("**Answer: (D)**", "D"),
    ("<answer>B</answer>", "B"),
    ("<answer>(C) Paris, A's rival</answer>", "C"),
    ("<answer> D. four </answer>", "D"),
    ("So it's B.", "B"),
    ("The final answer is \\(B\\)", "B"),
    ("It must be (B), not (A).", "B"),
    ("The best choice is D, rather than (A).", "D"),
    ("(B), as opposed to what was said, not (A)", "B"),
    ("The answer is not A; the answer is C.", "C"),
    ("If A were true, the answer would be B; but A is false, so the answer is C.", "C"),
    ("C is the only option that works.", "C"),
    ("D is the only one left.", "D"),
]


@pytest.mark.parametrize(("text", "letter"), CHOSEN)
def test_reward_choice_reads_the_letter_that_an_answer_settles_on(text: str, letter: str) -> None:
    assert extract_letter(text, "ABCDE") == letter


NONE = [
    "The answer is C or D.",
    "The answer is C, D, or A.",
    "\\boxed{C} or \\boxed{D}",
    "\\boxed{C, D}",
    "<answer>C or D</answer>",
    "<answer>not C</answer>",
    "The answer is not C.",
    "The answer is either C or D",
    "Answer: C/D",
    "Answer: C and D",
    "Answer: C & D",
    "Answer: both A and B",
    "The answer is D. Well, the answer is C or D.",
    "I don't choose C.",
    "The answer would be wrong if it is C.",
    "A. London\nB. Berlin\nC. Paris\nD. Rome",
    "A) London\nB) Berlin\nC) Paris\nD) Rome",
    "(A) London\n(B) Berlin\n(C) Paris\n(D) Rome",
    "(A)(B)(C)(D)",
    "A B C D",
    "The answer is A, B, C or D",
    "A dog is an animal.",
    "The answer is a bit unclear.",
    "The answer is a dog",
    "I am not sure.",
    "",
    "The answer is F",
    "CD",
    "Cats",
    "Answer: (C) or (D)",
    "Answer: C, D",
    "the answer cannot be C",
    "The answer isn't C",
    "I am torn between C and D",
    "C or maybe D",
    "Neither C nor D",
    "C and D are both correct",
    "C and D are correct.",
    "Either C or D",
    "Answer: None of the above",
    "The answer is A or maybe B.",
    "Answer: A, or possibly B",
    "The answer is C (or D).",
    "The answer could be C or D.",
    "A ✗ B ✓",
    "B is more likely.",
    "\\boxed{A, B, C, D}",
    "Answer: ABCD",
    "\\boxed{7}",
    "\\boxed{A dog}",
    "It is a dog",
    "C is the only option that fails.",
]


@pytest.mark.parametrize("text", NONE)
def test_reward_choice_without_one_letter_settled_on_is_no_answer(text: str) -> None:
    assert extract_letter(text, "ABCDE") is None


CHINESE = [
    ("答案：C", "C"),
    ("答案是C", "C"),
    ("答案为 C。", "C"),
    ("故选C", "C"),
    ("故选：C。", "C"),
    ("因此选C。", "C"),
    ("正确答案是 C", "C"),
    ("正确选项是C", "C"),
    ("本题选C", "C"),
    ("所以答案是C。", "C"),
    ("C正确", "C"),
    ("选项C正确", "C"),
    ("C项正确，故本题选C。", "C"),
    ("不选C", None),
    ("C错误，选D", "D"),
    ("C是错的，所以选D。", "D"),
    ("答案不是C，而是D。", "D"),
    ("排除A和B，答案是D", "D"),
    ("【答案】C", "C"),
    ("答案：Ｃ", "C"),
    ("答案是C和D", None),
    ("答案：AC", None),
    ("C、巴黎", "C"),
    ("C．巴黎", "C"),
    ("（C）", "C"),
    ("选择 C 选项", "C"),
    ("选(B)", "B"),
    ("我选择C", "C"),
    ("应选B", "B"),
    ("A错，B错，故C正确", "C"),
    ("综上，选B", "B"),
    ("正确的是C", "C"),
    ("正确的选项为C", "C"),
    ("答案應該是C", "C"),
    ("選C", "C"),
    ("故答案選C", "C"),
    ("正确答案：C。巴黎", "C"),
    ("应该选择C项", "C"),
    ("答：C", "C"),
    ("我认为是C", "C"),
    ("我认为答案是C", "C"),
    ("选C，不选D", "C"),
    ("不是A，也不是B，是C", "C"),
    ("A、B错误，C、D正确", None),
    ("所以C选项正确", "C"),
    ("C选项错误，D选项正确", "D"),
    ("因此，正确答案是选项C", "C"),
    ("答案是C还是D？", None),
    ("A和C", None),
    ("C或D", None),
    ("答案：C、D", None),
    ("答案：A、B、C都对", None),
    ("只有C正确", "C"),
    ("这道题的答案是C。", "C"),
    ("答案是（C）", "C"),
    ("答案是：**C**", "C"),
    ("选项A不正确，选项B正确。", "B"),
    ("A不对，B也不对，所以是C", "C"),
]


@pytest.mark.parametrize(("text", "letter"), CHINESE)
def test_reward_choice_reads_chinese_answers(text: str, letter: str | None) -> None:
    assert extract_letter(text, "ABCDE") == letter


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from(["or", "and", "/", ",", "&", "或", "和"]))
def test_reward_choice_of_two_letters_is_never_right(one: str, other: str, joint: str) -> None:
    if one != other:
        for form in ("The answer is {}.", "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>", "答案: {}", "{}"):
            assert extract_letter(form.format(f"{one} {joint} {other}"), "ABCD") is None


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"))
def test_reward_choice_never_counts_a_letter_that_is_denied(right: str, wrong: str) -> None:
    if right != wrong:
        for form in (
            "Option {1} is wrong, so {0}.",
            "It is not {1}. The answer is {0}.",
            "{1}错误, 故选{0}",
            "The answer is {0}, not {1}.",
            "I would rule out {1}. It must be {0}.",
        ):
            assert extract_letter(form.format(right, wrong), "ABCD") == right
            assert score_choice(form.format(right, wrong), wrong, "ABCD") is False


QUESTION = "What is the capital of France?\n\nA. London\nB) Berlin\n(C) Paris\n**D.** Rome\n\nAnswer with the letter."


def test_reward_choice_reads_the_options_that_a_question_lists() -> None:
    assert parse_options(QUESTION, "ABCDE") == {"A": "London", "B": "Berlin", "C": "Paris", "D": "Rome"}
    assert parse_options("A. one\nC. three", "ABCDE") == {}  # B is missing
    assert parse_options("A. one\nB. two\nA. again", "ABCDE") == {}
    assert parse_options("No options here. A dog.", "ABCDE") == {}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Paris", True),
        ("The answer is Paris.", True),
        (r"\boxed{\text{paris}}", True),
        ("<answer>Paris</answer>", True),
        ("London", False),
        ("答案是Paris", True),
        ("Paris or London", None),
        ("The capital of France", None),
    ],
)
def test_reward_choice_by_the_text_of_an_option(text: str, right: bool | None) -> None:
    assert score_choice(text, "C", "ABCDE", QUESTION) is right
    assert score_choice(text, "Paris", "ABCDE", QUESTION) is right  # the reference may be the text too


@pytest.mark.parametrize(
    "reference", ["C", "(C)", "c", "C. Paris", "C) Paris", "Answer: C", "答案:C", r"\boxed{C}", " C\n", "C: x"]
)
def test_reward_choice_reads_references_as_data_sets_write_them(reference: str) -> None:
    assert score_choice("C", reference, "ABCDE") is True
    assert score_choice("D", reference, "ABCDE") is False


@pytest.mark.parametrize("reference", ["2", "Paris", "F", "A or B", "C, D"])
async def test_reward_choice_reference_without_a_letter_is_refused(
    pool: LocalWorkerPool, rollout: MakeRollout, reference: str
) -> None:
    """No answer could ever be right, so it must not look as if all were wrong."""
    with pytest.raises(UnscorableError, match=r"contains neither one of the letters ABCDE nor"):
        await build(pool, "choice")(rollout("C", reference))


@pytest.mark.parametrize(
    "piece",
    [
        "\n",
        " ",
        "(",
        "*",
        "answer ",
        "answer * ",
        "it is ",
        "\\boxed{",
        "<answer>",
        "A\n",
        "(A)",
        "not (A) ",
        ": ",
        "A) ",
        "A or ",
        "answer is A ",
        "A wrong ",
        "A. x\n",
        "So, ",
        "A is ",
        "答案",
        "选A",
    ],
)
def test_reward_choice_is_found_in_linear_time(piece: str) -> None:
    def seconds(text: str) -> float:
        extract_letter(text, "ABCDE")
        started = time.process_time()
        extract_letter(text, "ABCDE")
        return time.process_time() - started

    # 20,000 characters, all that is looked at, take some 10 to 100 ms; 19,000 line ends once took 16.5 s
    assert seconds((piece * 20_000)[:20_000]) < 5
    assert sum(len(mention.letters) for mention in find_mentions((piece * 20_000)[:20_000], "ABCDE")) <= MAX_LETTERS


async def test_reward_choice_without_a_letter_is_no_answer(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    reward = build(pool, "choice")
    right, wrong, none = [await reward(rollout(text, "B")) for text in ("The answer is B", "A", "I do not know.")]
    assert [(r.value, r.correct, r.verdict) for r in (right, wrong, none)] == [
        (1.0, True, "correct"),
        (0.0, False, "wrong"),
        (0.0, False, "no answer"),
    ]
