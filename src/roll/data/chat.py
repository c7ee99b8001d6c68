"""Chat rendering, token-exact: messages to the ids that the model was trained to see, and ids back to text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from roll.data.harmless import boundaries, parted
from roll.data.turns import SpecialTokens, marked_turns, prefix_turns, tokenized
from roll.errors import DataError
from roll.types import BoolArray, IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TODAY", "ChatRenderer", "Tool"]

Tool: TypeAlias = Mapping[str, Any]
"""A function's JSON schema, as chat templates take it."""
TODAY = datetime(2025, 1, 1)
"""For templates that write the date: an episode that passes midnight, and a run that is resumed, see the same one."""
_PROBE = "7321640958"
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatRenderer:
    """Renders through the tokenizer's own chat template.

    A tokenizer without a template belongs to a base model: its prompts are the messages' texts, a blank line between
    them, with the tokenizer's own special tokens and nothing added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        self.has_template = bool(template)
        self._asks_date = "strftime_now" in str(template)
        self._marks = isinstance(template, str) and bool(_MARKER.search(template))
        self._special = SpecialTokens(tokenizer)
        self._backend = _backend(tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> IntArray:
        """[P] ids of the conversation, up to where the assistant's answer begins.

        Args:
            messages: the conversation.
            tools: JSON schemas of the functions that the model is told of.

        Raises:
            DataError: the template refuses the conversation (some models have no system role, for instance).
        """
        return self.tokens(self.text(messages, tools))

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The text whose tokens `render` gives.

        Raises:
            DataError: as for `render`.
        """
        if self.has_template:
            return self._rendered(messages, tokenize=False, tools=tools)
        return self._joined(messages)

    def tokens(self, text: str) -> IntArray:
        """[P] ids of a text of `text`."""
        return self.piece(text, first=not self.has_template)

    def written(self, answer: IntArray, after: IntArray, stops: Collection[int] = ()) -> tuple[str, bool]:
        """The text of an answer, special tokens included, and whether one at its end, not in the text, ended it.

        Args:
            answer: [T] ids.
            after: [C] ids before it: some tokenizers show a space only where it stands behind something.
            stops: ids that end an answer, beside the special ones.
        """
        ended = bool(len(answer)) and (int(answer[-1]) in stops or self._special.has(self.spelt(answer[-1:])))
        body, anchor = answer[: len(answer) - ended], after[-1:]
        before, whole = self.spelt(anchor), self.spelt(np.concatenate([anchor, body]))
        return (whole[len(before) :] if whole.startswith(before) else self.spelt(body)), ended

    def following(self, text: str, ended: bool) -> IntArray | None:
        """[N] ids of what a template puts behind an answer; `None` where no special token parts the two.

        Args:
            text: from the answer's last character on: what ends its message, and all after that.
            ended: the answer has a token that stands for the one which ends the message: it is not among the ids.
        """
        end = self._special.beginning(text)
        if end is None:
            return None
        ids = self.piece(text)
        return ids[ended:] if len(ids) and self.spelt(ids[:1]) == end else None

    @cached_property
    def drops_tools(self) -> bool:
        """Whether the template leaves out what a tool says, without a word."""
        heard: Message = {"role": "tool", "content": _PROBE}
        try:
            return _PROBE not in self.text(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, heard]
            )
        except DataError:
            return False

    def spelt(self, token_ids: IntArray) -> str:
        """The text, special tokens included, as the model wrote it."""
        return self._decoded(token_ids, skip_special=False)

    def piece(self, text: str, *, first: bool = False) -> IntArray:
        """[N] ids of a piece of text; before the `first` one stands what the tokenizer puts before texts."""
        if not text.isascii():
            text = text.encode(errors="replace").decode()  # no tokenizer takes half of a surrogate pair
        if self._backend is not None:
            return np.asarray(self._backend.encode(text, add_special_tokens=first).ids, dtype=np.int32)
        return np.asarray(self._tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"], dtype=np.int32)

    def harmless(self, text: str) -> str:
        """Text of others, unable to end a message and begin one in another's name: the model reads `< |im_end|>`."""
        return text if self._boundaries is None else parted(text, self._boundaries)

    @cached_property
    def _boundaries(self) -> re.Pattern[str] | None:
        written, asked = "", Message(role="user", content="a")
        answered = Message(role="assistant", content="b")
        for messages in ([Message(role="system", content="c"), asked], [asked, answered, asked]):
            with suppress(DataError):
                written += self.text(messages)
        return boundaries(self._tokenizer, written)

    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer knows."""
        return len(self._tokenizer)

    @property
    def template(self) -> str:
        """The chat template itself; empty where there is none."""
        template = getattr(self._tokenizer, "chat_template", None)
        return template if isinstance(template, str) else ""

    def _joined(self, messages: Sequence[Message]) -> str:
        """Without a template: texts one after the other, as `answer` and `follow_up` put them."""
        text = ""
        for answers, block in groupby(messages, lambda message: message["role"] == "assistant"):
            contents = [message["content"] for message in block]
            if answers:
                text += "".join(content + self.spelt(np.array([self.end_token])) for content in contents)
            else:
                asked = "\n\n".join(contents)
                text += f"\n\n{asked}\n\n" if text else asked
        return text

    def conversation(self, messages: Sequence[Message], num_given: int = 0) -> tuple[IntArray, BoolArray]:
        """[L] ids of a whole conversation, and [L] which of them the assistant would have written.

        These are the content of its turns and the token that ends each, never a header or what stands between turns;
        see `roll.data.turns`.

        Args:
            messages: the last one is the assistant's.
            num_given: the first so many messages are context only.

        Raises:
            DataError: the template refuses the conversation, or rewrites its last turn.
        """
        if not self.has_template:
            return self._without_template(messages, num_given)
        text, turns = self._turns(messages, num_given)
        with _refusals(messages):
            return tokenized(self._tokenizer, text, turns)

    def plain(self, text: str) -> tuple[IntArray, BoolArray]:
        """[L] ids of a text with the tokenizer's own special tokens and the one that ends it; all are learnt."""
        ids = list(self._tokenizer(text, verbose=False)["input_ids"])
        end = self.end_token
        ids += [end] if ids[-1:] != [end] else []
        mask = np.ones(len(ids), np.bool_)
        mask[:1] = False  # nothing comes before it
        return np.asarray(ids, np.int32), mask

    @property
    def end_token(self) -> int:
        """The token that ends a text.

        Raises:
            DataError: the tokenizer has none.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError("the model's tokenizer has no token that ends a text (`eos_token`): choose another model.")
        return int(end)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token that stands for text."""
        return max(map(len, self._tokenizer.get_vocab()))

    def special_in(self, text: str) -> str | None:
        """The first special token that is spelt in the text, which the model would take for the real one."""
        return self._special.first(text)

    def _turns(self, messages: Sequence[Message], num_given: int) -> tuple[str, list[tuple[int, int]]]:
        if not self._marks:
            return prefix_turns(messages, num_given, self._text, self._special)
        text, spans = self._marked(messages)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            return prefix_turns(messages, num_given, self._text, self._special)
        kept = [(s, messages[i]["content"]) for s, i in zip(spans, answers, strict=True) if i >= num_given]
        before = messages[: answers[0]]
        header = self._text(before, True)[len(self._text(before, False)) :]
        turns = marked_turns(text, [s for s, _ in kept], [c for _, c in kept], header, self._special)
        return (
            (text, turns) if len(turns) == len(kept) else prefix_turns(messages, num_given, self._text, self._special)
        )

    def _without_template(self, messages: Sequence[Message], num_given: int) -> tuple[IntArray, BoolArray]:
        """Texts one after the other as `render`, `answer` and `follow_up` put them, without a template."""
        ids: list[IntArray] = []
        learnt: list[bool] = []
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        ids.append(self.render(messages[:first]))
        learnt.append(False)
        for i in range(first, len(messages)):
            answers = messages[i]["role"] == "assistant"
            content = messages[i]["content"]
            ids.append(self.answer(content) if answers else self.follow_up(content))
            learnt.append(answers and i >= num_given)
        mask = np.repeat(learnt, [len(part) for part in ids])
        mask[:1] = False
        return np.concatenate(ids), mask

    def answer(self, text: str) -> IntArray:
        """Ids of an answer as the model would write it, with the token that ends its message.

        Raises:
            DataError: the template begins an assistant's message differently once there is one.
        """
        if not self.has_template:
            ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token]
            return np.asarray(ids, dtype=np.int32)
        question: list[Message] = [{"role": "user", "content": "a"}]
        head = list(self._rendered(question))
        full = list(self._rendered([*question, {"role": "assistant", "content": text}], generation_prompt=False))
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(full) if token in special]
        if full[: len(head)] != head or not ends or ends[-1] < len(head):
            raise DataError(
                "the model's chat template does not render an answer as the model would write it, so demonstrations "
                f"cannot be put into its tokens: leave them out (the answer was {text[:60]!r})."
            )
        return np.asarray(full[len(head) : ends[-1] + 1], dtype=np.int32)

    def follow_up(self, observation: str) -> IntArray:
        """Ids that come between two answers: from the end of the assistant's message to where its next one begins.

        They are what the template puts after a message's last token (its stop token, which the model wrote itself).

        Raises:
            DataError: the template refuses a second turn, or changes what came before it.
        """
        if not self.has_template:
            return np.asarray(
                self._tokenizer(f"\n\n{observation}\n\n", add_special_tokens=False)["input_ids"], dtype=np.int32
            )
        before: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        head = list(self._rendered(before, generation_prompt=False))
        full = list(self._rendered([*before, {"role": "user", "content": observation}]))
        special = set(self._tokenizer.all_special_ids)
        ends = [i for i, token in enumerate(head) if token in special]
        if full[: len(head)] != head or not ends:
            raise DataError(
                "the model's chat template renders earlier messages differently when a conversation goes on, so turns "
                "cannot be joined token by token: choose a model whose template neither drops nor changes them."
            )
        return np.asarray(full[ends[-1] + 1 :], dtype=np.int32)

    def decode(self, token_ids: IntArray) -> str:
        """The text, without special tokens, otherwise as the model wrote it."""
        return self._decoded(token_ids, skip_special=True)

    def _decoded(self, token_ids: IntArray, *, skip_special: bool) -> str:
        ids = token_ids.tolist()
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special)
        decoded = self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(decoded)

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        generation_prompt: bool = True,
        tokenize: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Any:
        template: Any = self._tokenizer.apply_chat_template
        further: dict[str, Any] = {"strftime_now": TODAY.strftime} if self._asks_date else {}
        with _refusals(messages):
            return template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=tokenize,
                return_dict=False,
                **further,
            )

    def _text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self._rendered(messages, generation_prompt=generation_prompt, tokenize=False) if messages else ""

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and what the template marks in it as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        chat: Any = [[dict(message) for message in messages]]
        settings: Any = dict(self._tokenizer.special_tokens_map)
        settings |= {"strftime_now": TODAY.strftime} if self._asks_date else {}
        template = str(self._tokenizer.chat_template)
        with _refusals(messages):
            rendered: Any = render_jinja_template(
                chat, chat_template=template, return_assistant_tokens_mask=True, **settings
            )
        texts, spans = rendered
        return texts[0], spans[0]


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What does the work behind a tokenizer, where that adds nothing to it but time; `None` elsewhere."""
    from transformers import TokenizersBackend as Backend

    kind = type(tokenizer)
    if not isinstance(tokenizer, Backend) or kind._encode_plus is not Backend._encode_plus:
        return None
    if kind._decode is not Backend._decode:
        return None
    tokenizer("")  # from now on it cuts and fills nothing
    return tokenizer.backend_tokenizer


@contextmanager
def _refusals(messages: Sequence[Message]) -> Iterator[None]:
    """A template's own errors, as ours."""
    from jinja2 import TemplateError

    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a template is a program, which may fail with anything
        roles = ", ".join(message["role"] for message in messages[:8])
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise DataError(
            f"the model's chat template refuses a conversation of {roles}: {name}{error}. Change the prompts "
            "(without `system_prompt`, for instance), or choose a model that takes them."
        ) from error
