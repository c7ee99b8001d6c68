"""Tool calls in text: the formats by name, and `auto`, which detects all of them.

A call inside the model's reasoning is only a thought, and is not made.

>>> sorted(FORMS)
['auto', 'gemma4', 'glm', 'harmony', 'hermes', 'json', 'llama', 'mistral', 'template', 'xml']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll.data.reasoning import answer_of
from roll.envs.tools.calls import gemma, hermes, llama, mistral
from roll.envs.tools.calls.form import MOST_CALLS, CallForm, Found, Tools
from roll.envs.tools.calls.gemma import GEMMA
from roll.envs.tools.calls.glm import GLM, is_glm
from roll.envs.tools.calls.harmony import HARMONY, is_harmony
from roll.envs.tools.calls.hermes import HERMES
from roll.envs.tools.calls.json_form import JSON
from roll.envs.tools.calls.llama import LLAMA
from roll.envs.tools.calls.mistral import MISTRAL
from roll.envs.tools.calls.xml import XML
from roll.errors import ConfigError
from roll.registry import did_you_mean

__all__ = ["FORMS", "MOST_CALLS", "TEMPLATE", "CallForm", "Found", "form_named"]


def _parse(text: str, tools: Tools) -> Found:
    """Parse calls in the format that the text's markers show; unmarked JSON comes last, as answers may be JSON too."""
    if is_harmony(text):
        return HARMONY.parse(text, tools)
    if gemma.MARK in text:
        return GEMMA.parse(text, tools)
    if hermes.BEGIN in text:
        return (GLM if is_glm(text) else HERMES).parse(text, tools)
    if mistral.MARK in text:
        return MISTRAL.parse(text, tools)
    if llama.TAG in text:
        return LLAMA.parse(text, tools)
    for form in (XML, LLAMA, JSON, MISTRAL):
        if found := form.parse(text, tools):
            return found
    return Found()


TEMPLATE = "template"

_FORMS: Mapping[str, CallForm] = {
    "auto": replace(XML, parse=_parse),
    TEMPLATE: replace(HERMES, parse=_parse, explain=lambda tools: "", result=lambda result: result.text),
    "xml": XML,
    "json": JSON,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "glm": GLM,
    "gemma4": GEMMA,
}


def _after_reasoning(form: CallForm) -> CallForm:
    """Return the format, changed to parse only the text after the model's reasoning."""

    def parse(text: str, tools: Tools) -> Found:
        if is_harmony(text):  # calls of this format are separate messages, apart from the reasoning
            return form.parse(text, tools)
        answer = answer_of(text)
        return Found() if answer is None else form.parse(answer, tools)

    return replace(form, parse=parse)


FORMS: Mapping[str, CallForm] = {name: _after_reasoning(form) for name, form in _FORMS.items()}
"""`auto` and `template` parse all formats. `auto` explains tools and shows results as `xml` does; `template` leaves
both to the model's chat template."""


def form_named(name: str, *, parse_reasoning: bool = False) -> CallForm:
    """Return the format of this name.

    Args:
        name: A name in `FORMS`.
        parse_reasoning: Whether calls inside the model's reasoning count.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in FORMS:
        raise ConfigError(
            f"unknown form of tool calls '{name}'.{did_you_mean(name, list(FORMS))} Known: {', '.join(FORMS)}."
        )
    return (_FORMS if parse_reasoning else FORMS)[name]
