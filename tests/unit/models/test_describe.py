"""Descriptions come from headers alone and agree with the loaded model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from worlds.tiny_model import write_tiny_model

from roll.errors import ConfigError, ModelError
from roll.models import (
    CATALOGUE,
    check_rope_scaling,
    count_parameters,
    describe_model,
    load_causal_lm,
    load_tokenizer,
    read_context_length,
    read_rope_scaling_length,
)


def test_model_describe_parameters_of_the_tiny_model_counted_by_hand(tiny_model: Path) -> None:
    embedding, norm = 260 * 32, 32
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32
    mlp = 3 * 32 * 64
    assert count_parameters(tiny_model) == embedding + 2 * (attention + mlp + 2 * norm) + norm


def test_model_describe_tied_weights_count_once_and_untied_twice(tmp_path: Path) -> None:
    untied = write_tiny_model(tmp_path / "untied", tied=False)
    tied = write_tiny_model(tmp_path / "tied")
    assert count_parameters(untied) - count_parameters(tied) == 260 * 32


def test_model_describe_description_of_the_tiny_model(tiny_model: Path) -> None:
    description = describe_model(tiny_model)
    assert description.architecture == "LlamaForCausalLM"
    assert (description.num_layers, description.num_heads, description.num_kv_heads, description.head_dim) == (
        2,
        4,
        2,
        8,
    )
    assert description.dtype == "float32" and description.vocab_size == 260
    assert read_context_length(tiny_model) == 512
    assert description.compute_kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dims, bytes


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32}, 32),
        ({"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "dynamic", "factor": 2.0}}}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_model_describe_texts_may_be_as_long_as_positions_are_turned_alike(
    tiny_model: Path, tmp_path: Path, rope: dict[str, object], limit: int | None
) -> None:
    settings = json.loads((tiny_model / "config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "rope_parameters"} | rope
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_rope_scaling_length(settings) == limit
    check_rope_scaling(tmp_path, limit or 512, "x")
    if limit is None:
        check_rope_scaling(tmp_path, 10_000, "x")
        return
    with pytest.raises(ConfigError, match=f"beyond {limit} .* set training.max_example_tokens to at most {limit}"):
        check_rope_scaling(tmp_path, limit + 1, "training.max_example_tokens")


def test_model_describe_catalogue_describes_the_default_model_as_its_files_do(default_model: Path) -> None:
    files = json.loads((default_model / "config.json").read_text())
    stated = CATALOGUE["smollm2-135m-instruct"]
    assert {key: files[key] for key in stated.config} == stated.config
    assert count_parameters(default_model) == stated.num_parameters
    assert describe_model(default_model) == describe_model("smollm2-135m-instruct")


def test_model_describe_header_count_equals_the_loaded_models(tiny_model: Path) -> None:
    model = load_causal_lm(tiny_model, "float32")
    assert count_parameters(tiny_model) == sum(p.numel() for p in model.parameters())


def test_model_describe_describing_and_resolving_import_no_torch(tiny_model: Path) -> None:
    program = (
        "import sys; from roll.models import describe_model, resolve_model\n"
        f"path = {str(tiny_model)!r}\n"
        "describe_model(path); describe_model('smollm2-135m-instruct'); resolve_model(path)\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x10\0\0\0\0\0\0\0not json at all!"])
def test_model_describe_corrupted_weights_are_named(tiny_model: Path, tmp_path: Path, content: bytes) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors.*corrupted"):
        describe_model(directory)


def test_model_describe_a_config_without_sizes_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (directory / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match="hidden_size"):
        describe_model(directory)


def test_model_describe_sizes_of_a_multimodal_config_are_those_of_its_language_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"architectures": ["SomeVLM"], "text_config": config}))
    assert describe_model(directory).num_layers == 2 and describe_model(directory).architecture == "SomeVLM"


def test_model_describe_a_mixture_is_as_wide_as_the_experts_that_a_token_goes_through(
    tiny_model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
    (copy / "config.json").write_text(json.dumps(config | more))
    assert describe_model(copy).intermediate_size == 2 * 24 + 24
    assert (describe_model(copy).experts_per_token, describe_model(tiny_model).experts_per_token) == (2, 0)
    assert (describe_model(copy).num_experts, describe_model(tiny_model).num_experts) == (8, 0)


def test_model_describe_weights_of_experts_are_counted_by_their_names(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    names = ("model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj")
    others = ("model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.gate.weight")
    tensors = {name: torch.zeros(4, 6) for name in (*names, *others)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"vocab_size": 20}))
    found = describe_model(copy)
    assert (found.num_parameters, found.expert_parameters) == (4 * 24, 2 * 24)


def test_model_describe_keys_and_values_that_are_unfolded_count_with_the_width_that_they_have_then(
    tiny_model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 7, "kv_lora_rank": 16}
    (copy / "config.json").write_text(json.dumps(config | latent))
    found = describe_model(copy)
    assert (found.head_dim, found.num_kv_heads) == (10, 4)  # of keys 12, of values 7; for every head of queries


@pytest.mark.parametrize(
    ("more", "norms", "gates"),
    [({}, True, True), ({"hidden_act": "gelu"}, False, False), ({"hidden_activation": "gelu_tanh"}, False, False)],
)
def test_model_describe_norms_are_as_wide_as_all_that_they_take(
    tiny_model: Path, tmp_path: Path, more: dict[str, str], norms: bool, gates: bool
) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    assert describe_model(copy).norm_width == 2 * 32
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 20} | more))
    layer = "model.layers.0."
    tensors = {
        f"{layer}{name}.weight": torch.zeros(n) for name, n in (("input_layernorm", 32), ("self_attn.q_norm", 8))
    }
    tensors |= {f"{layer}self_attn.k_norm.weight": torch.zeros(8), f"{layer}kv_a_layernorm.weight": torch.zeros(8)}
    tensors |= {"model.layers.1.input_layernorm.weight": torch.zeros(32), "model.norm.weight": torch.zeros(32)}
    tensors |= {f"{layer}mlp.gate_proj.weight": torch.zeros(64, 32)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    found = describe_model(copy)
    assert found.norm_width == 32 + 4 * 8 + 2 * 8 + 8  # heads of queries, of keys, and what all heads share
    assert (found.has_fusable_norms, found.has_fusable_gates) == (norms, gates)


def test_model_describe_without_a_gate_s_own_matrix_an_mlp_is_another(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    weights = {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(300, 40)}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "config.json").write_text(
        json.dumps(json.loads((copy / "config.json").read_text()) | {"num_hidden_layers": 1})
    )
    found = describe_model(copy)
    assert (found.has_fusable_norms, found.has_fusable_gates, found.norm_width) == (True, False, 2 * 32)


MALFORMED = [
    ("hidden_size", 0),
    ("hidden_size", 10**30),
    ("hidden_size", True),
    ("num_hidden_layers", -1),
    ("num_hidden_layers", 10**6),
    ("num_labels", 2**40),
    ("num_attention_heads", 0),
    ("num_key_value_heads", -1),
    ("head_dim", 0),
    ("intermediate_size", float("nan")),
    ("max_position_embeddings", 1e99),
    ("num_experts", -1),
    ("n_shared_experts", "2"),
]


@pytest.mark.parametrize(("key", "value"), MALFORMED)
def test_model_describe_a_size_that_no_model_has_is_named_with_its_value(
    tiny_model: Path, tmp_path: Path, key: str, value: object
) -> None:
    copy = changed(tiny_model, tmp_path / "copy", {key: value})
    for read in (describe_model, load_tokenizer, lambda path: load_causal_lm(path, "float32")):
        with pytest.raises(ModelError, match=rf"{key} in .*config.json' must be .* got {re.escape(repr(value)[:57])}"):
            read(copy)


@pytest.mark.parametrize("chosen", [0, 9])
def test_model_describe_a_token_goes_through_one_expert_or_more_of_those_that_there_are(
    tiny_model: Path, tmp_path: Path, chosen: int
) -> None:
    copy = changed(tiny_model, tmp_path / "copy", {"num_experts": 8, "num_experts_per_tok": chosen})
    with pytest.raises(
        ModelError, match=rf"num_experts_per_tok in .* must be from 1 to the number of experts \(8\), got {chosen}"
    ):
        describe_model(copy)


def test_model_describe_layers_or_a_vocabulary_that_the_files_cannot_have_are_refused_before_loading(
    tiny_model: Path, tmp_path: Path
) -> None:
    layers = changed(tiny_model, tmp_path / "layers", {"num_hidden_layers": 9999})
    with pytest.raises(ModelError, match="num_hidden_layers: 9999, but the weight files contain 20 tensors"):
        load_causal_lm(layers, "float32")
    words = changed(tiny_model, tmp_path / "words", {"vocab_size": 2**31 - 1})
    with pytest.raises(ModelError, match="vocab_size: 2147483647 and hidden_size: 32, but the weight files contain"):
        load_causal_lm(words, "float32")


@pytest.mark.parametrize("odd", [{"architectures": 7}, {"text_config": "none"}, {"intermediate_size": [64, 32]}])
def test_model_describe_what_else_stands_in_a_config_stops_no_description(
    tiny_model: Path, tmp_path: Path, odd: dict[str, object]
) -> None:
    assert describe_model(changed(tiny_model, tmp_path / "copy", odd)).intermediate_size == 64


def test_model_describe_a_config_that_nests_too_deeply_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    copy = changed(tiny_model, tmp_path / "copy", {})
    (copy / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match="is nested too deeply"):
        describe_model(copy)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ["model.safetensors"], 7])
def test_model_describe_an_index_names_files_of_its_own_directory(
    tiny_model: Path, tmp_path: Path, name: object
) -> None:
    copy = changed(tiny_model, tmp_path / "copy", {})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"index\.json' (references the weight file '[./]|must have a 'weight_map')"):
        describe_model(copy)


def changed(model: Path, target: Path, keys: dict[str, object]) -> Path:
    """A copy of a model with these keys in its config.json."""
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | keys))
    return target
