"""Checks that a chat template renders all of its input, so that no part of a conversation is dropped silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from roll.data.templates import ChatTemplate, Tool
from roll.errors import DataError, shorten
from roll.types import Message, get_content_key

__all__ = ["check_fully_rendered"]

_Render: TypeAlias = Callable[[Sequence[Message]], str]


def check_fully_rendered(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool], template_kwargs: Mapping[str, Any]
) -> None:
    """Check that the template renders the system message, tools, template arguments and every field of every message.

    Earlier reasoning may still be left out as the conversation continues, as in the model's training format.

    Raises:
        DataError: The template leaves out a part, or the conversation needs a template but the tokenizer has none.
    """
    fields = any(not message.is_plain and message.role != "tool" for message in messages)
    if not template.source:
        if tools or template_kwargs or fields:
            raise DataError(
                "the model has no chat template, so tools, tool calls, reasoning, names and arguments of the template "
                "are not supported: write them into the text, or choose a model with a template."
            )
        return
    for name in template_kwargs:
        if name not in template.variables:
            raise DataError(
                f"the model's chat template does not use {shorten(name)}, which the row sets as a template argument: "
                "remove it, or choose a model whose template uses it."
            )
    if messages and messages[0].role == "system" and template.drops_system_messages:
        raise DataError("the model's chat template omits system messages: move them into user messages.")
    if tools and template.render(messages, tools=tools, **template_kwargs) == template.render(
        messages, **template_kwargs
    ):
        raise DataError(
            "the model's chat template does not support tools: choose a model that supports them, or set tools_key to "
            "null."
        )
    suspicious = template.drops_tool_results and any(message.role == "tool" for message in messages)
    if fields or suspicious:
        _check_messages(messages, lambda shown: template.render(shown, False, tools=tools, **template_kwargs))


def _check_messages(messages: Sequence[Message], render: _Render) -> None:
    # A template leaves out fields that it does not read, without an error. So each field other than role and content is
    # compared with a rendering without it.
    for place, message in enumerate(messages):
        before, role = messages[:place], message.role
        for fewer, left_out in _remove_each_part(message):
            if _renders_identically(render, before, message, fewer):
                raise DataError(
                    f"the model's chat template leaves out {left_out} in message {place + 1} (role '{role}'): write "
                    "it into `content` in the model's format, add its field to `ignored_fields`, remove such rows, or "
                    "choose a model whose template renders it."
                )


def _remove_each_part(message: Message) -> Iterator[tuple[Message, str]]:
    """For each part that a template might leave out, yield the message without this part, and the part's name."""
    if message.role == "tool":
        if get_content_key(message.content).strip():
            yield replace(message, content=""), "the tool result"
        return
    calls = message.tool_calls
    called = f"the call to tool {calls[0].get('function', {}).get('name')!r}" if calls else ""
    if message.reasoning:
        yield replace(message, reasoning=None), "the reasoning"
    if calls:
        yield replace(message, tool_calls=()), called
    if message.name:
        yield replace(message, name=None), "the `name`"
    if len(calls) > 1:
        yield replace(message, tool_calls=calls[:-1]), "the last tool call"
    if calls and get_content_key(message.content).strip():
        yield replace(message, content=""), "the text next to a tool call"


def _renders_identically(render: _Render, before: Sequence[Message], message: Message, reduced: Message) -> bool:
    """Return whether the template renders the message with and without a part (`reduced`) to the same text.

    The texts are compared in several contexts: after the latest question only, after all messages since that question,
    and after the whole conversation.
    """
    for context in _list_contexts(before, message):
        try:
            if render([*context, message]) != render([*context, reduced]):
                return False
        except DataError:  # rendering the whole conversation reports the template's error
            if context is before:
                return False
    return True


def _list_contexts(before: Sequence[Message], message: Message) -> list[Sequence[Message]]:
    """Return the contexts in which a message is rendered, from the shortest to all messages before it."""
    asked = max((place for place, earlier in enumerate(before) if earlier.role == "user"), default=0)
    calling = len(before)
    if message.role == "tool":  # a tool result needs its call
        calling = max((place for place, earlier in enumerate(before) if earlier.role == "assistant"), default=0)
    short = [*before[asked : asked + 1], *before[max(calling, asked + 1) :]]
    contexts = [short, before[asked:]] if len(short) < len(before) - asked else [before[asked:]]
    return [*contexts, before] if asked else [*contexts[:-1], before]
