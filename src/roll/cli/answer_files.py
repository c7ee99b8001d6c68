"""Read answers to score from a file with one JSON object per line; every error names its line.

response   the answer                                   (also: text, completion)
answer     the reference, if the reward needs one       (also: reference, ground_truth)
prompt     the question: text, or chat messages         (also: question, messages)
metadata   other inputs of the reward; further keys of the line are added
finished   false for a truncated answer
domain     domain of the configuration whose reward scores the answer
expected   expected result: true or false for correctness, or a number for the value
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.errors import DataError, shorten
from roll.registry import did_you_mean
from roll.rewards.base import build_rollout_from_answer
from roll.types import Message, Prompt, Rollout

__all__ = ["ANSWER_KEYS", "AnswerLine", "encode_words", "read_answers"]

_RESPONSE_KEYS = ("response", "text", "completion")
ANSWER_KEYS = ("answer", "reference", "ground_truth")
_PROMPT_KEYS = ("prompt", "question", "messages")
_OTHER_KEYS = ("metadata", "finished", "domain", "expected")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerLine:
    """An answer to score: one line of an answer file."""

    number: int
    """Line number, from 1."""
    domain: str
    rollout: Rollout
    expected: bool | float | None


def encode_words(text: str) -> list[int]:
    """Return one integer ID per word; equal words have equal IDs.

    Length penalties use this function if there is no tokenizer.
    """
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, len(numbers)) for word in text.split()]


def read_answers(
    path: Path, domains: list[str], tokenize: Callable[[str], list[int]], limit: int | None
) -> Iterator[AnswerLine]:
    """Yield at most `limit` answers of a JSON Lines file; empty lines are skipped.

    Args:
        path: the file.
        domains: domains that can be scored; each line must name its domain, unless there is only one.
        tokenize: function that tokenizes a string.
        limit: maximum number of answers to read.

    Raises:
        DataError: the file cannot be read, has no answers, or has a malformed line.
    """
    count = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if limit is not None and count >= limit:
                    return
                count += 1
                yield _parse_line(line, number, f"'{path}', line {number}", domains, tokenize)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text (byte {error.start}).") from None
    if not count:
        raise DataError(f'\'{path}\' has no answers: write one JSON object per line, such as {{"response": "7"}}.')


def _parse_line(
    line: str, number: int, location: str, domains: list[str], tokenize: Callable[[str], list[int]]
) -> AnswerLine:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: the line is not valid JSON ({error}): {shorten(line.strip())}") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{location}: an answer must be a JSON object, got {type(row).__name__}: {shorten(line.strip())}"
        )
    response_key = _find_key(row, _RESPONSE_KEYS)
    if response_key is None:
        hint = did_you_mean(next(iter(row), ""), _RESPONSE_KEYS)
        keys = ", ".join(map(repr, list(row)[:20])) or "none"
        raise DataError(f"{location}: the key 'response', the answer to score, is missing. Keys: {keys}.{hint}")
    response = _read_typed_value(row, response_key, str, "", location)
    answer_key, prompt_key = _find_key(row, ANSWER_KEYS), _find_key(row, _PROMPT_KEYS)
    answer = _read_plain_value(row[answer_key], answer_key, location) if answer_key else ""
    finished = _read_typed_value(row, "finished", bool, True, location)
    metadata = _read_typed_value(row, "metadata", dict, {}, location)
    taken = {response_key, answer_key, prompt_key, *_OTHER_KEYS}
    prompt = Prompt(
        uid=f"line {number}",
        domain=_read_domain(row, domains, location),
        messages=_parse_messages(row.get(prompt_key, "") if prompt_key else "", location),
        answer=answer,
        metadata={**{key: value for key, value in row.items() if key not in taken}, **metadata},
    )
    return AnswerLine(
        number=number,
        domain=prompt.domain,
        rollout=build_rollout_from_answer(prompt, response, tokenize(response), finished=finished),
        expected=_read_expected(row, location),
    )


def _find_key(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _read_plain_value(value: Any, key: str, location: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{location}: '{key}' must be a string or a number, got {shorten(value)}.")
    return str(value)


def _read_typed_value(row: Mapping[str, Any], key: str, kind: type, default: Any, location: str) -> Any:
    value = row.get(key, default)
    if not isinstance(value, kind):
        words = {bool: "true or false", dict: "an object", str: "a string"}[kind]
        raise DataError(f"{location}: '{key}' must be {words}, got {shorten(value)}.")
    return value


def _read_domain(row: Mapping[str, Any], domains: list[str], location: str) -> str:
    named = _read_typed_value(row, "domain", str, "", location)
    if named in domains:
        return named
    if len(domains) == 1 and not named:
        return domains[0]
    known = ", ".join(f"'{domain}'" for domain in domains)
    if not named:
        raise DataError(
            f"{location}: the key 'domain' is required because there are several rewards: choose from {known}."
        )
    if domains == [""]:
        return ""
    raise DataError(f"{location}: unknown domain '{named}'.{did_you_mean(named, domains)} Choose from {known}.")


def _parse_messages(value: Any, location: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role="user", content=value),)
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )
    if not is_chat:
        raise DataError(f"{location}: the prompt must be a string or a list of chat messages, got {shorten(value)}.")
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def _read_expected(row: Mapping[str, Any], location: str) -> bool | float | None:
    value = row.get("expected")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    raise DataError(f"{location}: 'expected' must be true, false or a number, got {shorten(value)}.")
