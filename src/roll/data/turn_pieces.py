"""Finds the turns of a long conversation in linear time, by rendering short pieces of it.

    messages:  lead │ piece │ piece │ piece │ …         each piece is rendered after the lead, as a conversation
    text:      lead │ piece │ piece │ piece │ …         the same text, shifted?   ──► its turns, shifted

The prompt of every answer has all messages before it, so rendering each prompt takes quadratic time. Almost all
templates render a message independently of distant messages, and `find_turns_in_pieces` checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from roll.data.templates import PROBE_TEXT
from roll.errors import DataError
from roll.types import Message, get_content_key

__all__ = ["MIN_MESSAGES", "compute_common_prefix", "find_turns_in_pieces"]

Span: TypeAlias = tuple[int, int]
RenderText: TypeAlias = Callable[[Sequence[Message]], str]
"""Renders messages to text, without a generation prompt."""
FindTurns: TypeAlias = Callable[[Sequence[Message], Sequence[int], str], dict[int, Span]]
"""Finds the turns at some message indices of a conversation, given its text, by rendering every prompt."""

MIN_MESSAGES = 64
"""Minimum number of messages of a conversation that is split into pieces."""
_MIN_PIECE_MESSAGES = 16
"""Minimum number of messages of a piece."""


def compute_common_prefix(first: str, second: str) -> int:
    """Compute the length of the common prefix of two strings, in characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def find_turns_in_pieces(
    messages: Sequence[Message],
    indices: Sequence[int],
    text: str,
    render: RenderText,
    find_turns: FindTurns,
    strip_extra_ends: Callable[[str], str],
) -> dict[int, Span] | None:
    """Find the span of the turn at each message index; `None` if the conversation cannot be split into pieces.

    Args:
        messages: The conversation.
        indices: Indices of the assistant's messages to train on.
        text: The whole conversation's text.
        render: Renders messages.
        find_turns: Finds turns by rendering every prompt.
        strip_extra_ends: Removes the tokens at the end of a text that end the conversation, but do not belong to its
            last message.
    """
    cuts, overlap = _find_cuts(messages)
    if len(messages) < MIN_MESSAGES or len(cuts) < 3 or not indices:
        return None
    found: dict[int, Span] = {}
    # Independence is not assumed, but checked: after the same first messages, the pieces, which overlap by a question,
    # must give the text of the whole conversation without a gap. If they do not, or if a turn in the middle or at the
    # end differs when rendered with its whole prompt, pieces are not used.
    try:
        lead = messages[: cuts[0]]
        head = _measure_head(lead, messages[cuts[0]], render)
        shift = 0
        for begin, end in pairwise((*cuts, len(messages))):
            is_last = end == len(messages)
            piece = (*lead, *messages[begin : end if is_last else end + overlap])
            own = render(piece)
            shown = own if is_last else strip_extra_ends(own)
            if own[:head] != text[:head] or not text.startswith(shown[head:], head + shift):
                return None
            moved = len(lead) - begin
            inside = [place + moved for place in indices if begin <= place < end]
            turns = find_turns(piece, inside, own)
            found |= {place - moved: (a + shift, b + shift) for place, (a, b) in turns.items()}
            if is_last:
                if shift + len(own) != len(text):
                    return None
                continue
            following = render((*lead, *messages[end : end + overlap]))
            if following[:head] != text[:head] or not own.endswith(following[head:]):
                return None
            shift += len(own) - len(following)
        found |= find_turns(messages, [place for place in indices if place < cuts[0]], text)
        checked = sorted({indices[len(indices) // 3], indices[2 * len(indices) // 3], indices[-1]})
        whole = find_turns(messages, checked, text)
    except DataError:  # rendering every prompt reports the error
        return None
    return found if whole == {place: found[place] for place in checked if place in found} else None


def _find_cuts(messages: Sequence[Message]) -> tuple[list[int], int]:
    """Find the message indices at which pieces start, and the number of messages by which pieces overlap.

    Each piece is rendered after the first messages of the conversation (the lead) and must give the same text as in the
    conversation. So pieces start with a question or, if there is only one question, with an answer after a tool result.
    """
    roles = [message.role for message in messages]
    questions = [
        place
        for place in range(1, len(messages))
        if roles[place - 1 : place + 1] == ["assistant", "user"]
        # Some templates treat a text that begins with a tag as a tool result.
        and not get_content_key(messages[place].content).lstrip().startswith("<")
    ]
    calls = [p for p in range(1, len(roles) - 2) if roles[p - 1 : p + 2] == ["tool", "assistant", "tool"]]
    chosen, overlap = (questions, 1) if len(questions) > 2 or not calls else (calls, 2)
    cuts: list[int] = []
    for place in chosen:
        if not cuts or place - cuts[-1] >= _MIN_PIECE_MESSAGES:
            cuts.append(place)
    return cuts, overlap


def _measure_head(lead: Sequence[Message], following: Message, render: RenderText) -> int:
    """Return the number of characters that are rendered before the content of `following`, the message after `lead`."""
    if following.role == "assistant":
        return len(render(lead))
    texts = [render((*lead, Message(role="user", content=content))) for content in (PROBE_TEXT, f"q{PROBE_TEXT}")]
    return compute_common_prefix(*texts)
