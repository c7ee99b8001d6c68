"""Conversations as data sets write them: lists of `{role, content}` or `{from, value}`, prompts and answers, texts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from roll.config.examples import ExampleColumns
from roll.data.cells import ROLES, BadRow, Row, as_list, column, is_null, unicode_text
from roll.data.rows import messages_of
from roll.errors import short
from roll.types import Conversation, Message

__all__ = ["answered", "checked", "conversation_of_row", "has"]

MAX_MESSAGES = 1000
"""Of one conversation: templates are rendered up to each answer, which takes time with the square of their number."""
_UNREAD = ("tool_calls", "function_call", "reasoning_content")
"""Fields of a message in which a model says something."""
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}


def has(row: Row, key: str | None) -> bool:
    """Whether the row says anything in this column; data sets fill columns of other rows' forms with null."""
    return key is not None and not is_null(row.get(key))


def conversation_of_row(row: Row, config: ExampleColumns, where: str) -> Conversation:
    """The one conversation or text of a row, in whichever of the known forms it comes.

    Raises:
        BadRow: it comes in none, or is malformed.
    """
    for key in (config.messages_key, config.conversations_key):
        if key is not None and has(row, key):
            return checked(Conversation(messages=_listed(row[key], config, key, where)), where)
    if config.completion_key is not None and has(row, config.completion_key):
        return checked(answered(row, config.completion_key, "completion_key", config, where), where)
    if config.instruction_key is not None and has(row, config.instruction_key) and config.output_key is not None:
        return checked(_instructed(row, config, where), where)
    if config.text_key is not None and has(row, config.text_key):
        return Conversation(text=text_of(row[config.text_key], config.text_key, where))
    given = (config.messages_key, config.conversations_key, config.completion_key, config.output_key, config.text_key)
    null = next((key for key in given if key in row and not has(row, key)), None)
    if null is not None:
        raise BadRow("empty answer", f"{where}: column '{null}' is null: fill it in, or leave the row out.")
    columns = ", ".join(short(name) for name in list(row)[:20]) or "none"
    if config.chosen_key in row and config.rejected_key in row:
        raise BadRow(
            "pairs",
            f"{where}: it has '{config.chosen_key}' and '{config.rejected_key}', two answers to compare: take pipeline "
            "`preference` or `reward_model`, or set completion_key to the one to imitate.",
        )
    if config.prompt_key is not None and has(row, config.prompt_key) and config.completion_key is not None:
        column(row, config.completion_key, where, "completion_key")  # says what is missing
    raise BadRow(
        "missing column",
        f"{where}: no column says what is learnt. It has: {columns}. A row has `messages`, or `prompt` and "
        "`completion`, or `text`: set messages_key, completion_key or text_key to its name.",
    )


def answered(row: Row, key: str, option: str, config: ExampleColumns, where: str) -> Conversation:
    """The answer in column `key`, after the row's prompt; a list that does not begin with the answer has its own.

    Where the configuration names no prompt's column, a text is plain text.

    Args:
        option: which key of the configuration names the column.

    Raises:
        BadRow: it is none of these.
    """
    value = column(row, key, where, option)
    if isinstance(value, str):
        text = text_of(value, key, where, what="answer")
        if config.prompt_key is None:
            return Conversation(text=text)
        answer: tuple[Message, ...] = ({"role": "assistant", "content": text},)
    else:
        answer = _messages(value, key, where)
        if answer[0]["role"] != "assistant":
            return Conversation(messages=_with_system(answer, config))
    asked = _asked(row, config, where)
    return Conversation(messages=(*asked, *answer), num_given=len(asked))


def checked(conversation: Conversation, where: str) -> Conversation:
    """The conversation, whose roles are in an order that can be learnt from.

    Raises:
        BadRow: they are not.
    """
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    if conversation.text is not None:
        return conversation
    problem = None
    spoken = roles[1:] if roles[0] == "system" else roles
    if "system" in spoken:
        problem = "a system message may only be the first"
    elif not spoken or spoken[0] != "user":
        problem = "the first message, after a system message, must be the user's"
    elif any(role == "tool" and before == "user" for before, role in pairwise(spoken)):
        problem = "a tool's message must follow the assistant's"
    elif spoken[-1] != "assistant":
        problem = "the last message must be the assistant's: nothing answers it"
    if problem is not None:
        raise BadRow("roles out of order", f"{where}: {problem} (the roles are {', '.join(roles[:8])}).")
    for number, message in enumerate(messages, 1):
        if not message["content"].strip() and message["role"] in ("user", "assistant"):
            what = "answer" if message["role"] == "assistant" else "prompt"
            raise BadRow(f"empty {what}", f"{where}: message {number}, of the {message['role']}, is empty: fill it in.")
    return conversation


def _instructed(row: Row, config: ExampleColumns, where: str) -> Conversation:
    assert config.instruction_key is not None and config.output_key is not None
    asked = text_of(row[config.instruction_key], config.instruction_key, where, what="prompt")
    if config.input_key is not None and has(row, config.input_key):
        given = row[config.input_key]
        asked += (
            "" if isinstance(given, str) and not given else "\n\n" + text_of(given, config.input_key, where, "prompt")
        )
    output = text_of(column(row, config.output_key, where, "output_key"), config.output_key, where, what="answer")
    messages = messages_of(asked, config.system_prompt, config.prompt_template)
    answer: Message = {"role": "assistant", "content": output}
    return Conversation(messages=(*messages, answer), num_given=len(messages))


def _asked(row: Row, config: ExampleColumns, where: str) -> tuple[Message, ...]:
    name = config.prompt_key or "prompt"
    value = column(row, name, where, "prompt_key")
    if is_null(value):
        raise BadRow("empty prompt", f"{where}: column '{name}' is null: fill it in, or leave the row out.")
    if isinstance(value, str):
        return messages_of(text_of(value, name, where, what="prompt"), config.system_prompt, config.prompt_template)
    return _listed(value, config, name, where)


def _listed(value: Any, config: ExampleColumns, key: str, where: str) -> tuple[Message, ...]:
    return _with_system(_messages(value, key, where), config)


def _with_system(messages: tuple[Message, ...], config: ExampleColumns) -> tuple[Message, ...]:
    if config.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": config.system_prompt}, *messages)


def _messages(value: Any, key: str, where: str) -> tuple[Message, ...]:
    value = as_list(value)
    if isinstance(value, list | tuple) and len(value) > MAX_MESSAGES:
        raise BadRow(
            "too many messages",
            f"{where}: a conversation of {len(value):,} messages, at most {MAX_MESSAGES:,}: split it.",
        )
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(
            "wrong type",
            f"{where}: column '{key}' must be text or a list of chat messages ({{role, content}}), got {short(value)}.",
        )
    return tuple(_message(message, key, f"{where}, message {number}") for number, message in enumerate(value, 1))


def _message(value: Any, key: str, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{where}: a chat message is {{role, content}}, got {short(value)}.")
    role, content = value.get("role"), value.get("content")
    if role is None and "from" in value:
        role, content = value["from"], value.get("value")
        role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow("unknown role", f"{where}: the role must be one of {', '.join(ROLES)}, got {short(role)}.")
    for field in _UNREAD:
        said = as_list(value.get(field))
        if not is_null(said) and said:
            raise BadRow(
                "reasoning content" if field == "reasoning_content" else "tool calls",
                f"{where}: `{field}` are not read: write what they say into `content` as the model spells it.",
            )
    weight = as_list(value.get("weight"))
    if not is_null(weight) and weight != 1:
        raise BadRow(
            "message with a weight",
            f"{where}: its `weight` is {short(weight)}, but every answer of a conversation counts alike: give what is "
            "not to be learnt as the `prompt`, and the answer as its `completion`.",
        )
    content = _joined(content)
    if not isinstance(content, str):
        raise BadRow("wrong type", f"{where}: `content` must be text, got {short(content)}.")
    _readable(content, key, where)
    return {"role": role, "content": content}


def _joined(content: Any) -> Any:
    """The text of content that is given as parts, if all of them are text."""
    content = as_list(content)
    if not isinstance(content, list | tuple) or not content:
        return content
    texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    readable = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if readable else content


def text_of(value: Any, key: str, where: str, what: str = "text") -> str:
    """The value, if it is text with anything in it.

    Raises:
        BadRow: it is not.
    """
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{where}: column '{key}' must be text, got {short(value)}.")
    if not value.strip():
        raise BadRow(f"empty {what}", f"{where}: column '{key}' is empty: fill it in, or leave the row out.")
    _readable(value, key, where)
    return value


def _readable(text: str, key: str, where: str) -> None:
    unicode_text(text, key, where)
    if "\x00" in text:
        raise BadRow("NUL character", f"{where}: column '{key}' has a NUL character at {text.index(chr(0))}.")
