"""Chat templates as models publish them (`tests/data/chat_templates`), each on the default model's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from roll.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PUBLISHED", "published_tokenizer"]

_FILES = Path(__file__).parents[1] / "data" / "chat_templates"
_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_GEMMA = ("<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>")
_MISTRAL = ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL = (*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEPSEEK = tuple(
    f"<\uff5c{word}\uff5c>"
    for word in ("end\u2581of\u2581sentence", "begin\u2581of\u2581sentence", "User", "Assistant")
)

PUBLISHED: dict[str, tuple[str, ...]] = {
    "smollm2": (),
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "mistral_v3": _MISTRAL,
    "mistral_v3_tekken": _MISTRAL,
    "phi3": ("<|end|>", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "deepseek_r1_distill": _DEEPSEEK,
}
"""Special tokens by template: the first ends an answer, the second begins a text."""


@cache
def published_tokenizer(model: Path, name: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer with this template and the tokens that it needs. Read-only, please."""
    tokenizer = load_tokenizer(str(model))
    if name != "smollm2":
        special = PUBLISHED[name]
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.eos_token, tokenizer.bos_token = special[:2]
        tokenizer.chat_template = (_FILES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer
