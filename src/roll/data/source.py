"""Base types of all sources: items by index, and a fingerprint that shows whether they changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from roll.protocols import Items
from roll.types import Message, Prompt, content_key, texts_of

__all__ = [
    "Fingerprint",
    "Interleaved",
    "PromptList",
    "Source",
    "content_hash",
    "content_of_message",
    "content_of_prompt",
    "content_of_rest",
    "texts_in",
    "texts_of_tools",
]

T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)


class Source(Items[Item_co], Protocol[Item_co]):
    """Prompts or examples with a fingerprint of their content."""

    fingerprint: str
    """Equal for equal content in equal order; a resumed run compares it."""


class Fingerprint:
    """Digest of a sequence of items, added one after the other."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, content: Iterable[str]) -> None:
        """Add the next item, by its texts."""
        self._digest.update("\x01".join(content).encode("utf-8", "surrogatepass") + b"\x02")

    def text(self) -> str:
        """Return the digest so far, in hexadecimal."""
        return self._digest.hexdigest()


class PromptList:
    """A source in memory."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = list(prompts)
        digest = Fingerprint()
        for prompt in self._prompts:
            digest.add(content_of_prompt(prompt))
        self.fingerprint = digest.text()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


class Interleaved(Generic[T]):
    """One item of each part in turn, so that any prefix covers every part; read on demand."""

    def __init__(self, parts: Sequence[Items[T]]) -> None:
        self._parts = list(parts)
        indices = [np.arange(len(part)) for part in parts]
        which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        flat = np.concatenate(indices) if indices else np.zeros(0, np.int64)
        order = np.lexsort((which, flat))
        self._which, self._index = which[order], flat[order]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> T:
        return self._parts[int(self._which[index])][int(self._index[index])]


def content_of_prompt(prompt: Prompt) -> list[str]:
    """Return all content that distinguishes the prompt from others."""
    chat = map(content_of_message, prompt.messages)
    rest = content_of_rest(prompt.tools, prompt.template_kwargs)
    return [prompt.uid, prompt.answer, *chat, *prompt.expert, *rest]


def content_of_message(message: Message) -> str:
    """Return all content that distinguishes the message from others."""
    content = f"{message.role}\x00{content_key(message.content)}"
    if message.is_plain:
        return content
    more = {name: value for name, value in message.to_dict().items() if name not in ("role", "content")}
    return f"{content}\x00{_as_json(more)}"


def content_of_rest(tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the inputs of a chat template other than messages, if any."""
    if tools:
        yield _as_json(list(map(dict, tools)))
    if template_kwargs:
        yield _as_json(dict(template_kwargs))


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def texts_in(message: Message) -> Iterator[str]:
    """Yield every text of a message: its content, its reasoning, and the parts of its tool calls."""
    yield from texts_of(message.content)
    yield from filter(None, (message.reasoning, message.name, message.tool_call_id))
    yield from _texts(message.tool_calls)


def texts_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield every text of tools' schemas."""
    yield from _texts(tools)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def content_hash(asked: Iterable[str], seed: int = 0) -> int:
    """Return a 64-bit hash of the question, which is the same wherever the question occurs."""
    content = "\x00".join(asked)
    digest = hashlib.blake2b(f"{seed}/{content}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
