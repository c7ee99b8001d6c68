"""Words that end a message for a model, in text that is only to be read.

A tokenizer turns `<|im_end|>` into the token that ends a message wherever the text came from. An answer that holds it
could close its own message, and go on as the user or as the judge. A space within makes it a word like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["defused", "defuser"]

_COMMON = re.compile(
    r"<(?=\|[^|<>\s]{1,40}\|>)"  # <|im_end|>, <|eot_id|>, <|endoftext|>
    r"|<(?=\uff5c[^\uff5c<>\s]{1,40}\uff5c>)"  # DeepSeek's, with wide bars
    r"|<(?=/?(?:s|bos|eos|pad|unk|cls|sep|start_of_turn|end_of_turn|extra_id_\d{1,3})>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|gMASK|BOS|EOS|CLS|SEP)\])"
)


def defused(text: str) -> str:
    """The text without the control words of the families of models that are in common use, whatever reads it."""
    return _COMMON.sub(lambda match: match.group() + " ", text)


def defuser(tokenizer: Any) -> Callable[[str], str]:
    """The same for the very tokens of one model."""
    known = {str(token) for token in tokenizer.all_special_tokens}
    known |= {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
    words = sorted((word for word in known if len(word) > 1 and not word.isspace()), key=len, reverse=True)
    if not words:
        return lambda text: text
    pattern = re.compile("|".join(f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in words))
    return lambda text: pattern.sub(lambda match: match.group() + " ", text)
