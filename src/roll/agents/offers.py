"""Tools of a request: functions, tools that take one text, groups of either, and a vendor's own tools.

The model only sees functions. A tool that takes one text (`custom` of OpenAI) is a function with one parameter; the
functions of a group (`namespace`) have their own names. `Offer` defines how a call is converted back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll.agents import wire
from roll.agents.notes import Notes
from roll.agents.refusals import Refusal

__all__ = ["INPUT", "Offer", "as_text", "served", "text_tool"]

INPUT = "input"
"""The parameter of a tool that takes one text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One tool in the form that the model sees."""

    name: str
    """The name by which the model calls the tool."""
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    own_name: str = ""
    """The agent's name for the tool, if it differs."""
    namespace: str = ""
    takes_text: bool = False
    deferred: bool = False
    """Whether the model sees the tool only if the conversation refers to it."""

    @property
    def function(self) -> dict[str, Any]:
        """The tool in the form of chat templates."""
        return wire.function_tool(self.name, self.description, self.parameters)

    @property
    def agents_name(self) -> str:
        """The agent's name for the tool, within its namespace."""
        return self.own_name or self.name


def text_tool(name: str, description: str | None, form: Mapping[str, Any] | None) -> Offer:
    """Return the offer of a tool that takes one text.

    Args:
        name: The tool's name.
        description: The tool's description.
        form: The text's format: `{"type": "grammar", "syntax", "definition"}`, which is not enforced.
    """
    words = [description or ""]
    grammar = form.get("grammar") if form is not None and isinstance(form.get("grammar"), Mapping) else form
    definition = grammar.get("definition") if grammar is not None else None
    if isinstance(definition, str):
        words.append(f"The text follows this grammar:\n{definition.strip()}")
    parameter = {"type": "string", "description": "The whole text."}
    schema = {"type": "object", "properties": {INPUT: parameter}, "required": [INPUT]}
    return Offer(name=name, description="\n\n".join(filter(None, words)), parameters=schema, takes_text=True)


def as_text(arguments: Mapping[str, Any]) -> str:
    """Return the text argument of a model's call to a tool that takes one text."""
    value = arguments.get(INPUT)
    return value if isinstance(value, str) else json.dumps(dict(arguments), ensure_ascii=False)


def _named_apart(offers: Sequence[Offer]) -> list[Offer]:
    """Return offers with distinct names: if several groups have a name, each gets its group's name in front."""
    times = Counter(offer.name for offer in offers)
    return [
        replace(offer, name=f"{offer.namespace}__{offer.name}", own_name=offer.name)
        if offer.namespace and times[offer.name] > 1
        else offer
        for offer in offers
    ]


def served(offers: Sequence[Offer], left_out: Sequence[str], notes: Notes) -> list[Offer]:
    """Return the offers, after a note for each tool that only its vendor can run.

    Args:
        offers: The supported tools.
        left_out: Names or types of the other tools.
        notes: Receives the notes.

    Raises:
        Refusal: No tool is supported.
    """
    names = [name[:64] for name in left_out]
    advice = "switch it off in the agent's settings, or give the agent a function that does the same"
    if names and not offers:
        listed = ", ".join(sorted(set(names))[:8])
        message = f"tools: {listed} cannot be served, since only the vendor's own models or servers know it: {advice}."
        raise Refusal(400, "unsupported_parameter", message, field="tools")
    for name in names:
        notes.add(
            f"tool {name}",
            f"agents offer the tool '{name}', which only the vendor's own models or servers know: the policy is not "
            f"told of it ({advice}).",
        )
    return _named_apart(offers)
