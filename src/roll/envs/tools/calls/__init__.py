"""Tool calls in text: the forms by name, and `auto`, which knows them all.

>>> sorted(FORMS)
['auto', 'hermes', 'json', 'llama', 'mistral', 'template', 'xml']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll.envs.tools.calls import hermes, llama, mistral
from roll.envs.tools.calls.form import MOST_CALLS, CallForm, Found, Tools
from roll.envs.tools.calls.hermes import HERMES
from roll.envs.tools.calls.json_form import JSON
from roll.envs.tools.calls.llama import LLAMA
from roll.envs.tools.calls.mistral import MISTRAL
from roll.envs.tools.calls.xml import XML
from roll.errors import ConfigError
from roll.registry import nearest

__all__ = ["FORMS", "MOST_CALLS", "TEMPLATE", "CallForm", "Found", "form_named"]


def _parse(text: str, tools: Tools) -> Found:
    """By what the text is marked with; unmarked JSON last, since an answer may be JSON as well."""
    if hermes.BEGIN in text:
        return HERMES.parse(text, tools)
    if mistral.MARK in text:
        return MISTRAL.parse(text, tools)
    if llama.TAG in text:
        return LLAMA.parse(text, tools)
    for form in (XML, LLAMA, JSON, MISTRAL):
        if found := form.parse(text, tools):
            return found
    return Found()


TEMPLATE = "template"

FORMS: Mapping[str, CallForm] = {
    "auto": replace(XML, parse=_parse),
    TEMPLATE: replace(HERMES, parse=_parse, explain=lambda tools: "", result=lambda result: result.text),
    "xml": XML,
    "json": JSON,
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
}
"""`auto` and `template` read all. `auto` explains tools and shows results as `xml` does; `template` leaves that to the
model's chat template."""


def form_named(name: str) -> CallForm:
    """The form of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FORMS:
        raise ConfigError(
            f"unknown form of tool calls '{name}'.{nearest(name, list(FORMS))} Known: {', '.join(FORMS)}."
        )
    return FORMS[name]
