"""Reads rows as conversations to train on: lists of messages, prompts with answers, instructions, or plain text."""

from __future__ import annotations

from typing import Any

from roll.config.examples import ExampleColumns
from roll.data.cells import BadRow, is_null, read_column
from roll.data.conversations import (
    MessageReader,
    ParsedMessages,
    RowContext,
    RowView,
    apply_prompt_template,
    build_messages,
    check_order,
    parse_dialog,
    parse_prompt_text,
    prepend_system_message,
    read_context,
)
from roll.data.conversations.messages import check_text
from roll.errors import shorten
from roll.types import Conversation, Message

__all__ = ["RowParser"]


class RowParser:
    """Parses one row as conversations.

    Args:
        row: The row, which records which of its columns were read.
        config: The configuration with the columns' names.
        location: The row's location, for messages.

    Raises:
        BadRow: A column other than the messages is malformed.
    """

    def __init__(self, row: RowView, config: ExampleColumns, location: str) -> None:
        self._row, self._config, self._where = row, config, location
        self._reader = MessageReader(
            ignored=frozenset(config.ignored_fields), drop_nulls=row.drop_nulls, media=row.media
        )
        self._context: RowContext = read_context(row, config, location)

    def read_conversation(self) -> Conversation:
        """Read the row's conversation or plain text, in any of the known formats.

        Raises:
            BadRow: The row matches no known format, or is malformed.
        """
        row, config = self._row, self._config
        for key in (config.messages_key, config.conversations_key):
            if key is not None and row.has_value(key):
                return self.check(self._build_whole_conversation(self._reader.read(row[key], key, self._where)))
        if config.completion_key is not None and row.has_value(config.completion_key):
            return self.check(self.read_answer(config.completion_key, "completion_key"))
        if row.has_value(config.instruction_key) and config.output_key is not None:
            return self.check(self._read_instruction_and_output(config.output_key))
        if config.text_key is not None and row.has_value(config.text_key):
            self._context.check_empty(self._where)
            return Conversation(text=self._check_text_cell(row[config.text_key], config.text_key))
        return self._raise_unknown_format()

    def read_answer(self, key: str, option: str) -> Conversation:
        """Read the conversation that consists of the row's prompt and the answer in a column.

        The column may also contain the whole conversation, including the prompt: a list that does not start with an
        assistant message, or a dialog as in hh-rlhf. If `prompt_key` is null, a string is plain text.

        Args:
            key: The column's name.
            option: The key of the configuration that names the column.

        Raises:
            BadRow: The column's value has an unsupported format.
        """
        value = read_column(self._row, key, self._where, option)
        found = parse_prompt_text(value) if isinstance(value, str) else None
        value = found.raw_messages if found and found.raw_messages else value
        if isinstance(value, str):
            text = self._check_text_cell(value, key, label="answer")
            if self._config.prompt_key is None:
                self._context.check_empty(self._where)
                return Conversation(text=text)
            dialog = None if self._row.has_value(self._config.prompt_key) else parse_dialog(text)
            if dialog is not None:
                return self._build_whole_conversation(ParsedMessages(messages=dialog))
            if not self._has_prompt():
                columns = ", ".join(shorten(name) for name in list(self._row)[:20])
                raise BadRow(
                    "missing column",
                    f"{self._where}: column '{self._config.prompt_key}' does not exist, and '{key}' is a string but "
                    f"not a dialog of `Human:` and `Assistant:`. Available columns: {columns}. Set prompt_key to the "
                    "prompt's column, provide whole conversations, or set prompt_key to null if both answers of a "
                    "pair are strings that begin with the prompt.",
                )
            answer = ParsedMessages(messages=(Message(role="assistant", content=text),))
        else:
            answer = self._reader.read(value, key, self._where)
            if answer.messages[0].role != "assistant":
                return self._build_whole_conversation(answer)
        asked = self._read_prompt()
        return self._build_conversation(answer.prepend(asked), num_prompt_messages=len(asked))

    def check(self, conversation: Conversation, location: str | None = None) -> Conversation:
        """Check the order of a conversation's roles, and return the conversation.

        Args:
            conversation: The row's conversation.
            location: The conversation's location, for messages; by default the row's location.

        Raises:
            BadRow: The roles are in the wrong order.
        """
        if conversation.text is None:
            check_order(conversation.messages, location or self._where)
        return conversation

    def _build_conversation(self, parsed: ParsedMessages, num_prompt_messages: int = 0) -> Conversation:
        return Conversation(
            messages=parsed.messages,
            num_prompt_messages=num_prompt_messages,
            untrained_messages=parsed.untrained_messages,
            tools=self._context.tools,
            template_kwargs=self._context.template_kwargs,
        )

    def _build_whole_conversation(self, parsed: ParsedMessages) -> Conversation:
        """Build a conversation from messages that already include the prompt; only a system message may be added."""
        config, location = self._config, self._where
        if self._context.history:
            raise BadRow(
                "two forms in one row",
                f"{location}: the messages are the whole conversation, but column '{config.history_key}' has earlier "
                "turns: move these turns into the messages.",
            )
        messages = apply_prompt_template(parsed.messages, config.prompt_template, location, allow_several=False)
        complete = prepend_system_message(messages, self._context, config, location)
        before = complete[: len(complete) - len(messages)]
        return self._build_conversation(ParsedMessages(messages=messages, marks=parsed.marks).prepend(before))

    def _read_instruction_and_output(self, output_key: str) -> Conversation:
        output = self._check_text_cell(
            read_column(self._row, output_key, self._where, "output_key"), output_key, label="answer"
        )
        asked = self._read_instruction()
        answer = Message(role="assistant", content=output)
        return self._build_conversation(ParsedMessages(messages=(*asked, answer)), num_prompt_messages=len(asked))

    def _read_instruction(self) -> tuple[Message, ...]:
        row, config = self._row, self._config
        assert config.instruction_key is not None
        asked = self._check_text_cell(row[config.instruction_key], config.instruction_key, label="prompt")
        if config.input_key is not None and row.has_value(config.input_key):
            asked += "\n\n" + self._check_text_cell(row[config.input_key], config.input_key, label="prompt")
        return self._complete_prompt(build_messages(asked, None, config.prompt_template))

    def _read_prompt(self) -> tuple[Message, ...]:
        """Read the messages of the row's prompt.

        Without a prompt column, the messages are read from the column of messages, conversations or instructions.
        """
        row, config, location = self._row, self._config, self._where
        name = config.prompt_key or "prompt"
        if not row.has_value(name):
            for key in (config.messages_key, config.conversations_key):
                if key is not None and row.has_value(key):
                    return self._read_message_list(row[key], key)
            if row.has_value(config.instruction_key):
                return self._read_instruction()
        value = read_column(row, name, location, "prompt_key")
        if is_null(value):
            raise BadRow("empty prompt", f"{location}: column '{name}' is null: fill it in, or remove the row.")
        if not isinstance(value, str):
            return self._read_message_list(value, name)
        text = self._check_text_cell(value, name, label="prompt")
        found = parse_prompt_text(text)
        if found is None:
            return self._complete_prompt(build_messages(text, None, config.prompt_template))
        if found.raw_messages is not None:
            return self._read_message_list(found.raw_messages, name)
        assert found.messages is not None
        return self._complete_prompt(apply_prompt_template(found.messages, config.prompt_template, location))

    def _has_prompt(self) -> bool:
        """Return whether the row has a column from which its prompt can be read."""
        row, config = self._row, self._config
        others = (config.messages_key, config.conversations_key, config.instruction_key)
        return config.prompt_key in row or any(row.has_value(name) for name in others)

    def _read_message_list(self, value: Any, key: str) -> tuple[Message, ...]:
        messages = self._reader.read(value, key, self._where).as_context(self._where)
        return self._complete_prompt(apply_prompt_template(messages, self._config.prompt_template, self._where))

    def _complete_prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Prepend the row's system message and earlier turns to the prompt's messages."""
        history, system = self._context.history, messages[:1] if messages[0].role == "system" else ()
        return prepend_system_message(
            (*system, *history, *messages[len(system) :]), self._context, self._config, self._where
        )

    def _check_text_cell(self, value: Any, key: str, label: str = "text") -> str:
        if not isinstance(value, str):
            raise BadRow("wrong type", f"{self._where}: column '{key}' must be a string, got {shorten(value)}.")
        if not value.strip():
            raise BadRow(f"empty {label}", f"{self._where}: column '{key}' is empty: fill it in, or remove the row.")
        check_text(value, key, self._where)
        return value

    def _raise_unknown_format(self) -> Conversation:
        """Raise an error that explains why no format matches."""
        row, config, location = self._row, self._config, self._where
        keys = (
            config.messages_key,
            config.conversations_key,
            config.completion_key,
            config.output_key,
            config.text_key,
        )
        for key in keys:
            if key is None or key not in row:
                continue
            if is_null(row.peek(key)):
                raise BadRow("empty answer", f"{location}: column '{key}' is null: fill it in, or remove the row.")
            if key in (config.messages_key, config.conversations_key):
                self._reader.read(row[key], key, location)  # raises with the required form
            if key == config.completion_key:
                self.read_answer(key, "completion_key")
            self._check_text_cell(row[key], key, label="text" if key == config.text_key else "answer")
        columns = ", ".join(shorten(name) for name in list(row)[:20]) or "none"
        if config.chosen_key in row and config.rejected_key in row:
            raise BadRow(
                "pairs",
                f"{location}: the row has two answers to compare, '{config.chosen_key}' and '{config.rejected_key}': "
                "use the pipeline `preference` or `reward_model`, or set completion_key to the column to train on.",
            )
        if row.has_value(config.prompt_key) and config.completion_key is not None:
            read_column(row, config.completion_key, location, "completion_key")  # raises with the missing column
        raise BadRow(
            "missing column",
            f"{location}: no column contains text to train on. Available columns: {columns}. Expected `messages`, or "
            "`prompt` and `completion`, or `text`: set messages_key, completion_key or text_key to the column's name.",
        )
