"""Read rows as conversations to train on: lists of messages, prompts and answers, instructions, texts."""

from __future__ import annotations

from typing import Any

from roll.config.examples import ExampleColumns
from roll.data.cells import BadRow, column, is_null
from roll.data.conversations import (
    MessageReader,
    ReadMessages,
    RowContext,
    RowView,
    check_order,
    dialog_messages,
    messages_of,
    prompt_of_text,
    read_context,
    with_prompt_template,
    with_system,
)
from roll.data.conversations.messages import check_text
from roll.errors import short
from roll.types import Conversation, Message

__all__ = ["RowReading"]


class RowReading:
    """One row, read as conversations.

    Args:
        row: The row, which records which of its columns were read.
        config: The configuration with the columns' names.
        where: The row's place, for messages.

    Raises:
        BadRow: A column other than the messages is malformed.
    """

    def __init__(self, row: RowView, config: ExampleColumns, where: str) -> None:
        self._row, self._config, self._where = row, config, where
        self._reader = MessageReader(ignored=frozenset(config.ignored_fields), drop_nulls=row.drop_nulls)
        self._context: RowContext = read_context(row, config, where)

    def conversation(self) -> Conversation:
        """Return the one conversation or text of the row, in any of the known formats.

        Raises:
            BadRow: The row has no known format, or is malformed.
        """
        row, config = self._row, self._config
        for key in (config.messages_key, config.conversations_key):
            if key is not None and row.says(key):
                return self.checked(self._whole(self._reader.read(row[key], key, self._where)))
        if config.completion_key is not None and row.says(config.completion_key):
            return self.checked(self.answered(config.completion_key, "completion_key"))
        if row.says(config.instruction_key) and config.output_key is not None:
            return self.checked(self._instructed(config.output_key))
        if config.text_key is not None and row.says(config.text_key):
            self._context.refuse_with_text(self._where)
            return Conversation(text=self._text(row[config.text_key], config.text_key))
        return self._refused()

    def answered(self, key: str, option: str) -> Conversation:
        """Return the answer in a column, after the row's prompt; a list that does not start with that has its own
        prompt.

        If the configuration names no prompt column, a text is plain text. A text that is a whole dialog, as in hh-rlhf,
        has its own prompt as well.

        Args:
            key: The column's name.
            option: The key of the configuration that names the column.

        Raises:
            BadRow: The column has another form.
        """
        value = column(self._row, key, self._where, option)
        found = prompt_of_text(value) if isinstance(value, str) else None
        value = found.listed if found and found.listed else value
        if isinstance(value, str):
            text = self._text(value, key, what="answer")
            if self._config.prompt_key is None:
                self._context.refuse_with_text(self._where)
                return Conversation(text=text)
            dialog = None if self._row.says(self._config.prompt_key) else dialog_messages(text)
            if dialog is not None:
                return self._whole(ReadMessages(messages=dialog))
            if not self._has_prompt():
                columns = ", ".join(short(name) for name in list(self._row)[:20])
                raise BadRow(
                    "missing column",
                    f"{self._where}: there is no column '{self._config.prompt_key}', and '{key}' is a text that is no "
                    f"dialog of `Human:` and `Assistant:`. It has: {columns}. Set prompt_key to the prompt's column, "
                    "give whole conversations, or set prompt_key to null where both sides of a pair are texts that "
                    "begin with the prompt.",
                )
            answer = ReadMessages(messages=(Message(role="assistant", content=text),))
        else:
            answer = self._reader.read(value, key, self._where)
            if answer.messages[0].role != "assistant":
                return self._whole(answer)
        asked = self._asked()
        return self._conversation(answer.after(asked), num_given=len(asked))

    def checked(self, conversation: Conversation, where: str | None = None) -> Conversation:
        """Return the conversation, after checking that its roles are in an order that can be trained on.

        Args:
            conversation: The row's conversation.
            where: Its place, for messages; by default the row's.

        Raises:
            BadRow: The roles are in the wrong order.
        """
        if conversation.text is None:
            check_order(conversation.messages, where or self._where)
        return conversation

    def _conversation(self, read: ReadMessages, num_given: int = 0) -> Conversation:
        return Conversation(
            messages=read.messages,
            num_given=num_given,
            untrained=read.untrained,
            tools=self._context.tools,
            template_kwargs=self._context.template_kwargs,
        )

    def _whole(self, read: ReadMessages) -> Conversation:
        """Return a conversation with its own prompt."""
        config, where = self._config, self._where
        if self._context.history:
            raise BadRow(
                "two forms in one row",
                f"{where}: its messages are the whole conversation, but column '{config.history_key}' has earlier "
                "turns: put these into the messages.",
            )
        messages = with_prompt_template(read.messages, config.prompt_template, where, last=False)
        complete = with_system(messages, self._context, config, where)
        before = complete[: len(complete) - len(messages)]
        return self._conversation(ReadMessages(messages=messages, marks=read.marks).after(before))

    def _instructed(self, output_key: str) -> Conversation:
        output = self._text(column(self._row, output_key, self._where, "output_key"), output_key, what="answer")
        asked = self._instruction()
        answer = Message(role="assistant", content=output)
        return self._conversation(ReadMessages(messages=(*asked, answer)), num_given=len(asked))

    def _instruction(self) -> tuple[Message, ...]:
        row, config = self._row, self._config
        assert config.instruction_key is not None
        asked = self._text(row[config.instruction_key], config.instruction_key, what="prompt")
        if config.input_key is not None and row.says(config.input_key):
            asked += "\n\n" + self._text(row[config.input_key], config.input_key, what="prompt")
        return self._prompt(messages_of(asked, None, config.prompt_template))

    def _asked(self) -> tuple[Message, ...]:
        """Return the messages of the row's prompt; for pairs, it may be in the columns of whole conversations."""
        row, config, where = self._row, self._config, self._where
        name = config.prompt_key or "prompt"
        if not row.says(name):
            for key in (config.messages_key, config.conversations_key):
                if key is not None and row.says(key):
                    return self._listed(row[key], key)
            if row.says(config.instruction_key):
                return self._instruction()
        value = column(row, name, where, "prompt_key")
        if is_null(value):
            raise BadRow("empty prompt", f"{where}: column '{name}' is null: fill it in, or leave the row out.")
        if not isinstance(value, str):
            return self._listed(value, name)
        text = self._text(value, name, what="prompt")
        found = prompt_of_text(text)
        if found is None:
            return self._prompt(messages_of(text, None, config.prompt_template))
        if found.listed is not None:
            return self._listed(found.listed, name)
        assert found.messages is not None
        return self._prompt(with_prompt_template(found.messages, config.prompt_template, where))

    def _has_prompt(self) -> bool:
        """Return whether a column has, or should have, the prompt."""
        row, config = self._row, self._config
        others = (config.messages_key, config.conversations_key, config.instruction_key)
        return config.prompt_key in row or any(row.says(name) for name in others)

    def _listed(self, value: Any, key: str) -> tuple[Message, ...]:
        messages = self._reader.read(value, key, self._where).as_context(self._where)
        return self._prompt(with_prompt_template(messages, self._config.prompt_template, self._where))

    def _prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return a prompt's messages behind the row's system message and its earlier turns."""
        history, own = self._context.history, messages[:1] if messages[0].role == "system" else ()
        return with_system((*own, *history, *messages[len(own) :]), self._context, self._config, self._where)

    def _text(self, value: Any, key: str, what: str = "text") -> str:
        if not isinstance(value, str):
            raise BadRow("wrong type", f"{self._where}: column '{key}' must be text, got {short(value)}.")
        if not value.strip():
            raise BadRow(f"empty {what}", f"{self._where}: column '{key}' is empty: fill it in, or leave the row out.")
        check_text(value, key, self._where)
        return value

    def _refused(self) -> Conversation:
        """Raise an error that explains why no format matches."""
        row, config, where = self._row, self._config, self._where
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
                raise BadRow("empty answer", f"{where}: column '{key}' is null: fill it in, or leave the row out.")
            if key in (config.messages_key, config.conversations_key):
                self._reader.read(row[key], key, where)  # raises with the required form
            if key == config.completion_key:
                self.answered(key, "completion_key")
            self._text(row[key], key, what="text" if key == config.text_key else "answer")
        columns = ", ".join(short(name) for name in list(row)[:20]) or "none"
        if config.chosen_key in row and config.rejected_key in row:
            raise BadRow(
                "pairs",
                f"{where}: it has '{config.chosen_key}' and '{config.rejected_key}', two answers to compare: take "
                "pipeline `preference` or `reward_model`, or set completion_key to the one to imitate.",
            )
        if row.says(config.prompt_key) and config.completion_key is not None:
            column(row, config.completion_key, where, "completion_key")  # raises with the missing column
        raise BadRow(
            "missing column",
            f"{where}: no column has the text to train on. It has: {columns}. A row has `messages`, or `prompt` and "
            "`completion`, or `text`: set messages_key, completion_key or text_key to its name.",
        )
