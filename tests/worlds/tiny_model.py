"""A tiny random Llama with its own tokenizer: real files and real code paths for tests, in milliseconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["SPECIAL_TOKENS", "write_tiny_model"]

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Ids 0 … 3; ids 4 … 259 are the 256 bytes."""
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    directory: str | Path,
    *,
    seed: int = 0,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    context_length: int = 512,
    dtype: str = "float32",
) -> Path:
    """Write a random model that `transformers` loads: grouped-query attention, 260 tokens (bytes, four special ones).

    The same arguments give the same bytes. Weights are scaled so that next-token distributions are neither flat nor
    peaked (logits have a standard deviation of about 1.7).

    Returns:
        The directory.
    """
    from safetensors.torch import save_file

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    sizes = _Sizes(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, tied=tied, dtype=dtype)
    save_file(_random_weights(sizes, seed), target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", _config(sizes, context_length))
    _write_json(target / "generation_config.json", {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1})
    _write_tokenizer(target, context_length)
    return target


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    tied: bool
    dtype: str


def _random_weights(sizes: _Sizes, seed: int) -> dict[str, torch.Tensor]:
    import torch

    hidden, inner = sizes.hidden, 2 * sizes.hidden
    head_dim = hidden // sizes.heads
    queries, keys = sizes.heads * head_dim, sizes.kv_heads * head_dim
    dtype = getattr(torch, sizes.dtype)
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": weight(VOCAB_SIZE, hidden, 1.7 * hidden**-0.5)}
    for layer in range(sizes.layers):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = norm()
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = weight(rows, hidden, hidden**-0.5)
        tensors[name + "self_attn.o_proj.weight"] = weight(hidden, queries, queries**-0.5)
        tensors[name + "post_attention_layernorm.weight"] = norm()
        tensors[name + "mlp.gate_proj.weight"] = weight(inner, hidden, hidden**-0.5)
        tensors[name + "mlp.up_proj.weight"] = weight(inner, hidden, hidden**-0.5)
        tensors[name + "mlp.down_proj.weight"] = weight(hidden, inner, inner**-0.5)
    tensors["model.norm.weight"] = norm()
    if not sizes.tied:
        tensors["lm_head.weight"] = weight(VOCAB_SIZE, hidden, 1.7 * hidden**-0.5)
    return tensors


def _config(sizes: _Sizes, context_length: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": sizes.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": sizes.dtype,
    }


def _write_tokenizer(target: Path, context_length: int) -> None:
    """A byte-level tokenizer without merges: every text has exactly one spelling, one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "additional_special_tokens": ["<|endoftext|>"],
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(target / "tokenizer_config.json", settings)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
