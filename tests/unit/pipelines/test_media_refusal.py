"""Pictures, sound and films for a text-only model: every pipeline refuses them before it starts, with the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.load import load_config
from roll.config.pipelines import PIPELINES
from roll.pipelines.registry import CHECKS

PLACE = "'{}/rows.jsonl', line 3"
PICTURE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
]
ASKED = [{"role": "user", "content": PICTURE}]
ANSWER = [{"role": "assistant", "content": "a cat"}]
PAIR = {"chosen": ANSWER, "rejected": [{"role": "assistant", "content": "a dog"}]}
ONLINE = {"rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}, "training": {"num_steps": 1}}
OFFLINE = {"training": {"num_steps": 1, "examples_per_step": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "rlvr": ONLINE,
    "distill": {**ONLINE, "teacher": "TINY"},
    "preference_online": ONLINE,
    "rejection_sampling": ONLINE,
    "sft": OFFLINE,
    "preference": OFFLINE,
    "reward_model": OFFLINE,
    "distill_offline": {**OFFLINE, "teacher": "TINY"},
}


def rows(pipeline: str, asked: Any) -> dict[str, Any]:
    if pipeline in ("preference", "reward_model"):
        return {"prompt": asked, **PAIR}
    if pipeline in ("sft", "distill_offline"):
        return {"prompt": asked, "completion": ANSWER}
    return {"prompt": asked, "answer": "4"}


def problems(pipeline: str, given: dict[str, Any]) -> str:
    """Return what `roll check` refuses a configuration for."""
    return "\n".join(CHECKS.get(pipeline)(load_config(given)).problems)


def refusal(pipeline: str, tiny_model: Path, tmp_path: Path, row: dict[str, Any], **columns: str) -> str:
    plain = [rows(pipeline, [{"role": "user", "content": f"What is {i} + 4?"}]) for i in range(2)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in [*plain, row]))
    settings = {key: str(tiny_model) if value == "TINY" else value for key, value in SETTINGS[pipeline].items()}
    entry = {"source": "file", "path": str(path), "held_out": 0, **columns} | (
        {"reward": "math"} if "rollout" in settings else {}
    )
    given = {"pipeline": pipeline, "name": "x", "output_dir": str(tmp_path), "model": str(tiny_model), "data": [entry]}
    return problems(pipeline, {**given, **settings})


@pytest.mark.parametrize("pipeline", sorted(SETTINGS))
def test_media_in_a_row_is_refused_by_every_pipeline(pipeline: str, tiny_model: Path, tmp_path: Path) -> None:
    said = refusal(pipeline, tiny_model, tmp_path, rows(pipeline, ASKED))
    assert "1 of 3 rows" in said and "1 × images, audio or video" in said
    assert f"{PLACE.format(tmp_path)}, message 1: a part of `content` is of type 'image_url'" in said
    unsupported = "images, audio and video are not supported by pipeline 'reward_model' yet"
    assert (
        unsupported if pipeline == "reward_model" else "the model supports only text; images require a vision-"
    ) in said


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
@pytest.mark.parametrize("column", ["images", "picture"])
def test_media_in_a_column_is_refused_with_the_cause(
    pipeline: str, column: str, tiny_model: Path, tmp_path: Path
) -> None:
    row = rows(pipeline, "What is it?") | {column: ["a.png"]}
    said = refusal(pipeline, tiny_model, tmp_path, row, images_key=column)
    assert f"{PLACE.format(tmp_path)}: the column '{column}' would be ignored" in said
    assert "the model supports only text; images require a vision-language model. Remove it" in said


def test_media_refusal_is_tested_for_every_pipeline() -> None:
    assert {*SETTINGS, "agentic", "diffusion"} == set(PIPELINES)  # rows of `diffusion` are not messages


SEES = """
from roll.types import ImagePart, TextPart

class Sees:
    def reset(self, seed=None):
        return (TextPart(text="What is it?"), ImagePart(digest="00ff")), {}

    def step(self, action):
        return "right", 1.0, True, False, {}
"""


def test_media_in_an_observation_is_refused_by_agentic(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sees.py"
    file.write_text(SEES)
    entry = {"environment": f"{file}:Sees", "num_turns": 1}
    given = {"pipeline": "agentic", "name": "x", "output_dir": str(tmp_path), "model": str(tiny_model)}
    given["environments"] = [entry]
    said = problems("agentic", {**given, **ONLINE})
    assert "sees.py:Sees' returned a part of type 'image'" in said and "this model supports only text" in said
