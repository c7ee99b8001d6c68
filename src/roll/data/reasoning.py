"""Separates a model's reasoning from its answer, in the model's format.

    "<think>Two and two.</think>Four."                                              ──► "Four."
    "Two and two.</think>Four."           the prompt began the reasoning            ──► "Four."
    "<think>Two and"                      it never ends                             ──► None: no answer
    "<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>Four."  ──► "Four."

The format is detected from the model's chat template or tokenizer. If neither defines a format, it is detected from the
marks in the text. All functions accept arbitrary text.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

__all__ = [
    "HARMONY_FORMAT",
    "ReasoningFormat",
    "detect_reasoning_format",
    "extract_answer",
    "find_reasoning_start",
    "split_reasoning",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningFormat:
    """The strings with which a model family marks its reasoning."""

    begins: tuple[str, ...]
    """Strings that begin the reasoning."""
    ends: tuple[str, ...]
    """Strings that end the reasoning; the answer follows the last one."""
    answer_ends: tuple[str, ...] = ()
    """Strings that end the answer."""
    messages: re.Pattern[str] | None = None
    """Matches one message of the reasoning, if it consists of messages."""
    plain_marks: tuple[str, str] = ("", "")
    """Strings that begin and end the reasoning in text without special tokens."""

    def split(self, text: str, *, begun: bool = False) -> tuple[str, str | None]:
        """Split a text into reasoning and answer; the answer is `None` if the reasoning never ends.

        Reasoning that begins after the answer and never ends is not part of the answer.

        Args:
            text: The model's text.
            begun: Whether the prompt began the reasoning.
        """
        closed = max((place, place + len(end)) for end in self.ends for place in [text.rfind(end)])
        if (
            closed[0] < 0
            and self.plain_marks[0]
            and text.startswith(self.plain_marks[0])
            and self.plain_marks[1] in text
        ):
            thought, _, answer = text.rpartition(self.plain_marks[1])
            return thought.removeprefix(self.plain_marks[0]), answer
        if closed[0] < 0 and begun:
            return self._remove_marks(text), None
        thought, answer = (text[: closed[0]], text[closed[1] :]) if closed[0] >= 0 else ("", text)
        again = min((place for begin in self.begins if (place := answer.find(begin)) >= 0), default=None)
        if again is not None:
            thought, answer = thought + answer[again:], answer[:again]
            if not answer.strip():
                return self._remove_marks(thought), None
        # Text after the end of the answer is another message, which the model was not asked for.
        cut = min((place for end in self.answer_ends if (place := answer.find(end)) >= 0), default=len(answer))
        return self._remove_marks(thought), answer[:cut]

    def has_marks(self, text: str) -> bool:
        """Return whether a text has the marks of this family."""
        plain_marks = bool(self.plain_marks[0]) and text.startswith(self.plain_marks[0]) and self.plain_marks[1] in text
        return plain_marks or any(mark in text for mark in (*self.ends, *self.begins))

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All strings that mark reasoning and answers."""
        return (*self.begins, *self.ends, *self.answer_ends)

    def _remove_marks(self, thought: str) -> str:
        """Remove the marks around the reasoning."""
        if self.messages is not None:
            return "\n".join(self.messages.findall(thought)).strip()
        thought = thought.lstrip()
        for begin in self.begins:
            thought = thought.removeprefix(begin)
        return thought.strip()


def _build_tag_format(name: str) -> ReasoningFormat:
    return ReasoningFormat(begins=(f"<{name}>",), ends=(f"</{name}>",))


HARMONY_FORMAT = ReasoningFormat(
    begins=("<|channel|>analysis", "<|channel|>commentary"),
    ends=("<|channel|>final<|message|>",),
    answer_ends=("<|end|>", "<|return|>", "<|start|>"),
    messages=re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|<\|start\|>|\Z)", re.DOTALL),
    plain_marks=("analysis", "assistantfinal"),
)
"""Harmony: gpt-oss."""
_THINK_FORMAT = _build_tag_format("think")
_KNOWN_FORMATS = (
    HARMONY_FORMAT,
    ReasoningFormat(begins=("<|channel>thought", "<|channel>"), ends=("<channel|>",)),  # Gemma 4
    ReasoningFormat(  # Muse Glimmer
        begins=(" to=self<|message|>",),
        ends=(" to=user<|message|>",),
        answer_ends=("<|eot|>", "<|eom|>"),
    ),
    ReasoningFormat(begins=("[THINK]",), ends=("[/THINK]",)),  # Magistral
    ReasoningFormat(begins=("<|START_THINKING|>",), ends=("<|END_THINKING|>",)),  # Command A
    ReasoningFormat(begins=("\u25c1think\u25b7",), ends=("\u25c1/think\u25b7",)),  # Kimi
    _build_tag_format("seed:think"),
    _build_tag_format("mm:think"),
    _THINK_FORMAT,
)
"""Formats with unambiguous marks, which are recognized in any text."""
_GRANITE_FORMAT = ReasoningFormat(begins=("Here is my thought process:",), ends=("Here is my response:",))
_MAX_BEGINNING_LENGTH = 64
_HEADER_PATTERN = re.compile(r"(?:thought|<\|message\|>)?\s*")
"""Text that belongs to the mark at the start of the reasoning."""
_TAG_PATTERN = re.compile(r"</([\w:|.-]{0,20}(?:think|thought|reason)[\w:|.-]{0,20})>")


def detect_reasoning_format(template: str, tokens: Collection[str] = ()) -> ReasoningFormat | None:
    """Detect the reasoning format from a chat template, or from the tokenizer's tokens; `None` if neither defines one.

    Args:
        template: The chat template's text.
        tokens: Added tokens of the tokenizer.
    """
    for known in _KNOWN_FORMATS[:-1]:
        if any(mark in template for mark in (*known.begins, *known.ends)):
            return known
    if all(mark in template for mark in (*_GRANITE_FORMAT.begins, *_GRANITE_FORMAT.ends)):
        return _GRANITE_FORMAT
    if names := dict.fromkeys(_TAG_PATTERN.findall(template)):
        return ReasoningFormat(begins=tuple(f"<{name}>" for name in names), ends=tuple(f"</{name}>" for name in names))
    return next(
        (known for known in _KNOWN_FORMATS if all(mark in tokens for mark in (*known.begins, *known.ends))), None
    )


def split_reasoning(
    text: str, reasoning_format: ReasoningFormat | None = None, *, begun: bool = False
) -> tuple[str, str | None]:
    """Split a text into reasoning and answer; the answer is `None` if the reasoning never ends.

    Args:
        text: A model's text, with the special tokens that mark its reasoning.
        reasoning_format: The model's format. If `None`, the format is detected from the text.
        begun: Whether the prompt began the reasoning.
    """
    # An unknown model may still write a known format, for example after fine-tuning on another model's reasoning.
    if reasoning_format is None:
        reasoning_format = next((known for known in _KNOWN_FORMATS if known.has_marks(text)), _THINK_FORMAT)
    return reasoning_format.split(text, begun=begun)


def extract_answer(text: str, reasoning_format: ReasoningFormat | None = None, *, begun: bool = False) -> str | None:
    """Return the part of a text after the reasoning; `None` if the reasoning never ends. See `split_reasoning`.

    >>> extract_answer("<think>Two and two.</think>Four.")
    'Four.'
    """
    return split_reasoning(text, reasoning_format, begun=begun)[1]


def find_reasoning_start(prompt: str, reasoning_format: ReasoningFormat | None = None) -> str:
    r"""Return the reasoning mark with which a prompt ends, such as `<think>`; empty if there is none.

    Args:
        prompt: The prompt's text, or its end.
        reasoning_format: The model's format; `None` for any known format.

    >>> find_reasoning_start("<|im_start|>assistant\n<think>\n")
    '<think>'
    """
    end = prompt[-_MAX_BEGINNING_LENGTH:]
    for known in _KNOWN_FORMATS if reasoning_format is None else (reasoning_format,):
        for begin in known.begins:
            _, found, after = end.rpartition(begin)
            if found and _HEADER_PATTERN.fullmatch(after) and not any(mark in after for mark in known.ends):
                return begin
    return ""
