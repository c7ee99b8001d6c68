"""Build the contexts of a multi-turn conversation: extend the tokens of the last context, or tokenize everything again.

    messages (`history`) ─ chat template ─► text ─┬─ begins with the last context and answer: append the new tokens
                                                  └─ does not (thinking dropped, spaces stripped, …): tokenize it all

An extended context contains the tokens that the model sampled, even if their text would be tokenized differently. A
context that is tokenized again contains the model's answers as the template renders them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll.errors import DataError
from roll.rollout.history import (
    TOOL_MESSAGE_FORMATS,
    Exchange,
    ToolMessageFormat,
    append_text,
    build_history_messages,
    join_contents,
)
from roll.rollout.loops import Renderer
from roll.types import EncodedText, History, IntArray, MediaSpan, Message, shift_media

__all__ = ["Dialogue", "NextContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextContext:
    """A possible next context, and the state of the conversation with this context."""

    token_ids: IntArray
    """Tokens of the context, shape [C]."""
    media: tuple[MediaSpan, ...] = ()
    """Images in the context."""
    text: str
    """Rendered text of the context."""
    added: EncodedText | None = None
    """Tokens [N] after the last context and its answer, and the images in these tokens; `None` if the context does not
    begin with the last context and its answer."""
    prompt: Sequence[Message] = ()
    exchanges: Sequence[Exchange] = ()
    tool_format: ToolMessageFormat = "written"


@dataclass(eq=False, kw_only=True)
class Dialogue:
    """A conversation, and the context of the model's next answer."""

    renderer: Renderer
    history: History
    prompt: Sequence[Message]
    """Messages at the beginning of the conversation or, after a summary, of the restarted context."""
    context: IntArray
    """Context [C] of the current answer."""
    media: tuple[MediaSpan, ...] = ()
    """Images in the context."""
    tools: Sequence[Mapping[str, Any]] = ()
    stops: Collection[int] = ()
    """Tokens that end an answer, in addition to special tokens."""
    _exchanges: Sequence[Exchange] = ()
    _tool_format: ToolMessageFormat = "written"
    """First format in `TOOL_MESSAGE_FORMATS` that the template accepts."""
    _text: str | None = None
    """Rendered text of the context; `None` until it is needed."""
    _answer: IntArray | None = None
    """Tokens of the answer to the context; `None` before the answer."""

    def record_answer(self, token_ids: IntArray) -> None:
        """Record the model's answer to the context."""
        self._answer = token_ids

    def restart_context(self, prompt: Sequence[Message]) -> None:
        """Drop all exchanges and continue from a new prompt; the next replies are appended to its last message."""
        self.prompt, self._exchanges, self._answer = prompt, (), None

    def build_next_context(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]] = ()) -> NextContext:
        """Return the context of the next answer, without changing the conversation.

        Args:
            replies: Replies to the last answer. If the template does not support tool messages, a tool's reply becomes
                a user message.
            calls: Parsed tool calls of the last answer; some templates reject a tool reply without its tool call.

        Raises:
            DataError: The template rejects the conversation.
        """
        if self._answer is None:
            prompt = append_text(self.prompt, join_contents(replies))
            return self._render_from_scratch(prompt, (), self._tool_format)
        if self._text is None:
            self._text = self.renderer.render_text(self.prompt, self.tools)
        body, has_end_token = self.renderer.parse_answer(self._answer, self.context, self.stops)
        answer = Message(role="assistant", content=body)
        exchanges = [*self._exchanges, Exchange(answer=answer, replies=tuple(replies), calls=tuple(calls))]
        if not any(reply.role == "tool" for exchange in exchanges for reply in exchange.replies):
            return self._extend_context(exchanges, self._tool_format, has_end_token)
        # It is unknown which format a template accepts, so all are tried, beginning with the last accepted one: another
        # format would render the earlier turns differently and begin a new branch.
        for tool_format in TOOL_MESSAGE_FORMATS[TOOL_MESSAGE_FORMATS.index(self._tool_format) : -1]:
            if not self.renderer.drops_tool_results:
                with suppress(DataError):
                    return self._extend_context(exchanges, tool_format, has_end_token)
        return self._extend_context(exchanges, TOOL_MESSAGE_FORMATS[-1], has_end_token)

    def advance(self, next_context: NextContext) -> None:
        """Continue the conversation with a context that `build_next_context` returned."""
        self.context, self.media = next_context.token_ids, next_context.media
        self._text, self._answer = next_context.text, None
        self.prompt, self._exchanges, self._tool_format = (
            next_context.prompt,
            next_context.exchanges,
            next_context.tool_format,
        )

    def _extend_context(
        self, exchanges: list[Exchange], tool_format: ToolMessageFormat, has_end_token: bool
    ) -> NextContext:
        """Return the context of the next answer after the exchanges.

        If the rendered conversation begins with the last context and its answer, their tokens are kept and only the
        rest is tokenized; otherwise the whole conversation is tokenized.
        """
        assert self._text is not None and self._answer is not None
        *before, last = exchanges
        body = last.answer.text
        seen = self._text + body
        # Some templates add the whitespace around an answer themselves, so the answer is also tried stripped.
        for content in dict.fromkeys((body, body.strip())):
            tried = [*before, replace(last, answer=Message(role="assistant", content=content))]
            text = self._render(self.prompt, tried, tool_format)
            added = self.renderer.encode_suffix(text[len(seen) :], has_end_token) if text.startswith(seen) else None
            if added is not None:
                before = len(self.context) + len(self._answer)
                return NextContext(
                    token_ids=np.concatenate([self.context, self._answer, added.token_ids]).astype(np.int32),
                    media=(*self.media, *shift_media(added.media, before)),
                    text=text,
                    added=added,
                    prompt=self.prompt,
                    exchanges=tried,
                    tool_format=tool_format,
                )
        return self._render_from_scratch(self.prompt, exchanges, tool_format)

    def _render_from_scratch(
        self, prompt: Sequence[Message], exchanges: Sequence[Exchange], tool_format: ToolMessageFormat
    ) -> NextContext:
        text = self._render(prompt, exchanges, tool_format)
        token_ids, media = self.renderer.encode(text)
        return NextContext(
            token_ids=token_ids, media=media, text=text, prompt=prompt, exchanges=exchanges, tool_format=tool_format
        )

    def _render(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], tool_format: ToolMessageFormat) -> str:
        messages = build_history_messages(
            self.history, prompt, [exchange.to_format(tool_format) for exchange in exchanges]
        )
        return self.renderer.render_text(messages, self.tools)
