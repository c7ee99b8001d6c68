"""Split a model's reasoning from its answer, in the model's format.

    "<think>Two and two.</think>Four."                                              ──► "Four."
    "Two and two.</think>Four."           the prompt began the reasoning            ──► "Four."
    "<think>Two and"                      it never ends                             ──► None: no answer
    "<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>Four."  ──► "Four."

The format comes from the model's chat template or tokenizer. If neither has one, or they are unknown, the marks in the
text itself decide. All functions take arbitrary text, in time that grows with its length.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["CHANNELS", "ReasoningFormat", "answer_of", "begun_thought", "reasoning_format", "split_reasoning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """The marks of the reasoning of a model family."""

    begins: tuple[str, ...]
    """Texts that begin the reasoning."""
    ends: tuple[str, ...]
    """Texts that end the reasoning: the answer follows the last of them."""
    answer_ends: tuple[str, ...] = ()
    """Texts that end the answer."""
    messages: re.Pattern[str] | None = None
    """Finds the messages of the reasoning, if it consists of messages."""
    bare: tuple[str, str] = ("", "")
    """Start of a text, and end of its reasoning, if its special tokens are lost."""

    def split(self, text: str, *, begun: bool = False) -> tuple[str, str | None]:
        """Return the reasoning and the answer; the answer is `None` if the reasoning never ends.

        Reasoning that begins behind the answer, and never ends, is not a part of the answer.

        Args:
            text: The model's text.
            begun: Whether the prompt began the reasoning.
        """
        closed = max((place, place + len(end)) for end in self.ends for place in [text.rfind(end)])
        if closed[0] < 0 and self.bare[0] and text.startswith(self.bare[0]) and self.bare[1] in text:
            thought, _, answer = text.rpartition(self.bare[1])
            return thought.removeprefix(self.bare[0]), answer
        if closed[0] < 0 and begun:
            return self._inside(text), None
        thought, answer = (text[: closed[0]], text[closed[1] :]) if closed[0] >= 0 else ("", text)
        again = min((place for begin in self.begins if (place := answer.find(begin)) >= 0), default=None)
        if again is not None:
            thought, answer = thought + answer[again:], answer[:again]
            if not answer.strip():
                return self._inside(thought), None
        cut = min((place for end in self.answer_ends if (place := answer.find(end)) >= 0), default=len(answer))
        return self._inside(thought), answer[:cut]

    def marks(self, text: str) -> bool:
        """Return whether a text has the marks of this family."""
        bare = bool(self.bare[0]) and text.startswith(self.bare[0]) and self.bare[1] in text
        return bare or any(mark in text for mark in (*self.ends, *self.begins))

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All texts that mark reasoning and answers."""
        return (*self.begins, *self.ends, *self.answer_ends)

    def _inside(self, thought: str) -> str:
        """Return the reasoning without the marks around it."""
        if self.messages is not None:
            return "\n".join(self.messages.findall(thought)).strip()
        thought = thought.lstrip()
        for begin in self.begins:
            thought = thought.removeprefix(begin)
        return thought.strip()


def _tags(name: str) -> ReasoningFormat:
    return ReasoningFormat(begins=(f"<{name}>",), ends=(f"</{name}>",))


CHANNELS = ReasoningFormat(
    begins=("<|channel|>analysis", "<|channel|>commentary"),
    ends=("<|channel|>final<|message|>",),
    answer_ends=("<|end|>", "<|return|>", "<|start|>"),
    messages=re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|<\|start\|>|\Z)", re.DOTALL),
    bare=("analysis", "assistantfinal"),
)
"""Harmony: gpt-oss."""
_THINK = _tags("think")
_KNOWN = (
    CHANNELS,
    ReasoningFormat(begins=("<|channel>thought", "<|channel>"), ends=("<channel|>",)),  # Gemma 4
    ReasoningFormat(  # Muse Glimmer
        begins=(" to=self<|message|>",),
        ends=(" to=user<|message|>",),
        answer_ends=("<|eot|>", "<|eom|>"),
    ),
    ReasoningFormat(begins=("[THINK]",), ends=("[/THINK]",)),  # Magistral
    ReasoningFormat(begins=("<|START_THINKING|>",), ends=("<|END_THINKING|>",)),  # Command A
    ReasoningFormat(begins=("\u25c1think\u25b7",), ends=("\u25c1/think\u25b7",)),  # Kimi
    _tags("seed:think"),
    _tags("mm:think"),
    _THINK,
)
"""Formats with unambiguous marks: they are recognized in any text."""
_GRANITE = ReasoningFormat(begins=("Here is my thought process:",), ends=("Here is my response:",))
_LONGEST_BEGINNING = 64
_HEADER = re.compile(r"(?:thought|<\|message\|>)?\s*")
"""Text that belongs to the mark at the start of the reasoning."""
_TAG = re.compile(r"</([\w:|.-]{0,20}(?:think|thought|reason)[\w:|.-]{0,20})>")


def reasoning_format(template: str, tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Return the reasoning format that a chat template shows, or that a tokenizer has tokens for; `None` without
    either.

    Args:
        template: The chat template's text.
        tokens: Added tokens of the tokenizer.
    """
    for form in _KNOWN[:-1]:
        if any(mark in template for mark in (*form.begins, *form.ends)):
            return form
    if all(mark in template for mark in (*_GRANITE.begins, *_GRANITE.ends)):
        return _GRANITE
    if names := dict.fromkeys(_TAG.findall(template)):
        return ReasoningFormat(begins=tuple(f"<{name}>" for name in names), ends=tuple(f"</{name}>" for name in names))
    return next((form for form in _KNOWN if all(mark in tokens for mark in (*form.begins, *form.ends))), None)


def split_reasoning(text: str, form: ReasoningFormat | None = None, *, begun: bool = False) -> tuple[str, str | None]:
    """Return the reasoning in a text, and the answer; the answer is `None` if the reasoning never ends.

    Args:
        text: A model's text, with the special tokens that mark its reasoning.
        form: The model's format; `None` if it has none, or is unknown: the marks in the text decide.
        begun: Whether the prompt began the reasoning.
    """
    if form is None:
        form = next((known for known in _KNOWN if known.marks(text)), _THINK)
    return form.split(text, begun=begun)


def answer_of(text: str, form: ReasoningFormat | None = None, *, begun: bool = False) -> str | None:
    """Return the part of a text after its reasoning; `None` if the reasoning never ends. See `split_reasoning`.

    >>> answer_of("<think>Two and two.</think>Four.")
    'Four.'
    """
    return split_reasoning(text, form, begun=begun)[1]


def begun_thought(prompt: str, form: ReasoningFormat | None = None) -> str:
    r"""Return the mark with which the end of a prompt begins the reasoning; empty if it does not.

    Args:
        prompt: The prompt's text, or its end.
        form: The model's format; `None`: any.

    >>> begun_thought("<|im_start|>assistant\n<think>\n")
    '<think>'
    """
    end = prompt[-_LONGEST_BEGINNING:]
    for known in _KNOWN if form is None else (form,):
        for begin in known.begins:
            _, found, after = end.rpartition(begin)
            if found and _HEADER.fullmatch(after) and not any(mark in after for mark in known.ends):
                return begin
    return ""
