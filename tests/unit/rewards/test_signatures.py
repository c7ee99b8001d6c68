"""Reward functions are called by the names of their arguments: ROLL's, or verl's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roll.errors import ConfigError
from roll.rewards.pickled_function import pickle_function
from roll.rewards.python import call_reward
from roll.rewards.signatures import bind_arguments, build_argument_values, check_signature
from roll.types import Prompt

ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}


def prompt(metadata: dict[str, Any] | None = None) -> Prompt:
    return Prompt(uid="d/0", domain="d", messages=(), answer="72", metadata=ROW if metadata is None else metadata)


def called(function: Callable[..., Any], metadata: dict[str, Any] | None = None, **options: Any) -> Any:
    check_signature(function, "f", options)
    arguments, named = bind_arguments(function, build_argument_values("It is 72.", prompt(metadata)), options)
    return function(*arguments, **named)


def test_reward_signature_of_verl_are_bound_by_name() -> None:
    expected = ("openai/gsm8k", "It is 72.", "72", {"split": "train", "index": 0})
    assert (
        called(
            lambda data_source, solution_str, ground_truth, extra_info=None: (
                data_source,
                solution_str,
                ground_truth,
                extra_info,
            )
        )
        == expected
    )
    assert (
        called(
            lambda data_source, solution_str, ground_truth, extra_info, **kwargs: (
                data_source,
                solution_str,
                ground_truth,
                extra_info,
            )
        )
        == expected
    )
    assert (
        called(
            lambda *, extra_info, ground_truth, solution_str, data_source: (
                data_source,
                solution_str,
                ground_truth,
                extra_info,
            )
        )
        == expected
    )
    assert called(lambda solution_str, ground_truth, method="strict": (solution_str, ground_truth, method)) == (
        "It is 72.",
        "72",
        "strict",
    )
    assert called(lambda solution_str, ground_truth, method: method, method="flexible") == "flexible"


def test_reward_signature_of_verl_get_the_row_where_it_has_no_columns_of_verls() -> None:
    found = called(
        lambda data_source, solution_str, ground_truth, extra_info: (data_source, ground_truth, extra_info),
        {"level": 3},
    )
    assert found == ("d", "72", {"level": 3})


def test_reward_signature_of_verl_get_references_that_are_no_text() -> None:
    metadata = {"reward_model": {"ground_truth": {"target": ["a", "b"]}}}
    assert called(lambda solution_str, ground_truth: ground_truth, metadata) == {"target": ["a", "b"]}


def test_reward_signature_of_roll_are_bound_by_place_whatever_their_names() -> None:
    expected = ("It is 72.", "72", ROW)
    assert called(lambda text, answer, metadata: (text, answer, metadata)) == expected
    assert called(lambda a, b, c, d=1: (a, b, c)) == expected
    assert called(lambda *given: given) == expected
    assert called(lambda text, reference, metadata, scale: (text, reference, metadata), scale=2) == expected


def test_reward_signature_of_roll_in_another_order_are_bound_by_name() -> None:
    assert called(lambda metadata, answer, text: (text, answer)) == ("It is 72.", "72")
    assert called(lambda answer, text, metadata: (text, answer)) == ("It is 72.", "72")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda text: 1.0, "too many positional arguments"),
        (lambda text, answer: 1.0, "too many positional arguments"),
        (lambda: 1.0, "too many positional arguments"),
        (lambda answer, question, text: 1.0, "the parameters are not in the order text, answer, metadata"),
        (
            lambda prompts, completions, **kwargs: 1.0,
            "the parameter 'prompts' receives a batch, but ROLL scores one answer at a time",
        ),
        (lambda completions, answer, **kwargs: 1.0, "the parameter 'completions' receives a batch"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: 1.0, "'data_sources' receives a batch"),
        (
            lambda data_source, solution_str, ground_truth, tokenizer: 1.0,
            "ROLL has no value for the argument 'tokenizer'",
        ),
        (lambda solution_str, ground_truth, /: 1.0, "'solution_str' cannot be passed by name"),
    ],
)
def test_reward_signature_that_do_not_fit_are_refused_with_both_that_do(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_signature(function, "f", {})
    message = str(refused.value)
    assert "(text, answer, metadata)" in message and why in message
    assert "(data_source, solution_str, ground_truth, extra_info)" in message


def test_reward_signature_refuse_options_that_no_argument_takes() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        check_signature(lambda solution_str, ground_truth: 1.0, "f", {"size": 1})


def test_reward_signature_of_verl_may_return_a_score_with_other_figures() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": 0.5, "acc": True, "pred": "72", "odd": float("nan"), "share": np.float32(0.25)}

    judgement = call_reward(pickle_function(compute_score), build_argument_values("It is 72.", prompt()), {})
    assert (judgement.value, judgement.verdict) == (0.5, "0.5")
    assert dict(judgement.parts) == {"acc": 1.0, "share": 0.25}
