"""Tool calling: the formats in which models write tool calls, by name; `auto` detects all of them.

Calls inside the model's reasoning are ignored by default.

>>> sorted(TOOL_CALL_FORMATS)
['auto', 'gemma4', 'glm', 'harmony', 'hermes', 'json', 'llama', 'mistral', 'template', 'xml']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll.data.reasoning import extract_answer
from roll.envs.tools.calls import gemma, hermes, llama, mistral
from roll.envs.tools.calls.base import MAX_CALLS, ParsedCalls, ToolCallFormat, Tools
from roll.envs.tools.calls.gemma import GEMMA
from roll.envs.tools.calls.glm import GLM, is_glm
from roll.envs.tools.calls.harmony import HARMONY, is_harmony
from roll.envs.tools.calls.hermes import HERMES
from roll.envs.tools.calls.json_format import JSON
from roll.envs.tools.calls.llama import LLAMA
from roll.envs.tools.calls.mistral import MISTRAL
from roll.envs.tools.calls.xml import XML
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = ["MAX_CALLS", "TEMPLATE", "TOOL_CALL_FORMATS", "ParsedCalls", "ToolCallFormat", "get_tool_call_format"]


def _parse(text: str, tools: Tools) -> ParsedCalls:
    """Detect the format from its markers and parse the calls. Unmarked JSON is tried last: it may be an answer."""
    if is_harmony(text):
        return HARMONY.parse(text, tools)
    if gemma.MARK in text:
        return GEMMA.parse(text, tools)
    if hermes.BEGIN in text:
        return (GLM if is_glm(text) else HERMES).parse(text, tools)
    if mistral.TOOL_CALLS_TOKEN in text:
        return MISTRAL.parse(text, tools)
    if llama.PYTHON_TAG in text:
        return LLAMA.parse(text, tools)
    for tool_format in (XML, LLAMA, JSON, MISTRAL):
        if found := tool_format.parse(text, tools):
            return found
    return ParsedCalls()


TEMPLATE = "template"

_FORMATS_WITH_REASONING: Mapping[str, ToolCallFormat] = {
    "auto": replace(XML, parse=_parse),
    TEMPLATE: replace(HERMES, parse=_parse, explain=lambda tools: "", format_result=lambda result: result.text),
    "xml": XML,
    "json": JSON,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "glm": GLM,
    "gemma4": GEMMA,
}


def _skip_reasoning(tool_format: ToolCallFormat) -> ToolCallFormat:
    """Return the format, modified to parse only the text after the model's reasoning."""

    def parse(text: str, tools: Tools) -> ParsedCalls:
        if is_harmony(text):  # in this format, calls and reasoning are separate messages
            return tool_format.parse(text, tools)
        answer = extract_answer(text)
        return ParsedCalls() if answer is None else tool_format.parse(answer, tools)

    return replace(tool_format, parse=parse)


TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    name: _skip_reasoning(tool_format) for name, tool_format in _FORMATS_WITH_REASONING.items()
}
"""`auto` and `template` parse all formats. `auto` explains tools and shows results as `xml` does; `template` leaves
both to the model's chat template."""


def get_tool_call_format(name: str, *, parse_reasoning: bool = False) -> ToolCallFormat:
    """Return the format of this name.

    Args:
        name: A name in `TOOL_CALL_FORMATS`.
        parse_reasoning: Whether to parse calls inside the model's reasoning as well.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in TOOL_CALL_FORMATS:
        known = list(TOOL_CALL_FORMATS)
        raise ConfigError(f"unknown tool call format '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    return (_FORMATS_WITH_REASONING if parse_reasoning else TOOL_CALL_FORMATS)[name]
