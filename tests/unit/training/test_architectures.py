"""Other decoder models get the gradient of their own padded forward pass, or a clear refusal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from training_helpers import grads_of, make_batch, make_spec, reference_logprobs, reference_loss, relative_error

from roll.algorithms.losses import PolicyLoss
from roll.errors import ModelError
from roll.models import load_causal_lm
from roll.training import TorchBackend

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": False},
    "Qwen3": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 6},
    "Gemma3Text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Olmo2": {},
}


def write_model(path: Path, tokenizer: Path, name: str, **settings: Any) -> Path:
    """A tiny random model of another architecture, with the tokenizer of the tiny Llama."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | settings))
    classes = {"Gemma3Text": "Gemma3ForCausalLM"}
    model = getattr(transformers, classes.get(name, f"{name}ForCausalLM"))(config)
    for parameter in model.parameters():  # larger than at initialisation, so that attention is not uniform
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, path)
    return path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share_prefix", [True, False])
def test_gradients_equal_those_of_the_model_itself(
    tiny_model: Path, tmp_path: Path, name: str, share_prefix: bool
) -> None:
    path = write_model(tmp_path / name, tiny_model, name, **MODELS[name])
    batch = make_batch(3)
    model = load_causal_lm(path, torch.float32, attention="eager")
    reference_loss(reference_logprobs(model, batch), batch, clip=0.2, kl=0).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    backend = TorchBackend(make_spec(path, share_prefix=share_prefix, max_tokens_per_micro_batch=60))
    backend.train_step(batch, PolicyLoss())
    assert relative_error(grads_of(backend), expected) <= 1e-5


def test_a_model_that_changes_its_logits_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path / "gemma2", tiny_model, "Gemma2", final_logit_softcapping=30.0, query_pre_attn_scalar=8)
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        TorchBackend(make_spec(path))
    scaled = write_model(tmp_path / "granite", tiny_model, "Granite", logits_scaling=4.0)
    with pytest.raises(ModelError, match="logits_scaling"):
        TorchBackend(make_spec(scaled))


def test_a_model_with_attention_sinks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "oss", tiny_model, "GptOss", num_local_experts=2, num_experts_per_tok=1, layer_types=None
    )
    with pytest.raises(ModelError, match="s_aux"):
        TorchBackend(make_spec(path)).train_step(make_batch(), PolicyLoss())
