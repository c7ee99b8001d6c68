"""Model directories as people have them: trained as the model that they are, or refused with what to do."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds.model_directories import NOT_FINITE, QUANTIZED, REFUSED, TRAINED, make_directory

from roll.errors import ModelError
from roll.models import (
    check_stored_finite,
    count_parameters,
    describe_model,
    find_model,
    find_stop_token_ids,
    load_causal_lm,
    load_scorer,
    load_tokenizer,
    resolve_model,
)
from roll.models.loading import tie_weights


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in NOT_FINITE])
def test_model_directory_model_directories_are_refused_wherever_they_are_asked_for(
    tiny_model: Path, tmp_path: Path, kind: str
):
    directory = make_directory(kind, tiny_model, tmp_path / "model")
    for ask in (find_model, resolve_model, lambda path: load_causal_lm(path, "float32")):
        with pytest.raises(ModelError, match=REFUSED[kind][1]):
            ask(directory)
    with pytest.raises(ModelError, match=REFUSED[kind][1]):
        load_scorer(directory, "float32")


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_model_directory_model_weights_that_are_not_finite_are_named_in_files_and_when_loaded(
    tiny_model: Path, tmp_path: Path, kind: str
):
    directory = make_directory(kind, tiny_model, tmp_path / "model")
    left: dict[str, Any] = {}
    load_causal_lm(directory, "float32", meta_init=lambda model, files: left.update(model=model, files=files))
    for look in (
        lambda: check_stored_finite(directory),
        lambda: load_causal_lm(directory, "bfloat16"),
        lambda: [left["files"].read(n, [(0, s) for s in p.shape]) for n, p in left["model"].named_parameters()],
    ):
        with pytest.raises(ModelError, match=REFUSED[kind][1]):
            look()


@pytest.mark.parametrize("kind", TRAINED)
def test_model_directory_model_directories_of_the_same_model_are_loaded_alike(
    tiny_model: Path, tmp_path: Path, kind: str
):
    directory = make_directory(kind, tiny_model, tmp_path / "model")
    expected = dict(load_causal_lm(tiny_model, "float32").named_parameters())
    model = load_causal_lm(directory, "float32")
    assert dict(model.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())
    left: dict[str, Any] = {}
    empty = load_causal_lm(directory, "float32", meta_init=lambda model, files: left.update(files=files))
    assert dict(empty.named_parameters()).keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(left["files"].read(name, [(0, size) for size in parameter.shape]), parameter)
    assert count_parameters(directory) == count_parameters(tiny_model)
    assert describe_model(directory) == describe_model(tiny_model)


def test_model_directory_model_head_that_differs_is_trained_apart_where_the_configuration_says_so(
    tiny_model: Path, tmp_path: Path
):
    directory = make_directory("tied, different head stored", tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model = load_causal_lm(directory, "float32")
    assert model.get_parameter("lm_head.weight") is not model.get_parameter("model.embed_tokens.weight")
    assert describe_model(directory).has_untied_lm_head


def test_model_directory_model_head_is_tied_where_the_default_of_its_class_ties(tiny_model: Path, tmp_path: Path):
    directory = make_directory("tied, different head stored", tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))
    assert find_model(directory) is not None  # a Llama does not tie by default
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    with pytest.raises(ModelError, match="ties its weights"):
        find_model(directory)


def test_model_directory_model_weights_that_are_tied_are_compared_again_once_they_are_loaded(tiny_model: Path):
    model = load_causal_lm(tiny_model, "float32")
    embeddings = model.get_parameter("model.embed_tokens.weight")
    head = model.get_submodule("lm_head")
    head.weight = torch.nn.Parameter(embeddings.detach().clone())
    tie_weights(model, "m")
    assert head.weight is embeddings
    head.weight = torch.nn.Parameter(embeddings.detach() + 1)
    with pytest.raises(ModelError, match="ties its weights"):
        tie_weights(model, "m")


def test_model_directory_model_head_in_another_dtype_is_equal_where_its_numbers_are(tiny_model: Path, tmp_path: Path):
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"].bfloat16()
    save = {**weights, "model.embed_tokens.weight": embeddings, "lm_head.weight": embeddings.float()}
    save_file(save, directory / "model.safetensors", metadata={"format": "pt"})
    assert find_model(directory) is not None
    save_file(
        save | {"lm_head.weight": embeddings.float() + 1e-4}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ModelError, match="ties its weights"):
        find_model(directory)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_model_directory_quantized_models_are_served_where_no_trainer_reads_them(
    tiny_model: Path, tmp_path: Path, kind: str
):
    directory = make_directory(kind, tiny_model, tmp_path / "model")
    assert find_model(directory, allow_quantized=True) == resolve_model(directory, allow_quantized=True) == directory
    assert load_tokenizer(directory) is not None
    assert find_stop_token_ids(directory) == (2, 3)


@pytest.mark.parametrize("settings", [None, {}])
def test_model_directory_model_that_names_no_quantization_is_not_quantized(
    tiny_model: Path, tmp_path: Path, settings: Any
):
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert find_model(directory) == directory


def test_model_directory_model_quantization_of_the_text_part_counts(tiny_model: Path, tmp_path: Path):
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] = {**config, "quantization_config": {"quant_method": "awq"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'awq'"):
        find_model(directory)


def test_model_directory_model_file_that_the_configuration_names_must_be_the_one_that_is_read(
    tiny_model: Path, tmp_path: Path
):
    directory = make_directory("another format next to it", tiny_model, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": "consolidated.safetensors"}))
    with pytest.raises(ModelError, match=r"has transformers_weights: 'consolidated\.safetensors'"):
        find_model(directory)
    (directory / "config.json").write_text(json.dumps(config | {"transformers_weights": "model.safetensors"}))
    assert find_model(directory) == directory


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), None])
def test_model_directory_model_files_with_numbers_that_are_not_finite_are_found_at_any_place(
    tmp_path: Path, dtype: str, number: float | None
):
    weights = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "a": torch.full((700_001,), 65504.0, dtype=getattr(torch, dtype)),
    }
    if number is not None:
        weights["a"][-1] = number
    save_file(weights | {"empty": torch.ones(0)}, tmp_path / "model.safetensors")
    if number is None:
        check_stored_finite(tmp_path)
    else:
        with pytest.raises(ModelError, match="weight 'a' of model"):
            check_stored_finite(tmp_path)
        check_stored_finite(tmp_path, max_bytes=100)


def test_model_directory_model_weights_that_overflow_the_dtype_asked_for_are_refused(tiny_model: Path, tmp_path: Path):
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    load_causal_lm(directory, "bfloat16")
    with pytest.raises(ModelError, match=r"weight 'model\.norm\.weight' .* has NaN or infinite values"):
        load_causal_lm(directory, "float16")


def test_model_directory_a_diffusion_model_is_named_as_such(tiny_model: Path, tmp_path: Path):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    (directory / "model.safetensors").rename(directory / "diffusion_pytorch_model.safetensors")
    with pytest.raises(
        ModelError, match="contains the denoiser of a diffusion model, but a language model is required"
    ):
        find_model(directory)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "chat_template.jinja", "adapter_config.json"]
)
@pytest.mark.parametrize("kind", ["link to nothing", "link to itself", "directory", "pipe"])
def test_model_directory_model_directories_with_something_else_in_a_files_place_are_refused(
    tiny_model: Path, tmp_path: Path, name: str, kind: str
):
    """A file of which a download left a link alone is not one that the model never had."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    file = directory / name
    file.unlink(missing_ok=True)
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(name if kind == "link to itself" else "blob")
    with pytest.raises(ModelError, match=f"{name}' is not a file, or is a broken link"):
        find_model(directory)
