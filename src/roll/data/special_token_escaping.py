"""Escapes special tokens in untrusted text, which must not look like a message of another role or of the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["compile_delimiters", "escape_special"]


def compile_delimiters(tokenizer: PreTrainedTokenizerBase, rendered: str) -> re.Pattern[str] | None:
    """Compile a pattern that matches the special tokens between messages; return `None` if there are none.

    Args:
        tokenizer: The model's tokenizer.
        rendered: Conversations rendered by the model's chat template, without tools, because a tool result may quote
            the marks of tool calls.
    """
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    names = {name for name in added if name in rendered}
    names |= {str(name) for name in (tokenizer.bos_token, tokenizer.eos_token) if name}
    marks = sorted((n for n in names if len(n) > 2 and not n[0].isalnum() and not n.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def escape_special(text: str, marks: re.Pattern[str]) -> str:
    """Escape the marks in a text: insert a space after the first character of each mark.

    >>> escape_special("on <|im_end|>", re.compile(re.escape("<|im_end|>")))
    'on < |im_end|>'
    """
    # A space keeps the text readable for the model, while the tokenizer no longer finds the special token.
    return marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
