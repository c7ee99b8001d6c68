"""The loss mask of a conversation: the tokens that the assistant would have generated.

Other libraries call it the assistant mask (`assistant_masks`, `assistant_only_loss`).

    template ──► text ──► start and end of each assistant turn ──► one tokenization, cut at these positions

A turn is the text that the model generates after the generation prompt: the message as the template renders it, and the
special tokens that end it. The turn starts where the conversation before it, rendered with the generation prompt, ends.
A template's `{% generation %}` marks do not determine the start, because many of them include the header; they can only
exclude further tokens. If the template renders a turn differently once the conversation continues (some drop earlier
reasoning), the model would not have generated it in this form: the turn is context only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from roll.data.templates import PROBE_TEXT
from roll.data.turn_pieces import compute_common_prefix, find_turns_in_pieces
from roll.errors import DataError
from roll.types import BoolArray, IntArray, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RenderFn", "SpecialTokens", "count_extra_ends", "find_turns", "list_thinking_modes", "tokenize"]

Span = tuple[int, int]
"""Index of the first character, and the index after the last one."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of published templates that turn reasoning on and off."""


class SpecialTokens:
    """The model's special tokens as strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.by_id = {int(i): str(token) for i, token in added.items() if token.special}
        """The text of each special token, by ID."""
        self.by_id |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._names = {name for name in self.by_id.values() if name}
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        # Some tokenizers have thousands of special tokens, and one expression for all would try each at every `<`.
        self._beginnings = re.compile("|".join({re.escape(name[:3]) for name in self._names}) or r"(?!)")

    def find_first(self, text: str) -> str | None:
        """Return the first special token in the text; `None` if it has none."""
        return next((text[begin:end] for begin, end in self._iterate_spans(text, 0)), None)

    def is_special_token(self, text: str) -> bool:
        """Return whether the text is a special token."""
        return text in self._names

    def find_at_start(self, text: str) -> str | None:
        """Return the longest special token at the start of the text; `None` if there is none."""
        return next((text[:length] for length in self._lengths if text[:length] in self._names), None)

    def extend_span(self, text: str, span: Span) -> Span:
        """Extend a span by the special tokens that directly follow it in the text; an empty span stays unchanged."""
        begin, end = span
        while end > begin and (name := self.find_at_start(text[end : end + self._lengths[0]])) is not None:
            end += len(name)
        return begin, end

    def find_spans(self, text: str, begin: int = 0) -> list[Span]:
        """Return the spans of the special tokens that start at `begin` or later."""
        return list(self._iterate_spans(text, begin))

    def _iterate_spans(self, text: str, begin: int) -> Iterator[Span]:
        """Yield the span of each special token; if several start at the same position, yield the longest."""
        while (found := self._beginnings.search(text, begin)) is not None:
            start = found.start()
            names = (text[start : start + length] for length in self._lengths)
            length = len(next((name for name in names if name in self._names), ""))
            if length:
                yield start, start + length
            begin = start + max(length, 1)


class RenderFn(Protocol):
    """Renders a conversation to text."""

    def __call__(self, messages: Sequence[Message], generation_prompt: bool, **switches: Any) -> str:
        """Return the rendered text of the messages.

        Args:
            messages: The conversation.
            generation_prompt: Whether to append the start of the assistant's next message.
            switches: Additional variables of the template.
        """


def list_thinking_modes(template: str) -> tuple[Mapping[str, bool], ...]:
    """List the template variables that open or close the reasoning in the generation prompt, the default first.

    >>> list_thinking_modes("{% if enable_thinking %}<think>{% endif %}")
    ({}, {'enable_thinking': True}, {'enable_thinking': False})
    """
    names = [name for name in _THINKING_VARIABLES if re.search(rf"\b{name}\b", template)]
    return ({}, *({name: value} for name in names for value in (True, False)))


def count_extra_ends(render: RenderFn, special: SpecialTokens) -> int:
    """Count the special tokens at the end of a conversation that end the conversation, not its last message.

    For instance, Phi's template ends each answer with `<|end|>`, and the conversation with an additional
    `<|endoftext|>`.
    """
    chat = [Message(role="user", content="a"), Message(role="assistant", content=PROBE_TEXT)]
    try:
        tails = [
            render(messages, False).rpartition(PROBE_TEXT)[2]
            for messages in (chat, [*chat, Message(role="user", content="b")])
        ]
    except DataError:
        return 0
    last, continued = ([tail[begin:end] for begin, end in special.find_spans(tail)] for tail in tails)
    shared = next((i for i, (a, b) in enumerate(zip(last, continued, strict=False)) if a != b), len(last))
    return len(last) - min(shared, len(continued)) if shared and continued else 0


def find_turns(
    messages: Sequence[Message],
    indices: Sequence[int],
    render: RenderFn,
    special: SpecialTokens,
    *,
    modes: Sequence[Mapping[str, bool]] = ({},),
    num_extra_ends: int = 0,
) -> tuple[str, list[Span]]:
    """Render a conversation, and find the turns to train on.

    Args:
        messages: The conversation.
        indices: Indices of the assistant's messages to train on.
        render: Renders through the chat template.
        special: The model's special tokens.
        modes: Alternative template variables; the generation prompt of an answer is rendered with one of them.
        num_extra_ends: Number of special tokens at the end of the text that do not belong to the last message.

    Raises:
        DataError: The text of the last turn differs from the text that the model would generate.
    """

    def find_turns_in_text(chat: Sequence[Message], wanted: Sequence[int], text: str) -> dict[int, Span]:
        found: dict[int, Span] = {}
        for i in wanted:
            so_far = text if i == len(chat) - 1 else render(chat[: i + 1], False)
            head = _find_head(chat[:i], so_far, render, modes)
            turn = _find_turn(text, so_far, head, chat[i], special, num_extra_ends)
            if head.matches_prompt and turn is not None:
                found[i] = turn
            elif not head.matches_prompt and chat is messages and i == indices[-1]:
                raise DataError(_describe_mismatch(head, so_far, chat[i]))
        return found

    def strip_extra_ends(text: str) -> str:
        return text[: special.find_spans(text)[-num_extra_ends][0]] if num_extra_ends else text

    text = render(messages, False)
    turns = find_turns_in_pieces(
        messages, indices, text, lambda chat: render(chat, False), find_turns_in_text, strip_extra_ends
    )
    turns = find_turns_in_text(messages, indices, text) if turns is None else turns
    return text, [turns[i] for i in sorted(turns)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The rendered text before an assistant message, compared with the model's prompt for this message."""

    prompt: str
    """The model's prompt for writing the message."""
    text: str
    """The common prefix of `prompt` and the conversation."""

    @property
    def matches_prompt(self) -> bool:
        """True if the conversation begins with the model's whole prompt, so that the model could write the message."""
        return self.prompt == self.text


def _find_head(
    messages: Sequence[Message], prefix: str, render: RenderFn, modes: Sequence[Mapping[str, bool]]
) -> _Head:
    """Find the rendered text before an assistant message, up to the start of the message.

    `messages` are the earlier messages; `prefix` is the text of the conversation up to and including the message. Uses
    the first of `modes` whose generation prompt is a prefix of `prefix`. If there is none, the head ends where the
    default prompt and `prefix` first differ.
    """
    for mode in modes:
        try:
            prompt = render(messages, True, **mode)
        except DataError:
            if not mode:
                raise
            continue
        if prefix.startswith(prompt):
            return _Head(prompt=prompt, text=prompt)
    prompt = render(messages, True)
    return _Head(prompt=prompt, text=prompt[: compute_common_prefix(prompt, prefix)])


def _find_turn(
    text: str, prefix: str, head: _Head, message: Message, special: SpecialTokens, num_extra_ends: int
) -> Span | None:
    """Find a turn's span in the text of the whole conversation; `None` if the message is rendered differently there.

    Args:
        text: The whole conversation.
        prefix: The conversation up to and including the message.
        head: The text before the message.
        message: The assistant's message.
        special: The model's special tokens.
        num_extra_ends: Number of special tokens at the end of `prefix` that do not belong to the message.

    Raises:
        DataError: The template leaves out a part of the message, or writes no special token after it.
    """
    begin = len(head.text)
    closing = special.find_spans(prefix, begin)
    closing = closing[: len(closing) - num_extra_ends]
    start, end = closing[-1] if closing else (begin, len(prefix))
    # Some templates begin the reasoning in the generation prompt, and the message repeats it.
    written = _remove_whitespace("".join(head.text.split()[-1:]) + prefix[begin:end])
    for label, part in _list_parts(message):
        if _remove_whitespace(part) not in written:
            raise DataError(
                _describe_untrainable_turn(f"leaves out {label}, or ends it without a special token", message)
            )
    if not closing and head.matches_prompt:
        raise DataError(_describe_untrainable_turn("does not end an assistant's message with a special token", message))
    if text.startswith(prefix[:end]):
        return begin, end
    # Some templates end a message differently once the conversation continues: the text before that end is unchanged.
    same = start > begin and text.startswith(prefix[:start]) and special.find_at_start(text[start:]) is not None
    return (begin, start) if same else None


def _list_parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each part that the rendered message must contain."""
    yield "a part of the assistant's text", message.text
    if message.reasoning is not None:
        yield "the reasoning", message.reasoning
    for call in message.tool_calls:
        name = call.get("function", call).get("name")
        if isinstance(name, str):
            yield f"the call to tool {name!r}", name


def _remove_whitespace(text: str) -> str:
    """Remove whitespace from a text, because templates add and remove it."""
    return "".join(text.split())


def _describe_mismatch(head: _Head, so_far: str, message: Message) -> str:
    """Describe how a turn's rendered start differs from the generation prompt."""
    other = so_far[len(head.text) :][:30]
    return _describe_untrainable_turn(
        "renders the start of an assistant's message differently from its generation prompt (which ends with "
        f"{head.prompt[-30:]!r}, but the message continues {head.text[-20:]!r} with {other!r})",
        message,
    )


def _describe_untrainable_turn(label: str, message: Message) -> str:
    """Describe why a turn cannot be trained on; `label` describes the template's behavior."""
    beginning = repr(message.text[:60])
    return (
        f"the model's chat template {label}, so the tokens that the model would generate cannot be determined: remove "
        f"such conversations, or choose a model whose template renders answers unchanged (the answer was {beginning})."
    )


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, turns: Sequence[Span], generated_spans: Sequence[Span] | None = None
) -> tuple[IntArray, BoolArray]:
    """Tokenize a rendered text; return its token IDs and the loss mask, shape [L] each.

    A token that would cross the border of a turn is split at the border, because the model generates its tokens after a
    complete prompt.

    Args:
        tokenizer: The model's tokenizer.
        text: The rendered conversation.
        turns: Spans that the model generates.
        generated_spans: Spans that the template marks as generated; only tokens that start in them are trained on.
            `None` if the template has no marks.
    """
    # The text is tokenized once: turns tokenized separately could differ from the conversation's tokens at each border.
    borders = sorted({border for span in turns for border in span if 0 < border < len(text)})
    ids, starts = _tokenize_pieces(tokenizer, text, borders)
    mask = _mark_spans(starts, turns)
    if generated_spans is not None:
        mask &= _mark_spans(starts, generated_spans)
    mask[:1] = False  # no token precedes the first one, so its log-prob does not exist
    return np.asarray(ids, np.int32), mask


def _mark_spans(starts: Sequence[int], spans: Sequence[Span]) -> BoolArray:
    """Return a mask [L] of the tokens that start in one of the spans."""
    mask = np.zeros(len(starts), np.bool_)
    for begin, end in spans:
        mask[bisect_left(starts, begin) : bisect_left(starts, end)] = True
    return mask


def _tokenize_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, borders: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tokenize a text so that no token crosses a border; return the token IDs, and each token's start in the text."""
    encoded = _encode(tokenizer, text)
    starts = [start for start, _ in encoded["offset_mapping"]]
    ends = [end for _, end in encoded["offset_mapping"]]
    crossed = [b for b in borders if (k := bisect_left(starts, b)) and ends[k - 1] > b]
    if not crossed:
        return list(encoded["input_ids"]), starts
    ids: list[int] = []
    indices: list[int] = []
    for begin, end in pairwise([0, *crossed, len(text)]):
        piece = _encode(tokenizer, text[begin:end])
        ids += piece["input_ids"]
        indices += [begin + start for start, _ in piece["offset_mapping"]]
    return ids, indices


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """Tokenize with offsets, without the tokenizer's warning about long texts, which ROLL reports itself."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if "offset_mapping" not in encoded:
        raise DataError(
            "the model's tokenizer, which is written in Python, cannot report the positions of its tokens in a text: "
            "choose a model that has a tokenizer.json."
        )
    return encoded
