"""The 25 instructions of IFEval: what follows each and what does not, strict and loose, and malformed prompts."""

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
from roll.errors import ConfigError, MalformedPromptError, UnscorableError
from roll.rewards import build_reward, instruction_checks
from roll.rewards.compose import WeightedReward
from roll.rewards.instruction_checks import INSTRUCTIONS, InstructionError, build_loose_variants, check_instruction
from roll.rewards.sentences import count_capital_words, count_words, split_sentences
from roll.types import Rollout

MakeRollout = Callable[..., Rollout]
FRENCH = "Bonjour, je suis très heureux de vous rencontrer aujourd'hui dans cette belle ville."
ENGLISH = "the quick brown fox jumps over the lazy dog while everyone in the village is watching with great joy."

CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["alpha", "C++"]},
        ["Alpha and c++ it is"],
        ["alpha alone", "C++ alone", "C and alpha"],
    ),
    (
        "keywords:frequency",
        {"keyword": "fun", "frequency": 2, "relation": "at least"},
        ["Fun is fun", "funny fun"],
        ["fun", ""],
    ),
    ("keywords:frequency", {"keyword": "a b", "frequency": 1, "relation": "less than"}, ["ab"], ["x a b"]),
    ("keywords:forbidden_words", {"forbidden_words": ["art", "so-so"]}, ["Party, so"], ["It is art.", "ART", "so-so!"]),
    (
        "keywords:letter_frequency",
        {"letter": "a", "let_frequency": 3, "let_relation": "at least"},
        ["Aa a"],
        ["aa"],
    ),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "less than"}, ["a!"], ["a!!"]),
    ("language:response_language", {"language": "fr"}, [FRENCH], [ENGLISH, "12345"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Is it? yes it is."],
        ["Dr. Smith is here.", "1. First"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a", "a\n***\n***\nb", "a *** b *** c"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two three", "don't go"],  # don, t, go: words are runs of letters
        ["one two"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "president"},
        ["Hi there\n\nPresident, you are", 'Hi\n\n"president\'s" dog'],
        ["Hi\n\nThe president", "president\n\npresident\n\nx", "president"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] and [address]"],
        ["[name]", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. more", "p. s. more"],
        ["Bye", "GPS. is fine"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S more", "p. p.s"], ["P.S. one"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  * b"],
        ["* a", "* a\n* b\n- c", "**bold**\n* a"],
    ),
    ("detectable_format:constrained_response", {}, ["I think: My answer is maybe."], ["My answer is perhaps.", "yes"]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and *two*"],
        ["*one*", "** **  *a*", "*a\nb* *c*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "SECTION 1 SECTION 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": [1, 2]}\n```', "```\n[]\n```"],
        ["{a: 1}", '{"a": 1} done', "[" * 100_000],
    ),
    ("detectable_format:title", {}, ["<<poem of joy>>\nRoses", "x <<<a>>> y"], ["<<>>", "<< >>", "<<a\nb>>", "<a>"]),
    ("combination:two_responses", {}, ["a ****** b", "******\na\n******\nb"], ["a", "a******a", "a******b******c"]),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["write a poem. Roses are red", "  Write a poem.\nX"],
        ["Sure! Write a poem.", "Roses"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions?"},
        ["Done. any other questions?", '"Any other questions?"'],
        ["Any other questions? No.", "Done."],
    ),
    ("startend:quotation", {}, ['"all of it"', ' "a" '], ['"', '"a" b', "a"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I AM", "U.S. and UK", "STATE-OF-THE-ART ART"],
        ["NASA alone", "WELL-done X"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, FRENCH.upper(), ENGLISH.upper() + " no"]),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.capitalize(), FRENCH.lower()]),
    ("punctuation:no_comma", {}, ["no comma here"], ["one, two"]),
]


@pytest.mark.parametrize(("name", "arguments", "follow", "break_it"), CASES, ids=[case[0] for case in CASES])
def test_reward_instructions_what_follows_an_instruction_and_what_does_not(
    name: str, arguments: dict[str, Any], follow: list[str], break_it: list[str]
) -> None:
    assert [check_instruction(name, arguments, text) for text in follow] == [True] * len(follow)
    assert [check_instruction(name, arguments, text) for text in break_it] == [False] * len(break_it)
    assert check_instruction(name, arguments, "  \n") is False


def test_reward_instructions_all_25_instructions_are_there_and_tried() -> None:
    assert len(INSTRUCTIONS) == 25
    assert {case[0] for case in CASES} == set(INSTRUCTIONS)


@given(
    text=st.text(max_size=60),
    case=st.sampled_from([c for c in CASES if "language" not in c[0] and "case:eng" not in c[0]]),
)
def test_reward_instructions_no_text_breaks_a_check_and_loose_accepts_whatever_strict_does(
    text: str, case: tuple[str, dict[str, Any], list[str], list[str]]
) -> None:
    name, arguments, _, _ = case
    strict = check_instruction(name, arguments, text)
    loose = any(check_instruction(name, arguments, variant) for variant in build_loose_variants(text))
    assert loose or not strict


def test_reward_instructions_variants_by_hand() -> None:
    assert build_loose_variants("a\n*b*\nc") == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*", "a\nb\nc", "b\nc", "a\nb", "b"]
    assert build_loose_variants("one") == ["one", ""]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ("Mr. Jones and Dr. No met at 3 p.m. today. Fine.", ["Mr. Jones and Dr. No met at 3 p.m. today.", "Fine."]),
        ("J. R. R. Tolkien wrote it.", ["J. R. R. Tolkien wrote it."]),
        ("It costs 3.50 euros. Cheap", ["It costs 3.50 euros.", "Cheap"]),
        ("Well... maybe. Yes", ["Well... maybe.", "Yes"]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("all lower. still two.", ["all lower.", "still two."]),
        ("1. First item.\n2. Second item.", ["1. First item.", "2. Second item."]),
        ("我来了。你好吗？很好", ["我来了。", "你好吗？", "很好"]),  # noqa: RUF001
        ("", []),
        ("?! ...", []),
    ],
)
def test_reward_instructions_sentences(text: str, found: list[str]) -> None:
    assert split_sentences(text) == found


@pytest.mark.parametrize("piece", [". ", "1. ", "1.", "a. ", "A. ", "1 . ", "\n1."])
def test_reward_instructions_sentences_take_time_in_proportion_to_the_text(piece: str) -> None:
    started = time.thread_time()
    split_sentences(piece * (100_000 // len(piece)))
    assert time.thread_time() - started < 1.0  # marks without words took 49 s


def test_reward_instructions_words() -> None:
    assert count_words("It's 3 o'clock, isn't it?") == 8  # It s 3 o clock isn t it
    assert count_capital_words("I saw the U.S. and NASA-ESA, A-b c") == 3


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("keywords:exist", {}, r"unknown instruction 'keywords:exist'. Did you mean 'keywords:existence'\?"),
        ("keywords:existence", {}, "'keywords' must be a list of non-empty strings, got None"),
        ("keywords:existence", {"keywords": "a"}, "must be a list of non-empty strings, got 'a'"),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": "at most"},
            "'relation' must be 'at least'",
        ),
        ("keywords:letter_frequency", {"letter": "ab"}, "'letter' must be one character"),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": 1.5},
            "'num_bullets' must be an integer >= 0, got 1.5",
        ),
        (
            "detectable_format:number_bullet_lists",
            {"num_bullets": True},
            "must be an integer >= 0, got True",
        ),
    ],
)
def test_reward_instructions_unusable_instructions_are_named(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InstructionError, match=words):
        check_instruction(name, arguments, "text")


def test_reward_instructions_a_language_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install 'roll-rl\[instructions\]'"):
        instruction_checks.detect_language("text")


def build(pool: LocalWorkerPool, **settings: Any) -> WeightedReward:
    entry = {"type": "instructions", **settings}
    return build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(entry)), pool)


METADATA = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
    "kwargs": [{"num_words": None, "keywords": None}, {"num_words": None, "keywords": ["roses"]}],
}


async def test_reward_instructions_a_row_of_ifeval_is_scored_with_each_instruction_as_a_component(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    strict, share = build(pool), build(pool, score="share")
    both, one = rollout("Roses are red.", metadata=METADATA), rollout("Roses, roses", metadata=METADATA)
    found = await strict(both)
    assert (found.value, found.correct, found.verdict) == (1.0, True, "follows all")
    missed = await strict(one)
    assert (missed.value, missed.correct, missed.verdict) == (0.0, False, "follows 1 of 2")
    assert dict(missed.components) == {
        "instructions": 0.0,
        "instructions/punctuation:no_comma": 0.0,
        "instructions/keywords:existence": 1.0,
    }
    assert ((await share(one)).value, (await share(one)).correct) == (0.5, False)


async def test_reward_instructions_loose_forgives_an_introduction(pool: LocalWorkerPool, rollout: MakeRollout) -> None:
    polite = rollout("Sure, here you are:\nRoses are red.", metadata=METADATA)
    assert (await build(pool)(polite)).value == 0.0
    assert (await build(pool, loose=True)(polite)).value == 1.0


async def test_reward_instructions_columns_may_be_json_and_called_otherwise(
    pool: LocalWorkerPool, rollout: MakeRollout
) -> None:
    metadata = {"names": '["keywords:existence"]', "args": '[{"keywords": ["a"]}]'}
    reward = build(pool, ids_key="names", arguments_key="args")
    assert (await reward(rollout("a", metadata=metadata))).value == 1.0


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({}, UnscorableError, r"prompt 'd/0' has no column 'instruction_id_list' .*columns: none"),
        (
            {"instruction_id_list": []},
            MalformedPromptError,
            r"prompt 'd/0': it cannot be scored: .* must be a list",
        ),
        ({"instruction_id_list": "x"}, MalformedPromptError, "must be a list of instructions, got 'x'"),
        ({"instruction_id_list": ["a"], "kwargs": []}, MalformedPromptError, "'kwargs' must be a list of 1 entries"),
        ({"instruction_id_list": ["a"], "kwargs": [3]}, MalformedPromptError, "'kwargs' must be a list of mappings"),
        (
            {"instruction_id_list": ["nope"]},
            MalformedPromptError,
            "prompt 'd/0': it cannot be scored: unknown instruction 'nope'",
        ),
    ],
)
async def test_reward_instructions_malformed_prompts_are_told_by_name(
    pool: LocalWorkerPool, rollout: MakeRollout, metadata: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await build(pool)(rollout("text", metadata=metadata))
