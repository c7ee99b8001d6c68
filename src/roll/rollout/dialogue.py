"""The successive contexts of a conversation: each one extends the last token by token, or is tokenized anew.

    messages (`history`) ─ chat template ─► text ─┬─ begins with what the engine saw and wrote: + the rest's tokens
                                                  └─ does not (thinking dropped, spaces stripped, …): the text's tokens

A context of the first kind contains the model's answers as the sampled tokens, however their text would be tokenized;
a context of the second kind contains them as the template renders them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll.errors import DataError
from roll.rollout.history import TOOL_FORMS, Exchange, ToolForm, history_messages, join_contents, with_text
from roll.rollout.loops import Renderer
from roll.types import History, IntArray, Message

__all__ = ["Dialogue", "NextContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextContext:
    """A candidate for the next context."""

    token_ids: IntArray
    """Tokens of the context, shape [C]."""
    text: str
    """Text of the context as the template renders it."""
    added: IntArray | None = None
    """[N] tokens after the last context and its answer; `None` if the context does not begin with both."""
    prompt: Sequence[Message] = ()
    exchanges: Sequence[Exchange] = ()
    form: ToolForm = "written"


@dataclass(eq=False, kw_only=True)
class Dialogue:
    """A conversation and the context that the next answer follows."""

    renderer: Renderer
    history: History
    prompt: Sequence[Message]
    """Messages with which the conversation began or, after a summary, continues."""
    context: IntArray
    """[C] context of the last answer, or of the next one."""
    tools: Sequence[Mapping[str, Any]] = ()
    stops: Collection[int] = ()
    """Tokens that end an answer, in addition to special tokens."""
    _exchanges: Sequence[Exchange] = ()
    _form: ToolForm = "written"
    """Form in which the template accepts tool calls and replies; it refused the earlier forms of `TOOL_FORMS`."""
    _text: str | None = None
    """Text of the context; that of the first prompt is rendered only when it is needed."""
    _answer: IntArray | None = None
    """Answer to the context; `None` before the answer."""

    def record_answer(self, token_ids: IntArray) -> None:
        """Record the model's answer to the context."""
        self._answer = token_ids

    def restart_context(self, prompt: Sequence[Message]) -> None:
        """Drop all exchanges and continue from a new prompt; the next replies are appended to its last message."""
        self.prompt, self._exchanges, self._answer = prompt, (), None

    def next_context(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]] = ()) -> NextContext:
        """Return the context that would come next.

        Args:
            replies: Replies to the last answer. If the template does not support tool messages, a tool's reply becomes
                a user message.
            calls: Parsed tool calls of the answer: some templates refuse a tool's reply without them.

        Raises:
            DataError: The template refuses the conversation.
        """
        if self._answer is None:
            prompt = with_text(self.prompt, join_contents(replies))
            return self._render_anew(prompt, (), self._form)
        if self._text is None:
            self._text = self.renderer.text(self.prompt, self.tools)
        body, ended = self.renderer.parse_answer(self._answer, self.context, self.stops)
        said = Exchange(answer=Message(role="assistant", content=body), replies=tuple(replies), calls=tuple(calls))
        exchanges = [*self._exchanges, said]
        if not any(reply.role == "tool" for one in exchanges for reply in one.replies):
            return self._extend_context(exchanges, self._form, ended)
        for form in TOOL_FORMS[TOOL_FORMS.index(self._form) : -1]:
            if not self.renderer.drops_tools:
                with suppress(DataError):
                    return self._extend_context(exchanges, form, ended)
        return self._extend_context(exchanges, TOOL_FORMS[-1], ended)

    def advance(self, following: NextContext) -> None:
        """Continue the conversation with a context that `following` returned."""
        self.context, self._text, self._answer = following.token_ids, following.text, None
        self.prompt, self._exchanges, self._form = following.prompt, following.exchanges, following.form

    def _extend_context(self, exchanges: list[Exchange], form: ToolForm, ended: bool) -> NextContext:
        """Return the context after the exchanges, appended to the last context if the template renders that as a
        prefix.

        Some templates insert the whitespace around an answer themselves, so the answer is also tried without its own.
        """
        assert self._text is not None and self._answer is not None
        *before, said = exchanges
        body = said.answer.text
        seen = self._text + body
        for content in dict.fromkeys((body, body.strip())):
            tried = [*before, replace(said, answer=Message(role="assistant", content=content))]
            text = self._render(self.prompt, tried, form)
            added = self.renderer.suffix_ids(text[len(seen) :], ended) if text.startswith(seen) else None
            if added is not None:
                token_ids = np.concatenate([self.context, self._answer, added]).astype(np.int32)
                return NextContext(
                    token_ids=token_ids, text=text, added=added, prompt=self.prompt, exchanges=tried, form=form
                )
        return self._render_anew(self.prompt, exchanges, form)

    def _render_anew(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], form: ToolForm) -> NextContext:
        text = self._render(prompt, exchanges, form)
        return NextContext(
            token_ids=self.renderer.tokens(text), text=text, prompt=prompt, exchanges=exchanges, form=form
        )

    def _render(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], form: ToolForm) -> str:
        messages = history_messages(self.history, prompt, [one.to_format(form) for one in exchanges])
        return self.renderer.text(messages, self.tools)
