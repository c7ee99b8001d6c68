"""From a table's rows to prompts, and which of them are held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from roll.config.data import FileData, HuggingFaceData
from roll.errors import DataError
from roll.registry import nearest
from roll.types import Message, Prompt

__all__ = ["messages_of", "prompt_of_row", "split_held_out"]

_ROLES = ("system", "user", "assistant", "tool")


def messages_of(text: str, system_prompt: str | None, template: str) -> tuple[Message, ...]:
    """The chat that asks for `text`."""
    user: Message = {"role": "user", "content": template.replace("{prompt}", text)}
    return ({"role": "system", "content": system_prompt}, user) if system_prompt else (user,)


def prompt_of_row(
    config: FileData | HuggingFaceData, domain: str, row: Mapping[str, Any], key: str, where: str
) -> Prompt:
    """One row as a prompt; columns other than prompt and answer become its metadata.

    Args:
        key: what the prompt's uid ends with.
        where: the row's place, for messages.

    Raises:
        DataError: a column is missing or of the wrong type.
    """
    content = _column(row, config.prompt_key, where, "prompt_key")
    answer = "" if config.answer_key is None else _column(row, config.answer_key, where, "answer_key")
    taken = {config.prompt_key, config.answer_key}
    return Prompt(
        uid=f"{domain}/{key}",
        domain=domain,
        messages=_messages(content, config, where),
        answer=_answer(answer, config, where),
        metadata={name: value for name, value in row.items() if name not in taken},
    )


def _column(row: Mapping[str, Any], name: str, where: str, option: str) -> Any:
    if name not in row:
        raise DataError(
            f"{where}: there is no column '{name}'.{nearest(name, list(row))} It has: {', '.join(row) or 'none'}. "
            f"Set `{option}` to the right one."
        )
    return row[name]


def _messages(content: Any, config: FileData | HuggingFaceData, where: str) -> tuple[Message, ...]:
    if isinstance(content, str) and content.strip():
        return messages_of(content, config.system_prompt, config.prompt_template)
    if isinstance(content, list) and content and all(_is_message(message) for message in content):
        system = config.system_prompt if content[0]["role"] != "system" else None
        first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        return (*first, *({"role": m["role"], "content": m["content"]} for m in content))
    raise DataError(
        f"{where}: column '{config.prompt_key}' must be text or a list of chat messages "
        f"({{role, content}}, roles {', '.join(_ROLES)}), got {_short(content)}."
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
    )


def _answer(value: Any, config: FileData | HuggingFaceData, where: str) -> str:
    if value is None or isinstance(value, list | dict):
        raise DataError(
            f"{where}: column '{config.answer_key}' must be text or a number, got {_short(value)}."
        )
    text = str(value)
    if config.answer_pattern is None:
        return text
    found = re.search(config.answer_pattern, text)
    if found is None:
        raise DataError(f"{where}: answer_pattern {config.answer_pattern!r} is not found in {_short(text)}.")
    return (found.group(1) if found.groups() else found.group(0)).strip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def split_held_out(prompts: Iterable[Prompt], share: float, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts. Which side one is on depends on its content and the seed, not on its neighbours.

    Prompts with the same messages land on the same side, so a duplicate never leaks.
    """
    training: list[Prompt] = []
    held_out: list[Prompt] = []
    for prompt in prompts:
        (held_out if _fraction(prompt, seed) < share else training).append(prompt)
    return training, held_out


def _fraction(prompt: Prompt, seed: int) -> float:
    """0 … 1, from a hash of the messages."""
    content = "\x00".join(message["content"] for message in prompt.messages)
    digest = hashlib.blake2b(f"{seed}/{content}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
