"""Chat templates as models publish them, each on the default model's tokenizer.

The texts are read from the installed TRL, which keeps models' own templates; nothing of it is imported. Mistral's,
which it does not have, is written here in the form that the models of version 3 read.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from roll.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PUBLISHED", "published_tokenizer"]

_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_GEMMA = ("<end_of_turn>", "<bos>", "<start_of_turn>", "<eos>")
_MISTRAL = ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL = (*_MISTRAL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEPSEEK = tuple(
    f"<\uff5c{word}\uff5c>"
    for word in ("end\u2581of\u2581sentence", "begin\u2581of\u2581sentence", "User", "Assistant")
)

_MISTRAL_TEXT = """\
{%- set spoken = namespace(turns=0, last_asked=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set spoken.last_asked = loop.index0 -%}{%- endif -%}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}
        {%- if (message.role == 'user') != (spoken.turns % 2 == 0) -%}
            {{- raise_exception('users and assistants take turns') -}}
        {%- endif -%}
        {%- set spoken.turns = spoken.turns + 1 -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- if tools and loop.index0 == spoken.last_asked -%}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST] ' -}}
        {%- if loop.last and messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
        {{- message.content + '[/INST]' -}}
    {%- elif message.role == 'assistant' and message.tool_calls -%}
        {{- '[TOOL_CALLS] [' -}}
        {%- for call in message.tool_calls -%}
            {%- if not call.id or call.id | length != 9 -%}
                {{- raise_exception('the id of a call has nine letters') -}}
            {%- endif -%}
            {{- '{"name": ' + (call.function.name | tojson) + ', "arguments": ' + (call.function.arguments | tojson) -}}
            {{- ', "id": ' + (call.id | tojson) + '}' -}}
            {{- '' if loop.last else ', ' -}}
        {%- endfor -%}
        {{- ']' + eos_token -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' + (message.content | trim) + eos_token -}}
    {%- elif message.role == 'tool' -%}
        {%- if not message.tool_call_id or message.tool_call_id | length != 9 -%}
            {{- raise_exception('the id of a call has nine letters') -}}
        {%- endif -%}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": ' -}}
        {{- (message.tool_call_id | tojson) + '}[/TOOL_RESULTS]' -}}
    {%- elif not loop.first -%}
        {{- raise_exception('only user, assistant and tool come after the system message') -}}
    {%- endif -%}
{%- endfor -%}
"""

PUBLISHED: dict[str, tuple[str, ...]] = {
    "smollm2": (),
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "llama3_1": _LLAMA,
    "llama3_2": _LLAMA,
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "mistral": _MISTRAL,
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
        tokenizer.chat_template = _MISTRAL_TEXT if name == "mistral" else _text(name)
    return tokenizer


def _text(name: str) -> str:
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps the published chat templates")
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
