"""Loading through `transformers`, and the tokens that end an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds.tiny_model import CHAT_TEMPLATE

from roll.errors import ModelError
from roll.models import find_stop_token_ids, load_causal_lm, load_tokenizer


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit_json(file: Path, **changes: object) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_model_loading_weights_are_cast_to_the_dtype_asked_for(tiny_model: Path, dtype: str | torch.dtype) -> None:
    model = load_causal_lm(tiny_model, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_model_loading_weights_in_float32_begin_with_a_line_of_the_cache_wherever_their_file_has_them(
    model_copy: Path,
) -> None:
    file = model_copy / "model.safetensors"
    weights = load_file(file)
    for note in ("", "eight   "):  # moves all that follows by 8 bytes
        save_file(weights, file, metadata={"format": "pt", "note": note})
        model = load_causal_lm(model_copy, "float32")
        assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("dtype", ["bf16", "nn"])
def test_model_loading_a_dtype_that_is_none_is_refused(tiny_model: Path, dtype: str) -> None:
    with pytest.raises(ModelError, match=dtype):
        load_causal_lm(tiny_model, dtype)


def test_model_loading_an_unknown_architecture_is_refused(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(ModelError, match="no_such_model"):
        load_causal_lm(model_copy, "float32")


def test_model_loading_corrupted_weights_are_refused(model_copy: Path) -> None:
    (model_copy / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors' is corrupted, or is not a safetensors file"):
        load_causal_lm(model_copy, "float32")


def test_model_loading_a_missing_weight_is_refused_and_named_not_invented(model_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model_copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"missing 1 of its weights, for example 'model\.layers\.1\.mlp\.up_proj\.weight':"
    ):
        load_causal_lm(model_copy, "float32")


def test_model_loading_a_weight_of_another_shape_is_refused_and_named(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", intermediate_size=96)
    with pytest.raises(
        ModelError, match=r"for example 'model\.layers\.0\.mlp\.down_proj\.weight': .*, expected \(32, 96\)"
    ):
        load_causal_lm(model_copy, "float32")


def test_model_loading_a_corrupted_tokenizer_is_refused(model_copy: Path) -> None:
    (model_copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(model_copy)


def test_model_loading_a_tokenizer_with_a_length_that_is_no_number_is_refused(model_copy: Path) -> None:
    edit_json(model_copy / "tokenizer_config.json", model_max_length="long")
    with pytest.raises(ModelError, match=r"model_max_length in tokenizer_config.json must be a number, got 'long'"):
        load_tokenizer(model_copy)


def test_model_loading_what_a_library_quotes_of_a_file_is_cut_short(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", model_type="x" * 100_000)
    with pytest.raises(ModelError, match="cannot be loaded") as found:
        load_causal_lm(model_copy, "float32")
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize("named", ["2", 2.5, True, [None], [[2]], 2**31])
def test_model_loading_stop_tokens_that_are_no_token_ids_are_refused(model_copy: Path, named: object) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=named)
    with pytest.raises(ModelError, match=r"generation_config.json' has an invalid eos_token_id: expected a token ID"):
        find_stop_token_ids(model_copy)


def test_model_loading_a_stop_token_below_zero_is_none(model_copy: Path) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=-1)
    assert -1 not in find_stop_token_ids(model_copy)


def test_model_loading_stop_tokens_are_all_that_the_files_name(tiny_model: Path) -> None:
    assert find_stop_token_ids(tiny_model) == (
        2,
        3,
    )  # the chat turn's end, and the document's end from generation_config


def test_model_loading_stop_tokens_of_a_base_model_include_the_end_of_a_chat_turn(model_copy: Path) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=3)
    edit_json(model_copy / "config.json", eos_token_id=3)
    edit_json(model_copy / "tokenizer_config.json", eos_token="<|endoftext|>")
    assert find_stop_token_ids(model_copy) == (2, 3)


def test_model_loading_without_a_chat_template_only_named_tokens_stop(model_copy: Path) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=3)
    edit_json(model_copy / "config.json", eos_token_id=3)
    edit_json(model_copy / "tokenizer_config.json", eos_token="<|endoftext|>", chat_template=None)
    assert find_stop_token_ids(model_copy) == (3,)


def test_model_loading_a_template_that_ends_turns_with_plain_text_adds_no_stop_token(model_copy: Path) -> None:
    edit_json(model_copy / "generation_config.json", eos_token_id=3)
    edit_json(model_copy / "config.json", eos_token_id=3)
    template = CHAT_TEMPLATE.replace("<|im_end|>", "###")
    edit_json(model_copy / "tokenizer_config.json", eos_token="<|endoftext|>", chat_template=template)
    assert find_stop_token_ids(model_copy) == (3,)


def test_model_loading_a_template_that_refuses_the_question_adds_no_stop_token(model_copy: Path) -> None:
    template = "{{ raise_exception('no') }}"
    edit_json(model_copy / "tokenizer_config.json", chat_template=template)
    assert find_stop_token_ids(model_copy) == (2, 3)


def test_model_loading_stop_token_of_the_default_model(default_model: Path) -> None:
    assert find_stop_token_ids(default_model) == (2,)
    assert load_tokenizer(default_model).convert_ids_to_tokens(2) == "<|im_end|>"
