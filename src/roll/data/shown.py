"""Check that a chat template shows all of its input, so that no part of a conversation is dropped silently.

A template leaves out fields that it does not read, without an error. So each field of a message other than its role and
content is compared with a rendering without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from roll.data.templates import ChatTemplate, Tool
from roll.errors import DataError, short
from roll.types import Message

__all__ = ["check_shown"]

_Render: TypeAlias = Callable[[Sequence[Message]], str]


def check_shown(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any]
) -> None:
    """Check that the template shows the system message, tools, its own arguments and every field of every message.

    Earlier reasoning may still be left out as the conversation continues, as in the model's training format.

    Raises:
        DataError: The template leaves out one of these, or there is no template and the conversation has them.
    """
    fields = any(not message.is_plain and message.role != "tool" for message in messages)
    if not template.source:
        if tools or template_kwargs or fields:
            raise DataError(
                "the model has no chat template, so tools, calls of tools, reasoning, names and arguments of the "
                "template have no place: write them into the text, or choose a model with a template."
            )
        return
    for name in template_kwargs:
        if name not in template.variables:
            raise DataError(
                f"the model's chat template does not read {short(name)}, which the row gives as an argument of the "
                "template: remove it, or choose a model whose template reads it."
            )
    if messages and messages[0].role == "system" and template.drops_system:
        raise DataError("the model's chat template leaves out system messages: put their text into the user's.")
    if tools and template.render(messages, tools=tools, **template_kwargs) == template.render(
        messages, **template_kwargs
    ):
        raise DataError(
            "the model's chat template does not show tools: choose a model that was made for them, or set tools_key to "
            "null."
        )
    suspicious = template.drops_tools and any(message.role == "tool" for message in messages)
    if fields or suspicious:
        _check_messages(messages, lambda shown: template.render(shown, False, tools=tools, **template_kwargs))


def _check_messages(messages: Sequence[Message], render: _Render) -> None:
    for place, message in enumerate(messages):
        before, role = messages[:place], message.role
        for fewer, left_out in _remove_each_part(message):
            if _same(render, before, message, fewer):
                raise DataError(
                    f"the model's chat template leaves out {left_out} of message {place + 1}, of the {role}: write it "
                    "into `content` as the model spells it, name its field in `ignored_fields`, leave such rows out, "
                    "or choose a model whose template shows it."
                )


def _remove_each_part(message: Message) -> Iterator[tuple[Message, str]]:
    """Yield the message without each part that a template might leave out, and the name of the part."""
    if message.role == "tool":
        if message.text.strip():
            yield replace(message, content=""), "what a tool says,"
        return
    calls = message.tool_calls
    called = f"the call of the tool {calls[0].get('function', {}).get('name')!r}" if calls else ""
    if message.reasoning:
        yield replace(message, reasoning=None), "the reasoning"
    if calls:
        yield replace(message, tool_calls=()), called
    if message.name:
        yield replace(message, name=None), "the `name`"
    if len(calls) > 1:
        yield replace(message, tool_calls=calls[:-1]), "all but the first calls of tools"
    if calls and message.text.strip():
        yield replace(message, content=""), "the text next to a call of a tool"


def _same(render: _Render, before: Sequence[Message], message: Message, fewer: Message) -> bool:
    """Return whether two forms of a message are rendered alike: behind the latest question, all since it, and all."""
    for context in _contexts(before, message):
        try:
            if render([*context, message]) != render([*context, fewer]):
                return False
        except DataError:  # rendering the whole conversation reports the template's error
            if context is before:
                return False
    return True


def _contexts(before: Sequence[Message], message: Message) -> list[Sequence[Message]]:
    """Return the possible contexts of a message, from the shortest to the full one."""
    asked = max((place for place, earlier in enumerate(before) if earlier.role == "user"), default=0)
    calling = len(before)
    if message.role == "tool":  # a tool's result needs its call
        calling = max((place for place, earlier in enumerate(before) if earlier.role == "assistant"), default=0)
    short = [*before[asked : asked + 1], *before[max(calling, asked + 1) :]]
    contexts = [short, before[asked:]] if len(short) < len(before) - asked else [before[asked:]]
    return [*contexts, before] if asked else [*contexts[:-1], before]
