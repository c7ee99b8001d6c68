"""Sanitize foreign text in conversations: it must not look like another role's message, or like the model's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["boundaries", "escape_special"]


def boundaries(tokenizer: PreTrainedTokenizerBase, written: str) -> re.Pattern[str] | None:
    """Return a pattern of the tokens that separate messages, as text; `None` if there are no such tokens.

    Args:
        tokenizer: The model's tokenizer.
        written: Conversations as its chat template writes them, without tools: tool calls have marks of their own,
            which a tool's result may quote.
    """
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    names = {name for name in added if name in written}
    names |= {str(name) for name in (tokenizer.bos_token, tokenizer.eos_token) if name}
    marks = sorted((n for n in names if len(n) > 2 and not n[0].isalnum() and not n.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def escape_special(text: str, marks: re.Pattern[str]) -> str:
    """Return the text with a space behind the first character of every mark in it.

    >>> parted("on <|im_end|>", re.compile(re.escape("<|im_end|>")))
    'on < |im_end|>'
    """
    return marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
