"""What every prompt source is made of: prompts by index, and a fingerprint that tells whether they changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from roll.protocols import PromptSource
from roll.types import Prompt

__all__ = ["Fingerprint", "InterleavedPrompts", "PromptList", "Source", "content_hash"]


class Source(PromptSource, Protocol):
    """A prompt source that knows its content."""

    fingerprint: str
    """Equal for equal content in equal order; a resumed run compares it."""


class Fingerprint:
    """Digest of a series of prompts, taken one after the other."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, prompt: Prompt) -> None:
        """Take in the next prompt."""
        chat = (f"{m['role']}\x00{m['content']}" for m in prompt.messages)
        parts = [prompt.uid, prompt.answer, *chat, *prompt.expert]
        self._digest.update("\x01".join(parts).encode("utf-8", "surrogatepass") + b"\x02")

    def text(self) -> str:
        """The digest so far, in hexadecimal."""
        return self._digest.hexdigest()


class PromptList:
    """A source that is held in memory."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = list(prompts)
        digest = Fingerprint()
        for prompt in self._prompts:
            digest.add(prompt)
        self.fingerprint = digest.text()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


class InterleavedPrompts:
    """One prompt of each part in turn, so that any beginning covers every part; read only when asked for."""

    def __init__(self, parts: Sequence[PromptSource]) -> None:
        self._parts = list(parts)
        indices = [np.arange(len(part)) for part in parts]
        which = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        flat = np.concatenate(indices) if indices else np.zeros(0, np.int64)
        order = np.lexsort((which, flat))
        self._which, self._index = which[order], flat[order]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Prompt:
        return self._parts[int(self._which[index])][int(self._index[index])]


def content_hash(prompt: Prompt, seed: int = 0) -> int:
    """64 bits of what the model is asked, so that the same question has the same hash wherever it stands."""
    content = "\x00".join(message["content"] for message in prompt.messages)
    digest = hashlib.blake2b(f"{seed}/{content}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
