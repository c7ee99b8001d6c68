"""Each pipeline's check refuses the model directories that its run could not train, or would read wrongly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from worlds.model_directories import QUANTIZED, REFUSED, TRAINED, make_directory

from roll.api import check

SHARED: dict[str, Any] = {"name": "run", "evaluation": {"every_num_steps": 0}}
ANSWERING: dict[str, Any] = SHARED | {
    "data": [{"source": "arithmetic", "reward": {"type": "math"}}],
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
    "inference": {"engine": "hf"},
    "training": {"num_steps": 1},
}
RANKS = {
    1: {},
    2: {"type": "ray", "devices_per_node": 2, "device_mapping": {"actor_train": [0, 1], "actor_infer": [0]}},
}


def settings_of(role: str, model: Path, plain: Path, tmp_path: Path) -> dict[str, Any]:
    """A run in which `model` has a role, and `plain` every other one."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    examples = SHARED | {
        "data": [{"source": "file", "path": str(tmp_path / "chats.jsonl")}],
        "training": {"num_epochs": 1, "examples_per_step": 2},
    }
    trained, other = {"model": {"path": str(model)}}, {"model": {"path": str(plain)}}
    pair_data = {"data": [{"source": "file", "path": str(tmp_path / "pairs.jsonl")}]}
    return {
        "sft": examples | trained | {"pipeline": "sft"},
        "rlvr": ANSWERING | trained | {"pipeline": "rlvr"},
        "critic": ANSWERING
        | other
        | {"pipeline": "rlvr", "algorithm": {"type": "ppo", "critic": {"model": str(model)}}},
        "teacher": examples | other | {"pipeline": "distill_offline", "teacher": [{"model": str(model)}]},
        "reference": examples
        | other
        | pair_data
        | {"pipeline": "preference", "preference": {"type": "dpo", "reference_model": str(model)}},
        "online teacher": ANSWERING | other | {"pipeline": "distill", "teacher": [{"model": str(model)}]},
    }[role] | {"output_dir": str(tmp_path / "runs")}


@pytest.fixture(autouse=True)
def without_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds in a process of its own and knows no refused model: rewards and the layout."""

    async def try_rewards(*unused: Any) -> tuple[()]:
        return ()

    monkeypatch.setattr("roll.preflight.rewards.try_rewards", try_rewards)
    monkeypatch.setattr("roll.preflight.layout._run_check", lambda *unused: None)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("role", ["sft", "rlvr", "critic", "teacher", "reference", "online teacher"])
@pytest.mark.integration
def test_model_directories_check_refuses_model_directories(tiny_model: Path, tmp_path: Path, role: str, num_ranks: int):
    for number, (kind, (_, message)) in enumerate(REFUSED.items()):
        directory = make_directory(kind, tiny_model, tmp_path / str(number))
        settings = settings_of(role, directory, tiny_model, tmp_path)
        if num_ranks == 2:
            settings["cluster"] = RANKS[2]
        report = check(settings)
        found = [problem for problem in report.problems if str(directory) in problem]
        assert len(found) == 1, (kind, report.problems)
        assert re.search(message, found[0]), found[0]


@pytest.mark.parametrize("kind", TRAINED)
def test_model_directories_check_accepts_model_directories_of_the_same_model(
    tiny_model: Path, tmp_path: Path, kind: str
):
    directory = make_directory(kind, tiny_model, tmp_path / "model")
    plain, own = (check(settings_of("rlvr", model, tiny_model, tmp_path)) for model in (tiny_model, directory))
    assert own.problems == []
    assert own.model == plain.model


def test_model_directories_check_accepts_a_quantized_judge_where_vllm_serves_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    directory = make_directory(QUANTIZED[0], tiny_model, tmp_path / "model")
    settings = settings_of("rlvr", tiny_model, tiny_model, tmp_path)
    settings["data"] = [
        {"source": "arithmetic", "reward": {"type": "judge", "rubric": "Is it right?", "max_reply_tokens": 50}}
    ]
    found = {}
    for engine in ("hf", "vllm"):
        report = check(settings | {"judge": {"model": str(directory), "engine": engine}})
        found[engine] = [problem for problem in report.problems if "quantized" in problem]
    assert found["vllm"] == [] and len(found["hf"]) == 1
