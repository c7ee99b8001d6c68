"""Base types of data sources: items by index, and a fingerprint that detects changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from roll.protocols import Items
from roll.types import Message, Prompt, get_content_key, iter_texts

__all__ = [
    "Fingerprint",
    "InterleavedSource",
    "PromptList",
    "Source",
    "get_message_content",
    "get_message_texts",
    "get_prompt_content",
    "get_template_inputs",
    "get_tool_texts",
    "hash_question",
]

T = TypeVar("T")
Item_co = TypeVar("Item_co", covariant=True)


class Source(Items[Item_co], Protocol[Item_co]):
    """Prompts or examples with a fingerprint of their content."""

    fingerprint: str
    """Digest that is identical for the same content in the same order; checked when a run is resumed."""


class Fingerprint:
    """Computes the digest of a sequence of items incrementally."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, content: Iterable[str]) -> None:
        """Add the strings of the next item to the digest."""
        self._digest.update("\x01".join(content).encode("utf-8", "surrogatepass") + b"\x02")

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal."""
        return self._digest.hexdigest()


class PromptList:
    """Prompts in memory; a `Source`."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = list(prompts)
        digest = Fingerprint()
        for prompt in self._prompts:
            digest.add(get_prompt_content(prompt))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


class InterleavedSource(Generic[T]):
    """Interleaves the items of several sources, so that the first items come from every source."""

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


def get_prompt_content(prompt: Prompt) -> list[str]:
    """Return all content that distinguishes the prompt from other prompts."""
    chat = map(get_message_content, prompt.messages)
    rest = get_template_inputs(prompt.tools, prompt.template_kwargs)
    return [prompt.uid, prompt.answer, *chat, *prompt.expert, *rest]


def get_message_content(message: Message) -> str:
    """Return all content that distinguishes the message from other messages."""
    content = f"{message.role}\x00{get_content_key(message.content)}"
    if message.is_plain:
        return content
    more = {name: value for name, value in message.to_dict().items() if name not in ("role", "content")}
    return f"{content}\x00{_to_json(more)}"


def get_template_inputs(tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tools and the template variables as JSON, each only if it is not empty."""
    if tools:
        yield _to_json(list(map(dict, tools)))
    if template_kwargs:
        yield _to_json(dict(template_kwargs))


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def get_message_texts(message: Message) -> Iterator[str]:
    """Yield every string in a message: its content, its reasoning, and the parts of its tool calls."""
    yield from iter_texts(message.content)
    yield from filter(None, (message.reasoning, message.name, message.tool_call_id))
    yield from _collect_texts(message.tool_calls)


def get_tool_texts(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield every string in the schemas of tools."""
    yield from _collect_texts(tools)


def _collect_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _collect_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _collect_texts(inner)


def hash_question(question: Iterable[str], seed: int = 0) -> int:
    """Compute a 64-bit hash that depends only on a question's content and the seed."""
    content = "\x00".join(question)
    digest = hashlib.blake2b(f"{seed}/{content}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
