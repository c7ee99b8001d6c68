"""Settings that transformers 4 reads, next to those of version 5."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer
from worlds.exported_models import FAMILIES, config_of

from roll.models.transformers4_compat import (
    add_older_config_keys,
    add_older_tokenizer_keys,
    write_transformers4_settings,
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, {"rope_theta": 1e5}),
        (
            {"rope_parameters": LLAMA3},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        (
            {
                "model_type": "phi3",
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                    "original_max_position_embeddings": 8,
                },
            },
            {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            {"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            {"rotary_emb_base": 1e4, "rotary_pct": 0.25},
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 8}, {"num_experts": 8}),
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, {}),
        ({"rope_parameters": None}, {}),
        ({}, {}),
    ],
)
def test_transformers4_compat_older_config_keys_are_added_and_nothing_is_changed(
    config: dict[str, Any], added: dict[str, Any]
):
    before = json.dumps(config)
    assert add_older_config_keys(config) == config | added
    assert json.dumps(config) == before
    assert add_older_config_keys({"text_config": config})["text_config"] == config | added


def test_transformers4_compat_older_config_keys_are_left_out_where_version_4_has_no_way_to_say_it():
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert add_older_config_keys({"model_type": "olmo3", "rope_parameters": by_layer}).keys() == {
        "model_type",
        "rope_parameters",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers4_compat_older_config_keys_mean_the_same_to_this_version(tmp_path: Path, name: str):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    write_transformers4_settings(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert ("rope_theta" in written and "torch_dtype" in written) or config.dtype is None
    found = AutoConfig.from_pretrained(tmp_path)
    for key, value in expected.to_dict().items():
        if key == "rope_parameters":
            assert {k: v for k, v in getattr(found, key).items() if k != "type"} == value
        else:
            assert getattr(found, key) == value, key
    before = (tmp_path / "config.json").read_bytes()
    write_transformers4_settings(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_transformers4_compat_older_config_keys_that_this_version_reads_otherwise_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config_of("llama").save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    monkeypatch.setattr(
        "roll.models.transformers4_compat.add_older_config_keys",
        lambda config: dict(config) | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    )
    with caplog.at_level(logging.WARNING):
        write_transformers4_settings(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before
    assert "transformers 4 does not support the rotary embeddings" in caplog.text


def test_transformers4_compat_older_tokenizer_keys_name_a_class_that_version_4_has():
    newer = {
        "tokenizer_class": "TokenizersBackend",
        "is_local": True,
        "extra_special_tokens": ["<a>"],
        "eos_token": "x",
    }
    older = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"], "eos_token": "x"}
    assert add_older_tokenizer_keys(newer, is_fast=True) == older
    assert add_older_tokenizer_keys(older, is_fast=True) == older
    assert add_older_tokenizer_keys(newer, is_fast=False)["tokenizer_class"] == "TokenizersBackend"
    named = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image_token": "<i>"}}
    assert add_older_tokenizer_keys(named, is_fast=True) == named


def test_transformers4_compat_older_tokenizer_keys_mean_the_same_to_this_version(tiny_model: Path, tmp_path: Path):
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    shutil.copy(tiny_model / "config.json", tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    write_transformers4_settings(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|endoftext|>"]
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.all_special_tokens == expected.all_special_tokens
    assert found.extra_special_tokens == expected.extra_special_tokens == ["<|endoftext|>"]
    assert found("a<|endoftext|>b<|im_end|>") == expected("a<|endoftext|>b<|im_end|>")
    assert found.chat_template == expected.chat_template
