"""What users name as they like stays in its place on the card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from roll.config.pipelines import PIPELINES
from roll.pipelines.model_card import (
    _choose_loader,
    _format_public_name,
    _format_settings,
    _format_usage,
    _get_method,
)


def test_model_card_odd_names_break_no_table() -> None:
    rewards = [{"type": "python", "name": "half|full\n"}, {"type": "math"}]
    rows = list(_format_settings({"data": [{"domain": "a|b`\n## owned", "reward": rewards}]}))
    assert r"| data `a\|b' ## owned` | rewards: half\|full, math |" in rows
    assert not any("\n" in row for row in rows)
    assert _format_public_name("odd`\nname") == "`odd' name`"


def test_model_card_an_adapter_says_how_it_is_put_on_its_base() -> None:
    generates = "AutoModelForCausalLM"
    ours = list(_format_usage("smollm2-135m-instruct", generates))
    assert 'base = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m-instruct"))' in ours
    assert 'base = AutoModelForCausalLM.from_pretrained("me/model")' in list(_format_usage("me/model", generates))
    assert 'base = AutoModelForCausalLM.from_pretrained("mine")' in list(_format_usage("/home/me/mine", generates))
    scorer = list(_format_usage("me/model", "AutoModelForSequenceClassification"))
    assert 'base = AutoModelForSequenceClassification.from_pretrained("me/model", num_labels=1)' in scorer
    for lines in (scorer, ours, _format_usage("me/model", generates)):
        compile("\n".join(line for line in lines if not line.startswith("```")), "card", "exec")


@pytest.mark.parametrize(
    ("config", "scores", "loader", "task"),
    [
        ({}, False, "AutoModelForCausalLM", "text-generation"),
        ({"vision_config": {}}, False, "AutoModelForImageTextToText", "image-text-to-text"),
        ({}, True, "AutoModelForSequenceClassification", "text-classification"),
    ],
)
def test_model_card_says_what_loads_the_model(
    tiny_model: Path, tmp_path: Path, config: dict[str, Any], scores: bool, loader: str, task: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | config))
    assert _choose_loader(tmp_path / "model", "reward_model" if scores else "sft") == (loader, task)
    assert hasattr(transformers, loader)


def test_model_card_what_was_learnt_by_is_said_of_every_pipeline() -> None:
    from_rewards = {name for name in PIPELINES if _get_method({"pipeline": name}) == "reinforcement learning"}
    assert from_rewards == {"rlvr", "agentic", "diffusion"}
    assert _get_method({"pipeline": "diffusion", "algorithm": {"type": "flow_matching"}}) == "flow matching"
    assert _get_method({"pipeline": "distill_offline"}) == _get_method({"pipeline": "distill"}) == "distillation"


def test_model_card_a_run_on_examples_says_no_steps_that_it_had_not_and_no_rewards() -> None:
    config = {"data": [{"source": "file", "domain": ""}], "training": {"num_steps": 0, "num_epochs": 2.0}}
    assert list(_format_settings(config))[4:] == ["| `training.num_epochs` | 2.0 |", "| data `file` | examples |", ""]
    assert "| `training.num_steps` | 3 |" in list(_format_settings({"training": {"num_steps": 3}}))
