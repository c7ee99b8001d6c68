"""A tiny random Llama with its own tokenizer: real files and real code paths for tests, in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SPECIAL_TOKENS", "write_tiny_model"]

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Ids 0 … 3; ids 4 … 259 are the 256 bytes."""
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
    import torch
    from safetensors.torch import save_file

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    head_dim = hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).to(getattr(torch, dtype))

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(getattr(torch, dtype))

    vocab, width = 256 + len(SPECIAL_TOKENS), 2 * hidden
    tensors = {"model.embed_tokens.weight": weight(vocab, hidden, 1.7 * hidden**-0.5)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = norm()
        for part, rows in (("q", heads * head_dim), ("k", kv_heads * head_dim), ("v", kv_heads * head_dim)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = weight(rows, hidden, hidden**-0.5)
        tensors[name + "self_attn.o_proj.weight"] = weight(hidden, heads * head_dim, (heads * head_dim) ** -0.5)
        tensors[name + "post_attention_layernorm.weight"] = norm()
        tensors[name + "mlp.gate_proj.weight"] = weight(width, hidden, hidden**-0.5)
        tensors[name + "mlp.up_proj.weight"] = weight(width, hidden, hidden**-0.5)
        tensors[name + "mlp.down_proj.weight"] = weight(hidden, width, width**-0.5)
    tensors["model.norm.weight"] = norm()
    if not tied:
        tensors["lm_head.weight"] = weight(vocab, hidden, 1.7 * hidden**-0.5)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": dtype,
    }
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1})
    _write_tokenizer(target, context_length)
    return target


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
