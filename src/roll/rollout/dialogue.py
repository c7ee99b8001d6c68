"""The contexts of a conversation, one after the other: each goes on from the last, token by token, or is written anew.

    messages (`history`) ─ chat template ─► text ─┬─ begins with what the engine saw and wrote: + the rest's tokens
                                                  └─ does not (thinking dropped, spaces stripped, …): the text's tokens

What the model wrote stands in the first kind of context as the tokens that it sampled, whatever their text would be
tokenised to, and in the second as the template renders it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll.errors import DataError
from roll.rollout.history import Exchange, history_messages, with_text
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

    def following(self, replies: Sequence[Message], calls: Sequence[dict[str, Any]] = ()) -> Following:
        """The context that would come next.

        Args:
            replies: to the last answer.
            calls: of tools, as they were understood, for templates that refuse replies to an answer that says of none.

        Raises:
            DataError: the template refuses the conversation.
        """
        if self._answer is None:
            prompt = with_text(self.prompt, "\n\n".join(reply["content"] for reply in replies))
            return self._anew(prompt, ())
        body, ended = self.renderer.written(self._answer, self.context, self.stops)
        if self._text is None:
            self._text = self.renderer.text(self.prompt, self.tools)
        try:
            return self._after(self._text + body, body, replies, self._answer, ended)
        except DataError:
            if not calls:
                raise
            answer: Message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
            return self._anew(self.prompt, [*self._exchanges, Exchange(answer=answer, replies=tuple(replies))])

    def go_on(self, following: Following) -> None:
        """It does come next."""
        self.context, self._text, self._answer = following.token_ids, following.text, None
        self.prompt, self._exchanges = following.prompt, following.exchanges

    def _after(self, seen: str, body: str, replies: Sequence[Message], answer: IntArray, ended: bool) -> Following:
        """Some templates put the spaces around an answer themselves, so it may have to go without its own."""
        for content in dict.fromkeys((body, body.strip())):
            said: Message = {"role": "assistant", "content": content}
            exchanges = [*self._exchanges, Exchange(answer=said, replies=tuple(replies))]
            text = self.renderer.text(history_messages(self.history, self.prompt, exchanges), self.tools)
            added = self.renderer.following(text[len(seen) :], ended) if text.startswith(seen) else None
            if added is not None:
                token_ids = np.concatenate([self.context, answer, added]).astype(np.int32)
                return Following(token_ids=token_ids, text=text, added=added, prompt=self.prompt, exchanges=exchanges)
        raw = Exchange(answer={"role": "assistant", "content": body}, replies=tuple(replies))
        return self._anew(self.prompt, [*self._exchanges, raw])

    def _anew(self, prompt: Sequence[Message], exchanges: Sequence[Exchange]) -> Following:
        text = self.renderer.text(history_messages(self.history, prompt, exchanges), self.tools)
        return Following(token_ids=self.renderer.tokens(text), text=text, prompt=prompt, exchanges=exchanges)
