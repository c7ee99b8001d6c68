"""Renders conversations to text with a tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from roll.data.call_arguments import has_python_style_arguments, with_json_arguments
from roll.errors import DataError
from roll.types import Message, TextPart, map_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PROBE_TEXT", "TEMPLATE_DATE", "ChatTemplate", "Tool", "supports_late_system", "translate_errors"]

Tool: TypeAlias = Mapping[str, Any]
"""A function's JSON schema, in the format of chat templates."""
TEMPLATE_DATE = datetime(2025, 1, 1)
"""The date for templates that write one; it is constant, so that it does not change during a run."""
PROBE_TEXT = "7321640958"
"""A string that no template contains or changes, with which the behavior of templates is tested."""
_REASONING_NAMES = ("reasoning", "thinking")
"""Other names of `reasoning_content` in published templates."""
_GENERATION_MARK_PATTERN = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, escape: Callable[[str], str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._escape = escape
        """Escapes the special tokens of images in text; `None` for a text-only model."""
        self.source = str(getattr(tokenizer, "chat_template", None) or "")
        """The template's text; empty if the tokenizer has none."""
        self._asks_date = "strftime_now" in self.source
        self._reasoning_fields = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", self.source)]

    def render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] = (),
        **switches: Any,
    ) -> str:
        """Render a conversation to text; the text is empty if there are no messages.

        Args:
            messages: The conversation.
            generation_prompt: Whether to append the start of the assistant's next message.
            tools: JSON schemas of the functions that the model may call.
            switches: Additional variables of the template.

        Raises:
            DataError: The template rejects the conversation.
        """
        if not messages:
            return ""
        return self._render_with_arguments(messages, generation_prompt, tools, switches)[1]

    def find_generated_spans(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), **switches: Any
    ) -> list[tuple[int, int]] | None:
        """Find the spans of the rendered text that the template marks as generated; `None` if it has no marks.

        Raises:
            DataError: The template rejects the conversation.
        """
        if not _GENERATION_MARK_PATTERN.search(self.source):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        messages, _ = self._render_with_arguments(messages, False, tools, switches)
        chat: Any = [self._to_template_messages(messages, self._requires_parts)]
        settings: Any = dict(self._tokenizer.special_tokens_map) | self._date | switches
        with translate_errors(messages):
            rendered: Any = render_jinja_template(
                chat,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._tokenizer.get_chat_template(tools=[dict(tool) for tool in tools] or None),
                return_assistant_tokens_mask=True,
                **settings,
            )
        _, spans = rendered
        return spans[0]

    def _render_with_arguments(
        self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Tool], switches: Mapping[str, Any]
    ) -> tuple[Sequence[Message], str]:
        """Render messages; return the messages, with call arguments as the template expects them, and the text.

        Arguments are passed as objects first, and as JSON text if the template does not support objects.
        """
        given = generation_prompt, tools, switches, self._requires_parts
        has_calls = any(message.tool_calls for message in messages)
        # Templates disagree on whether arguments are an object or JSON text, and none says which it reads.
        try:
            text = self._render(messages, *given)
        except DataError:
            if has_calls:
                with suppress(DataError):
                    other = with_json_arguments(messages)
                    return other, self._render(other, *given)
            raise
        if has_calls and has_python_style_arguments(messages, text):
            messages = with_json_arguments(messages)
            text = self._render(messages, *given)
        return messages, text

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads and does not set itself; empty if it cannot be compiled."""
        from jinja2 import TemplateError, meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment: Any = _compile_jinja_template(self.source).environment
            return frozenset(meta.find_undeclared_variables(environment.parse(self.source)))
        except TemplateError:  # rendering reports the template's error
            return frozenset()

    @cached_property
    def drops_system_messages(self) -> bool:
        """True if the template silently drops system messages."""
        messages = [Message(role="system", content=PROBE_TEXT), Message(role="user", content="a")]
        try:
            return PROBE_TEXT not in self.render(messages)
        except DataError:
            return False

    @cached_property
    def drops_tool_results(self) -> bool:
        """True if the template silently drops tool results; without a template, nothing is dropped."""
        messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        try:
            return bool(self.source) and PROBE_TEXT not in self.render(
                [*messages, Message(role="tool", content=PROBE_TEXT)]
            )
        except DataError:
            return False

    @property
    def _date(self) -> dict[str, Any]:
        return {"strftime_now": TEMPLATE_DATE.strftime} if self._asks_date else {}

    @cached_property
    def _requires_parts(self) -> bool:
        """True if the template accepts content only as a list of parts, as templates of some vision models do."""
        asked = [Message(role="user", content=PROBE_TEXT)]
        for parts in (False, True):
            try:
                if PROBE_TEXT in self._render(asked, True, (), {}, parts):
                    return parts
            except DataError:
                continue
        return False

    def _render(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        tools: Sequence[Tool],
        switches: Mapping[str, Any],
        parts: bool,
    ) -> str:
        apply: Any = self._tokenizer.apply_chat_template
        with translate_errors(messages):
            return apply(
                self._to_template_messages(messages, parts),
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._date,
                **switches,
            )

    def _to_template_messages(self, messages: Sequence[Message], parts: bool) -> list[dict[str, Any]]:
        """Convert messages to the template's input format."""
        read: list[dict[str, Any]] = []
        for message in messages:
            if self._escape is None:
                text = message.text  # raises for media, which would be lost here
                content: Any = [TextPart(text=text).to_dict()] if parts else text
            else:
                content = map_text(message.content, self._escape)
                if not isinstance(content, str):
                    content = [part.to_dict() for part in content]
                elif parts:
                    content = [TextPart(text=content).to_dict()]
            fields = message.to_dict() | {"content": content}
            if message.reasoning is not None:
                fields |= dict.fromkeys(self._reasoning_fields, message.reasoning)
            read.append(fields)
        return read


def supports_late_system(render: Callable[[Sequence[Message]], str]) -> bool:
    """Return whether a template accepts system messages that are not the first message, and renders them in place."""
    asked, answer = Message(role="user", content="a"), PROBE_TEXT[::-1]
    late = Message(role="system", content=PROBE_TEXT)
    for messages in ([asked, late], [asked, Message(role="assistant", content=answer), late, asked]):
        try:
            text = render(messages)
        except DataError:
            return False
        if text.count(PROBE_TEXT) != 1 or text.find(answer) > text.find(PROBE_TEXT):
            return False
    return True


@contextmanager
def translate_errors(messages: Sequence[Message]) -> Iterator[None]:
    """Convert the errors that a template raises within the `with` block to `DataError`."""
    from jinja2 import TemplateError

    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a template is a program, which may raise anything
        roles = ", ".join(message.role for message in messages[:8])
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise DataError(
            f"the model's chat template rejects a conversation of {roles}: {name}{error}. Change the prompts "
            "(without `system_prompt`, for instance), or choose a model whose template accepts them."
        ) from error
