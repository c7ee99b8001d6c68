"""One rollout's turns and tokens, against numbers that were computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from unit.dashboard.conftest import client_of, ids

from roll.dashboard.rollout_details import build_details, build_token_columns
from roll.dashboard.rollouts import encode_row
from roll.dashboard.vocabulary import Vocabulary

GATE = {"algorithm.gate.type": "min_clip", "algorithm.gate.low": 0.2, "algorithm.gate.high": 0.2}
ROW: dict[str, Any] = {
    "token_ids": [1, 2, 9, 3],
    "policy_versions": [4, 4, -1, 5],
    "logprobs": [-1.0, -2.0, 0.0, -3.0],
    "trainer_logprobs": [-1.5, -2.0, None, -3.0],
    "update_logprobs": [-1.0, -2.0, None, -4.0],
    "ref_logprobs": [-1.5, -1.0, None, -3.0],
    "token_advantages": [2.0, 2.0, None, -2.0],
    "text": "all", "prompt": "ask",
}  # fmt: skip


def vocabulary() -> Vocabulary:
    words = {f"w{i}": i for i in range(9)} | {"<tool_response>": 9}
    return Vocabulary(Tokenizer(WordLevel(words, unk_token="w0")))


def test_dashboard_rollout_columns_are_what_their_names_say() -> None:
    found = build_token_columns(ROW, GATE, vocabulary())
    assert found["tokens"] == ["w1", "w2", "<tool_response>", "w3"]
    columns = found["columns"]
    assert columns["mask"] == [1, 1, 0, 1]
    assert columns["policy_version"] == [4, 4, None, 5]
    assert columns["logprob"] == [-1.0, -2.0, None, -3.0]
    assert columns["difference"] == [-0.5, 0.0, None, 0.0]
    assert columns["ratio"] == pytest.approx([math.exp(0.5), 1.0, None, math.exp(-1.0)])
    assert columns["clip"] == [1.0, 0.0, None, 1.0]
    assert columns["kl"] == pytest.approx([0.0, math.e - 2, None, 0.0])
    assert set(found["missing"]) == {"entropy"}


def test_dashboard_rollout_a_token_is_clipped_only_where_its_advantage_pushes_outwards() -> None:
    columns = build_token_columns(ROW | {"token_advantages": [-2.0, 2.0, None, 2.0]}, GATE, None)["columns"]
    assert columns["clip"] == [0.0, 0.0, None, 0.0]


def test_dashboard_rollout_each_side_is_clipped_at_its_own_bound() -> None:
    gate = GATE | {"algorithm.gate.low": 0.5, "algorithm.gate.high": 0.9}
    row = ROW | {"update_logprobs": [-0.9, -2.3, None, -3.8]}  # ratios e^0.6 = 1.82, e^-0.3 = 0.74, e^-0.8 = 0.45
    for advantages, clipped in (([1.0, 1.0, None, 1.0], [0, 0, None, 0]), ([-1.0, -1.0, None, -1.0], [0, 0, None, 1])):
        assert build_token_columns(row | {"token_advantages": advantages}, gate, None)["columns"]["clip"] == clipped


def test_dashboard_rollout_with_one_update_the_ratio_is_one_and_against_the_engine_it_is_their_factor() -> None:
    row = ROW | {"update_logprobs": None}
    assert build_token_columns(row, GATE, None)["columns"]["ratio"] == [1.0, 1.0, None, 1.0]
    against = GATE | {"algorithm.ratio.against": "rollout"}
    assert build_token_columns(row, against, None)["columns"]["ratio"] == pytest.approx(
        [math.exp(-0.5), 1.0, None, 1.0]
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kind": "eval"}, "evaluations"),
        ({}, "older than tracking.token_columns"),
        ({"tracking.token_columns": False}, "tracking.token_columns=false"),
        ({"tracking.token_columns": True}, "did not process this rollout"),
    ],
)
def test_dashboard_rollout_a_column_that_is_missing_says_why(settings: dict[str, Any], why: str) -> None:
    row = {name: ROW[name] for name in ("token_ids", "policy_versions", "logprobs")} | {"advantage": 0.5}
    found = build_token_columns(row, settings, None)
    assert found["columns"]["advantage"] == [0.5, 0.5, None, 0.5]
    assert why in found["missing"]["trainer_logprob"] and why in found["missing"]["ratio"]
    assert found["tokens"] == ["⟨1⟩", "⟨2⟩", "⟨9⟩", "⟨3⟩"] and "tokenizer" in found["problem"]


def test_dashboard_rollout_without_a_reference_or_a_gate_by_tokens_the_reason_is_theirs() -> None:
    missing = build_token_columns(ROW | {"ref_logprobs": None}, {"algorithm.gate.type": "soft"}, None)["missing"]
    assert "reference" in missing["kl"] and "soft" in missing["clip"]


def test_dashboard_rollout_turns_are_told_apart_by_who_wrote_them() -> None:
    found = build_details(ROW | {"components": [("math", 1.0), ("nan", math.nan)]}, vocabulary())
    assert [(turn["kind"], turn["start"], turn["end"]) for turn in found["turns"]] == [
        ("prompt", None, None), ("model", 0, 2), ("tool", 2, 3), ("model", 3, 4),
    ]  # fmt: skip
    assert found["turns"][1]["text"] == "w1 w2"
    assert found["components"] == {"math": 1.0, "nan": None}
    assert found["policy_versions"] == [4, 5]


def test_dashboard_rollout_recorded_turns_count_also_where_nothing_stands_between_them() -> None:
    turns = [{"start": 0, "end": 2, "reward": 0.25}, {"start": 2, "end": 4, "reward": 1.0}]
    found = build_details(ROW | {"turns": turns}, None)["turns"][1:]
    assert [(turn["start"], turn["end"], turn["reward"]) for turn in found] == [(0, 2, 0.25), (2, 4, 1.0)]


def test_dashboard_rollout_what_a_run_recorded_comes_back(make_run: Callable[..., Path]) -> None:
    client = client_of(make_run())
    (run,) = ids(client).values()
    one = client.get(f"/api/runs/{run}/rollouts/{encode_row(2, 'train', 0)}").json()
    assert (one["rollout_id"], one["answer"], one["text"]) == ("4.0", "5", "The answer is 4.")
    assert one["messages"][0] == {"role": "system", "content": "Add."}
    assert one["components"] == {"form": 0.5, "math": 1.0}
    found = client.get(f"/api/runs/{run}/rollouts/{encode_row(2, 'train', 0)}/tokens").json()["columns"]
    assert found["difference"] == [0.0, -0.25, -0.375]
    assert found["advantage"] == [-1.0, -1.0, None]
    assert found["ratio"] == pytest.approx([1.0, math.exp(-1.0), None])
    assert found["clip"] == [0.0, 1.0, None]
