"""Generation beside training, on a tiny random model: freshness, data used once, and α = 0 as a special case."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from safetensors.torch import load_file

import roll
from roll.pipelines.online.online_run import OnlineRun
from roll.rewards.compose import WeightedReward
from roll.types import RewardResult, Rollout


def config(directory: Path, source: Path, /, *, scheduling: dict[str, Any], num_steps: int = 4, **changes: Any) -> dict:
    base = tiny_config(source, num_steps=num_steps)
    base["rollout"] = {**base["rollout"], "scheduling": scheduling, **changes.pop("rollout", {})}
    return {**base, "output_dir": str(directory), **changes}


def rows(directory: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def ledger(directory: Path) -> list[dict[str, Any]]:
    newest = max((directory / "run" / "checkpoints").iterdir())
    return [json.loads(line) for line in (newest / "ledger.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, Any]:
    return load_file(max((directory / "run" / "checkpoints").iterdir()) / "model" / "model.safetensors")


def without_times(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clocked = ("time", "_s", "per_second", "tokens_per", "memory")
    return [{k: v for k, v in row.items() if not any(word in k for word in clocked)} for row in found]


OTHERS: dict[str, dict[str, Any]] = {
    "agentic": {
        "environments": [
            {
                "environment": "guess_number",
                "num_turns": 2,
                "options": {"max_number": 3},
                "reward": [
                    {"type": "environment"},
                    {"type": "regex", "pattern": "[a-m]", "require_finished": False},
                ],
            }
        ],
        "inference": {"engine": "hf", "max_context": 400},
    },
    "distill": {"distillation": {"reward_weight": 0.5}},
    "preference_online": {},
    "rejection_sampling": {},
}
"""What the other pipelines need beside what `rlvr` has."""


def other(name: str, directory: Path, source: Path, **changes: Any) -> dict[str, Any]:
    found = config(directory, source, pipeline=name, **OTHERS[name], **changes)
    if "environments" in found:
        del found["data"]
    return {**found, "teacher": str(source)} if name == "distill" else found


@pytest.mark.parametrize("pipeline", ["rlvr", "preference_online"])
def test_async_run_the_asynchronous_loop_at_ratio_0_gives_the_synchronous_numbers_bit_for_bit(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    roll.train(config(tmp_path / "a", tiny_model, scheduling={}, pipeline=pipeline))
    monkeypatch.setattr(OnlineRun, "is_asynchronous", True)
    roll.train(config(tmp_path / "b", tiny_model, scheduling={}, pipeline=pipeline))
    assert without_times(rows(tmp_path / "a")) == without_times(rows(tmp_path / "b"))
    assert without_times(rows(tmp_path / "a", "eval")) == without_times(rows(tmp_path / "b", "eval"))
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(one[name].equal(other[name]) for name in one)
    assert ledger(tmp_path / "a") == ledger(tmp_path / "b")


@pytest.mark.parametrize(("ratio", "mode"), [(0.5, "keep"), (1, "keep"), (1, "abort"), (1, "drain"), (2, "keep")])
def test_async_run_generation_runs_ahead_within_the_bound(
    tmp_path: Path, tiny_model: Path, ratio: float, mode: str
) -> None:
    roll.train(config(tmp_path, tiny_model, scheduling={"async_ratio": float(ratio), "pause_mode": mode}, num_steps=5))
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert max(row["rollout/staleness_max"] for row in found) == -(-ratio // 1)  # some batch was as old as it may be
    entries = ledger(tmp_path)
    assert Counter(entry["outcome"] for entry in entries)["in_flight"] == 0
    assert len(entries) == 5 * tiny_config(tiny_model, num_steps=1)["rollout"]["prompts_per_step"]
    assert all(row["data/groups_expired"] == 0 for row in found)


@pytest.mark.parametrize("pipeline", list(OTHERS))
def test_async_run_every_online_pipeline_generates_ahead_within_the_bound(
    tmp_path: Path, tiny_model: Path, pipeline: str
) -> None:
    scheduling, quiet = {"async_ratio": 2.0}, {"before_training": False, "num_prompts": 1}
    roll.train(other(pipeline, tmp_path, tiny_model, scheduling=scheduling, num_steps=5, evaluation=quiet))
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in found][-1] > 2
    assert 0 < max(row["rollout/staleness_max"] for row in found) <= 2
    entries = ledger(tmp_path)
    assert [entry["draw_id"] for entry in entries] == list(range(15))
    assert {entry["outcome"] for entry in entries} <= {"trained", "filtered"}


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_async_run_with_vllm_too(tmp_path: Path, servable_model: Path) -> None:
    pytest.importorskip("vllm")
    scheduling = {"async_ratio": 1}
    roll.train(config(tmp_path, servable_model, scheduling=scheduling, num_steps=3, inference={"engine": "vllm"}))
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert max(row["rollout/staleness_max"] for row in found) == 1
    assert [entry["draw_id"] for entry in ledger(tmp_path)] == list(range(9))
    assert {entry["outcome"] for entry in ledger(tmp_path)} <= {"trained", "filtered"}


def test_async_run_what_was_given_up_for_its_age_is_recorded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def never_the_first(_: WeightedReward, rollout: Rollout) -> RewardResult:
        seen.append(rollout.prompt.uid)
        if rollout.prompt.uid == seen[0]:
            await asyncio.Event().wait()
        return RewardResult(value=float(rollout.index), correct=False)

    monkeypatch.setattr(WeightedReward, "__call__", never_the_first)
    scheduling = {"async_ratio": 1.0, "stale_policy": "drop"}
    quiet = {"before_training": False, "every_num_steps": 0, "num_prompts": 1}
    roll.train(config(tmp_path, tiny_model, scheduling=scheduling, num_steps=8, evaluation=quiet))
    expired = [entry for entry in ledger(tmp_path) if entry["outcome"] == "expired"]
    assert seen[0] in [entry["uid"] for entry in expired]
    assert all(entry["why"] == "too old" for entry in expired)
    assert sum(row["data/groups_expired"] for row in rows(tmp_path)) == len(expired)
    assert max(row["rollout/staleness_max"] for row in rows(tmp_path)) <= 1
