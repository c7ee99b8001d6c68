"""Escape control tokens in text that a model reads.

A tokenizer turns `<|im_end|>` into the token that ends a message, wherever the text came from. An answer that contains
this string could end its own message, and continue as the user or as the judge. A space inside the string makes it
ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["escape_control_tokens", "make_escaper"]

_TAGS = (
    "s|bos|eos|pad|unk|cls|sep|mask|sop|eop|eoh|eoa|eom|eot|role|think|thinking|reasoning|thought|assistant|user|system"
    "|tool_calls?|tool_responses?|tools|function_calls?|start_of_turn|end_of_turn|start_of_image|end_of_image"
    "|beginning_of_sentence|end_of_sentence|beginning_of_text|end_of_text|end_of_utterance|im_start|im_end"
    "|(?:BOS|EOS|PAD|UNK|CLS|SEP|MASK|EOP)_TOKEN|SPECIAL_\\d{1,4}|reserved_\\d{1,4}|unused\\d{1,4}|extra_id_\\d{1,4}"
    "|seed:[a-z_]{1,30}"
)
_BRACKETED = (
    "INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS|CALL_ID|PREFIX|MIDDLE|SUFFIX|IMG"
    "|gMASK|sMASK|MASK|BOS|EOS|CLS|SEP|PAD|UNK|UNUSED_TOKEN_\\d{1,4}"
)
_COMMON_TOKEN_PATTERN = re.compile(
    r"<(?=\|[^|<>\s]{1,40}\|>)"  # <|im_end|>, <|eot_id|>, <|endoftext|>
    r"|<(?=\uff5c[^\uff5c<>\s]{1,40}\uff5c>)"  # DeepSeek's, with wide bars
    rf"|<(?=/?(?:{_TAGS})>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=\|[^|\[\]\s]{1,40}\|\])"  # [|endofturn|]
    rf"|\[(?=/?(?:{_BRACKETED})\])"
    r"|\](?=~[a-z]{1,12}\])|\[(?=e~\[)"  # MiniMax's ]~b] and [e~[
    r"|<(?=<<(?:QUESTION|ANSWER|REFERENCE|A|B)\b)|>(?=>>)"  # the delimiters of the judge's own prompt
)


_MARKUP_TOKEN_PATTERN = re.compile(r"[<\[].{1,60}[>\]]")
"""Matches added tokens such as `</think>`, which are often not marked as special."""


def escape_control_tokens(text: str) -> str:
    """Return the text with the control tokens of all common model families escaped."""
    return _COMMON_TOKEN_PATTERN.sub(lambda match: match.group() + " ", text)


def make_escaper(tokenizer: Any) -> Callable[[str], str]:
    """Return a function that escapes the control tokens of a model's tokenizer, as `escape_control_tokens` does."""
    known = {str(token) for token in tokenizer.all_special_tokens}
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    known |= {str(token) for token in added if token.special or _MARKUP_TOKEN_PATTERN.fullmatch(str(token))}
    words = sorted((word for word in known if len(word) > 1 and not word.isspace()), key=len, reverse=True)
    if not words:
        return lambda text: text
    pattern = re.compile("|".join(f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in words))
    return lambda text: pattern.sub(lambda match: match.group() + " ", text)
