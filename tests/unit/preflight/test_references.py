"""References that do not match themselves are named before a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from roll.config.data import FileData
from roll.config.rewards import RewardConfig
from roll.data.stream import PromptStream, WeightedSource
from roll.errors import DataError
from roll.preflight.references import check_references
from roll.rewards.reference_checks import check_reference, prepare_worker
from roll.types import Message, Prompt

SOLUTION = r"So $x=\boxed{\frac{1}{2}}$."
QUESTION = "Which?\nA. London\nB. Paris"


def config(**settings: Any) -> RewardConfig:
    return TypeAdapter(RewardConfig).validate_python(settings)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare_worker()


@pytest.mark.parametrize(
    ("reward", "reference", "problem"),
    [
        ({"type": "math"}, "42", ""),
        ({"type": "math"}, SOLUTION, ""),
        ({"type": "math"}, "48/2 = 24\n#### 72", ""),
        ({"type": "math"}, "12:30 PM", ""),
        ({"type": "math"}, r"\boxed{\text{Monday}}", ""),
        ({"type": "math"}, r"\frac{x^2", ""),  # no formula, but its own text
        ({"type": "math", "extract": "boxed"}, "x+1", ""),
        ({"type": "math", "extract": "last_number"}, "7 apples", ""),
        ({"type": "math"}, r"So \boxed{7", "has a box that is not closed"),
        ({"type": "math"}, r"So \boxed{}.", "the box or mark in"),
        ({"type": "math"}, "We prove it. " * 100, "has 1,300 characters and no box"),
        (
            {"type": "math", "extract": "last_number"},
            "x+y",
            "'x+y' does not match itself (no answer, extract: last",
        ),
        ({"type": "math", "extract": "boxed"}, "x}", "does not match itself"),
        ({"type": "math"}, "...", "does not match itself"),
        ({"type": "choice"}, "(C) Paris", ""),
        ({"type": "choice"}, "Paris", ""),
        ({"type": "choice"}, "2", "'2' contains none of the letters ABCDE, and is no option of the prompt"),
        ({"type": "choice", "letters": "AB"}, "C", "contains none of the letters AB"),
        ({"type": "exact"}, "", ""),
    ],
)
def test_preflight_references_is_its_own_right_answer_or_named(
    reward: dict[str, Any], reference: str, problem: str
) -> None:
    found = check_reference(config(**reward), reference, QUESTION)
    assert problem in found and bool(found) == bool(problem)


def prompts(answers: Sequence[str], **metadata: Any) -> list[Prompt]:
    asked = (Message(role="user", content=QUESTION),)
    return [
        Prompt(uid=f"d/{number}", domain="d", messages=asked, answer=answer, metadata=metadata)  # type: ignore[arg-type]
        for number, answer in enumerate(answers, 1)
    ]


def source(**reward: Any) -> FileData:
    return FileData.model_validate({"source": "file", "path": "x", "domain": "d", "reward": reward})


async def test_preflight_references_of_the_wrong_column_refuse_the_run_and_name_the_rows() -> None:
    with pytest.raises(DataError) as caught:
        await check_references([source(type="choice")], {"d": prompts(["0", "1", "2", "3", "0", "1", "A"])})
    text = str(caught.value)
    assert text.startswith("the reference answers of 6 of 7 prompts of 'd' are scored as wrong")
    assert "'d/1': '0' contains none of the letters ABCDE" in text and "'d/5'" in text and "'d/6'" not in text
    assert "and 1 more" in text and "answer_key" in text


async def test_preflight_references_of_which_few_are_bad_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """One bad row of many costs its own rollouts alone."""
    with caplog.at_level(logging.WARNING):
        await check_references([source(type="math")], {"d": prompts([*map(str, range(19)), "x", r"\boxed{"])})
    assert "the reference answers of 1 of 21 prompts of 'd'" in caplog.text and "'d/21'" in caplog.text


async def test_preflight_references_in_further_columns_are_read_before_the_run() -> None:
    data = [source(type="short_answer", references_key="aliases")]
    await check_references(data, {"d": prompts(["", "NYC"], aliases={"text": ["NYC"]})})
    with pytest.raises(DataError, match="column 'aliases' has no valid reference answers"):
        await check_references(data, {"d": prompts(["NYC"], aliases={"label": 3})})


async def test_preflight_references_that_are_plain_need_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on sums starts as fast as before."""
    from roll.rewards import reference_checks

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a worker was asked")

    monkeypatch.setattr(reference_checks, "run_in_pool", refuse)
    await check_references([source(type="math")], {"d": prompts(["7", "-3", "1/2", "$5", "40%", "2 1/2", "3e8"])})
    await check_references([source(type="choice")], {"d": prompts(list("ABCDE"))})
    with pytest.raises(AssertionError, match="a worker was asked"):
        await check_references([source(type="math")], {"d": prompts(["x+1"])})


def test_preflight_references_are_a_sample_spread_over_the_source() -> None:
    items = prompts([str(number) for number in range(100)])
    stream = PromptStream([WeightedSource(domain="d", items=items, weight=1.0, fingerprint="")], lambda *_: None, 0)  # type: ignore[arg-type, return-value]
    assert [prompt.answer for prompt in stream.sample_by_domain(4)["d"]] == ["0", "25", "50", "75"]
    assert len(stream.sample_by_domain(1000)["d"]) == 100
