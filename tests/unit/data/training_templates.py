"""The training templates that TRL ships, each with a tokenizer; nothing of TRL is imported."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from roll.models import load_tokenizer

__all__ = ["templates", "tokenizers_of"]


@cache
def templates() -> dict[str, str]:
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps the training templates")
    directory = Path(package.origin).parent / "chat_templates"
    found = {path.name.removesuffix("_training.jinja"): path for path in directory.glob("*_training.jinja")}
    if not found:
        pytest.skip(f"the installed TRL keeps no training templates in {directory}")
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


_SPELT = re.compile(
    r"<\|[^|<>\s'\"{}]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|</?(?:start|end)_of_\w+>|\[gMASK\]|<sop>"
)


@cache
def tokenizers_of(tiny_model: Path) -> dict[str, PreTrainedTokenizerBase]:
    """Return a tokenizer of bytes with each template and its special tokens, by the template's name."""
    made = {}
    for name, text in templates().items():
        tokenizer = load_tokenizer(str(tiny_model))
        special = ["</s>", "<s>", *sorted(set(_SPELT.findall(text)))]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.eos_token, tokenizer.bos_token = special[:2]
        tokenizer.chat_template = text
        made[name] = tokenizer
    return made
