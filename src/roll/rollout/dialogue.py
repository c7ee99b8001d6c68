"""The contexts of a conversation, one after the other: each goes on from the last, token by token, or is written anew.

    messages (`history`) ─ chat template ─► text ─┬─ begins with what the engine saw and wrote: + the rest's tokens
                                                  └─ does not (thinking dropped, spaces stripped, …): the text's tokens

What the model wrote stands in the first kind of context as the tokens that it sampled, whatever their text would be
tokenised to, and in the second as the template renders it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll.errors import DataError
from roll.rollout.history import TOOL_FORMS, Exchange, ToolForm, history_messages, joined_said, with_said
from roll.rollout.loops import Renderer
from roll.types import History, IntArray, Message

__all__ = ["Dialogue", "Following"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """A context that may come next."""

    token_ids: IntArray
    """[C]"""
    text: str
    """As the template writes it."""
    added: IntArray | None = None
    """[N] its tokens behind the last context and the answer to it; `None` where it does not begin with these."""
    prompt: Sequence[Message] = ()
    exchanges: Sequence[Exchange] = ()
    form: ToolForm = "written"

    @property
    def num_new(self) -> int:
        """Tokens that are not known from the last context and its answer."""
        return len(self.token_ids if self.added is None else self.added)


@dataclass(eq=False, kw_only=True)
class Dialogue:
    """Which context the next answer follows."""

    renderer: Renderer
    history: History
    prompt: Sequence[Message]
    """With which the conversation began or, after a summary, goes on."""
    context: IntArray
    """[C] that the last answer follows, or the next one will."""
    tools: Sequence[Mapping[str, Any]] = ()
    stops: Collection[int] = ()
    """Tokens that end an answer, beside special ones."""
    _exchanges: Sequence[Exchange] = ()
    _form: ToolForm = "written"
    """In which the template takes what tools are asked and say; those before it, it refused."""
    _text: str | None = None
    """Of the context; of the prompt's only once it is needed."""
    _answer: IntArray | None = None
    """To the context; `None` where it has none yet."""

    def answered(self, token_ids: IntArray) -> None:
        """The model answered the context."""
        self._answer = token_ids

    def begin_anew(self, prompt: Sequence[Message]) -> None:
        """All that was said is forgotten; what is heard next stands behind this prompt's last text."""
        self.prompt, self._exchanges, self._answer = prompt, (), None

    def following(self, replies: Sequence[Message], calls: Sequence[Mapping[str, Any]] = ()) -> Following:
        """The context that would come next.

        Args:
            replies: to the last answer. Where a template has no place for a tool's, a user says it.
            calls: of tools in the answer, as they were understood: some templates refuse a tool's reply without.

        Raises:
            DataError: the template refuses the conversation.
        """
        if self._answer is None:
            prompt = with_said(self.prompt, joined_said(replies))
            return self._anew(prompt, (), self._form)
        if self._text is None:
            self._text = self.renderer.text(self.prompt, self.tools)
        body, ended = self.renderer.written(self._answer, self.context, self.stops)
        said = Exchange(answer=Message(role="assistant", content=body), replies=tuple(replies), calls=tuple(calls))
        exchanges = [*self._exchanges, said]
        if not any(reply.role == "tool" for one in exchanges for reply in one.replies):
            return self._after(exchanges, self._form, ended)
        for form in TOOL_FORMS[TOOL_FORMS.index(self._form) : -1]:
            if not self.renderer.drops_tools:
                with suppress(DataError):
                    return self._after(exchanges, form, ended)
        return self._after(exchanges, TOOL_FORMS[-1], ended)

    def go_on(self, following: Following) -> None:
        """It does come next."""
        self.context, self._text, self._answer = following.token_ids, following.text, None
        self.prompt, self._exchanges, self._form = following.prompt, following.exchanges, following.form

    def _after(self, exchanges: list[Exchange], form: ToolForm, ended: bool) -> Following:
        """Some templates put the spaces around an answer themselves, so it may have to go without its own."""
        assert self._text is not None and self._answer is not None
        *before, said = exchanges
        body = said.answer.text
        seen = self._text + body
        for content in dict.fromkeys((body, body.strip())):
            tried = [*before, replace(said, answer=Message(role="assistant", content=content))]
            text = self._rendered(self.prompt, tried, form)
            added = self.renderer.following(text[len(seen) :], ended) if text.startswith(seen) else None
            if added is not None:
                token_ids = np.concatenate([self.context, self._answer, added]).astype(np.int32)
                return Following(
                    token_ids=token_ids, text=text, added=added, prompt=self.prompt, exchanges=tried, form=form
                )
        return self._anew(self.prompt, exchanges, form)

    def _anew(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], form: ToolForm) -> Following:
        text = self._rendered(prompt, exchanges, form)
        return Following(token_ids=self.renderer.tokens(text), text=text, prompt=prompt, exchanges=exchanges, form=form)

    def _rendered(self, prompt: Sequence[Message], exchanges: Sequence[Exchange], form: ToolForm) -> str:
        messages = history_messages(self.history, prompt, [one.in_form(form) for one in exchanges])
        return self.renderer.text(messages, self.tools)
