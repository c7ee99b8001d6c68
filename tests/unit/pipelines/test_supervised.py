"""What a run on examples is made from: the examples its settings ask for, and names for what models say of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.config.pipelines.sft import SFTConfig
from roll.errors import DataError
from roll.pipelines.state import RunState
from roll.pipelines.supervised.frozen_outputs import build_weights_name
from roll.pipelines.supervised.preparation import build_held_out_batch, build_policy_spec, count_planned_steps, prepare


def config(directory: Path, model: Path, *, dtype: str = "float32", **changes: Any) -> SFTConfig:
    for name, letters in (("train", "abcdefgh"), ("other", "xyz")):
        if (directory / f"{name}.jsonl").exists():
            continue
        rows = ({"prompt": f"Say {x}.", "completion": x * 5} for x in letters)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "file", "path": str(directory / "train.jsonl"), "held_out_path": str(directory / "other.jsonl")}
    model_section = {"path": str(model), "dtype": dtype}
    return SFTConfig.model_validate({"name": "run", "model": model_section, "data": [data], **changes})


def test_supervised_examples_and_evaluations_are_as_long_as_they_may_be(tmp_path: Path, tiny_model: Path) -> None:
    prepared = prepare(config(tmp_path, tiny_model), "supervised")
    length = prepared.examples.report.longest
    assert length is not None
    prepare(config(tmp_path, tiny_model, training={"max_example_tokens": length}), "supervised")
    with pytest.raises(DataError, match=f"has {length} tokens, but the context length is {length - 1}"):
        prepare(config(tmp_path, tiny_model, training={"max_example_tokens": length - 1}), "supervised")
    few = config(tmp_path, tiny_model, evaluation={"num_examples": 2})
    assert build_held_out_batch(few, prepared.examples).num_units == 2
    assert build_held_out_batch(config(tmp_path, tiny_model), prepared.examples).num_units == 3


def test_supervised_what_remains_is_planned_from_where_a_run_stands(tmp_path: Path, tiny_model: Path) -> None:
    """8 examples, 3 per step: 3 steps; 3 more for a second epoch from 8 draws, but 2 more from 10."""
    two = config(tmp_path, tiny_model, training={"num_epochs": 2, "examples_per_step": 3})
    for at, num_steps in ((RunState(), 6), (RunState(step=3, num_draws=8), 6), (RunState(step=5, num_draws=10), 7)):
        assert count_planned_steps(two, "supervised", at) == num_steps
        assert prepare(two, "supervised", at).training.num_steps == num_steps


def test_supervised_engines_that_answer_beside_it_say_how_weights_are_sent(tmp_path: Path, tiny_model: Path) -> None:
    answers = {"data": [{"source": "arithmetic", "reward": "math"}], "inference": {"quantization": "int8"}}
    plain = config(tmp_path, tiny_model)
    asked = config(tmp_path, tiny_model, dtype="bfloat16", evaluation={"answers": answers})
    assert build_policy_spec(plain, prepare(plain, "supervised")).quantization == "none"
    assert build_policy_spec(asked, prepare(asked, "supervised")).quantization == "int8"


def test_supervised_what_models_say_is_kept_apart_by_their_weights_and_their_dtype(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = config(tmp_path, tiny_model)
    spec = build_policy_spec(settings, prepare(settings, "supervised"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    content = bytearray((tiny_model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    half = replace(spec, model=settings.model.model_copy(update={"dtype": "bfloat16"}))
    names = [build_weights_name(found) for found in (spec, replace(spec, model_path=str(other)), half)]
    assert len(set(names)) == 3 and build_weights_name(replace(spec, seed=1)) == names[0]
