"""Columns of a row other than its messages: a system message, tools, earlier turns, arguments of the chat template."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.config.sources import ConversationColumns
from roll.data.cells import ArrowRow, BadRow, Row, as_list
from roll.data.conversations.calls import decoded_json, plain_data, read_tools
from roll.data.conversations.fields import IGNORED_COLUMNS, MEDIA, holds_media, is_empty, refuse_unread
from roll.data.conversations.messages import MessageReader, check_text
from roll.errors import short
from roll.types import Message

__all__ = ["RowContext", "RowView", "check_columns", "check_media", "read_context", "with_system"]

_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation"),
        *("max_length", "tokenizer_kwargs", "strftime_now"),
    )
)
"""Arguments of `apply_chat_template` that a row must not set."""


class RowView(Mapping[Any, Any]):
    """A row without the columns that the configuration ignores; records which of the others were read."""

    def __init__(self, row: Row, ignored: Iterable[str] = ()) -> None:
        self._row = row
        self._ignored = frozenset(ignored)
        self.read: set[Any] = set()
        self.drop_nulls = isinstance(row, ArrowRow)
        """See `roll.data.conversations.calls.function_call`."""

    def __getitem__(self, name: Any) -> Any:
        if name in self._ignored:
            raise KeyError(name)
        value = self._row[name]
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._row and name not in self._ignored

    def __iter__(self) -> Iterator[Any]:
        return (name for name in self._row if name not in self._ignored)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def says(self, name: str | None) -> bool:
        """Return whether a column has a value, without marking it as read."""
        return name is not None and name in self and not is_empty(self._row[name])

    def peek(self, name: Any) -> Any:
        """Return a column's value, without marking it as read."""
        return self._row[name]

    @property
    def unread(self) -> list[Any]:
        """Columns that have a value, and were not read."""
        return [name for name in self if name not in self.read and not is_empty(self._row[name])]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """The parts of a row that apply to all of its messages."""

    system: str | None = None
    history: tuple[Message, ...] = ()
    """Turns before the question, which are context."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @property
    def is_empty(self) -> bool:
        """Whether the row has none of these parts."""
        return not (self.system or self.history or self.tools or self.template_kwargs)

    def refuse_with_text(self, where: str) -> None:
        """Reject parts that a plain text cannot have.

        Raises:
            BadRow: The row has such a part.
        """
        if not self.is_empty:
            raise BadRow(
                "text with a system message or tools",
                f"{where}: a plain text is trained on as it is, and has no place for the row's system message, tools, "
                "history or arguments of the chat template: give `messages`, or write them into the text.",
            )


def read_context(row: RowView, config: ConversationColumns, where: str) -> RowContext:
    """Return the parts of a row other than its messages.

    Raises:
        BadRow: A column is of another type.
    """
    return RowContext(
        system=_system(row, config, where),
        history=_history(row, config, where),
        tools=_tools(row, config, where),
        template_kwargs=_template_kwargs(row, config, where),
    )


def with_system(
    messages: tuple[Message, ...], context: RowContext, config: ConversationColumns, where: str
) -> tuple[Message, ...]:
    """Return the messages behind the row's system message, or the configuration's if the row has none.

    Raises:
        BadRow: The row has two system messages.
    """
    own = messages[0].text if messages[0].role == "system" else None
    if own is not None and context.system is not None and own.strip() != context.system.strip():
        raise BadRow(
            "two system messages",
            f"{where}: its messages begin with a system message, and a column has another one ({short(context.system)})"
            ": keep one.",
        )
    system = context.system or config.system_prompt
    if own is not None or not system:
        return messages
    return (Message(role="system", content=system), *messages)


def check_columns(row: RowView, config: ConversationColumns, known: Collection[str], where: str) -> None:
    """Check that every column with a value was read, or may be ignored.

    Args:
        row: The row, after all reading.
        config: The configuration, whose keys name columns; a null key leaves its default column unread.
        known: Columns that are read in other rows.
        where: The row's place, for messages.

    Raises:
        BadRow: A column was not read.
    """
    left = [name for name in row.unread if name not in IGNORED_COLUMNS]
    if not left:
        return
    off = {
        option.default
        for name, option in type(config).model_fields.items()
        if name.endswith("_key") and getattr(config, name) is None
    }
    if left := [name for name in left if name not in off]:
        refuse_unread(left, "column", {*known, *_system_keys(config)}, where)


def check_media(row: RowView, where: str) -> None:
    """Check that a prompt has no images, audio or video, since its other columns are only for the rewards.

    Raises:
        BadRow: The prompt has media.
    """
    left = [name for name in row.unread if str(name).lower() in MEDIA or holds_media(as_list(row.peek(name)))]
    if left:
        refuse_unread(left, "column", (), where, media=True)


def _system(row: RowView, config: ConversationColumns, where: str) -> str | None:
    found: dict[str, str] = {}
    for name in _system_keys(config):
        if not row.says(name):
            continue
        value = row[name]
        if not isinstance(value, str):
            raise BadRow(
                "wrong type",
                f"{where}: column '{name}' must be the text of a system message, got {short(value)}. Where it is "
                "something else, set system_key to null or to another column.",
            )
        check_text(value, name, where)
        found[name] = value
    if len(set(found.values())) > 1:
        raise BadRow("two system messages", f"{where}: the columns {' and '.join(found)} differ: keep one.")
    return next(iter(found.values()), None)


def _system_keys(config: ConversationColumns) -> list[str]:
    """Return the columns that may have a system message; `system_prompt` too, if no other one is configured."""
    if config.system_key is None:
        return []
    is_default = config.system_key == type(config).model_fields["system_key"].default
    return [config.system_key, "system_prompt"] if is_default else [config.system_key]


def _history(row: RowView, config: ConversationColumns, where: str) -> tuple[Message, ...]:
    name = config.history_key
    if name is None or not row.says(name):
        return ()
    value = as_list(row[name])
    value = decoded_json(value, f"column '{name}'", where) if isinstance(value, str) else value
    hint = f"Where column '{name}' is something else, set history_key to null or to another column."
    if not isinstance(value, list | tuple):
        raise BadRow(
            "wrong type", f"{where}: column '{name}' must be a list of earlier turns, got {short(value)}. {hint}"
        )
    first = as_list(value[0])
    if isinstance(first, Mapping):
        reader = MessageReader(drop_nulls=row.drop_nulls)
        return reader.read(value, name, where).as_context(where)
    messages: list[Message] = []
    for turn in map(as_list, value):
        pair = list(turn) if isinstance(turn, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(said, str) for said in pair):
            raise BadRow(
                "wrong type",
                f"{where}: column '{name}' must be a list of [question, answer], got {short(turn)}. {hint}",
            )
        for said in pair:
            check_text(said, name, where)
        messages.append(Message(role="user", content=pair[0]))
        messages.append(Message(role="assistant", content=pair[1]))
    return tuple(messages)


def _tools(row: RowView, config: ConversationColumns, where: str) -> tuple[dict[str, Any], ...]:
    name = config.tools_key
    if name is None or not row.says(name):
        return ()
    try:
        return read_tools(row[name], where, drop_nulls=row.drop_nulls)
    except BadRow as error:
        hint = f"Where column '{name}' is something else, set tools_key to null or to another column."
        raise BadRow(error.reason, f"{error} {hint}") from None


def _template_kwargs(row: RowView, config: ConversationColumns, where: str) -> dict[str, Any]:
    name = config.template_kwargs_key
    if name is None or not row.says(name):
        return {}
    value = row[name]
    value = decoded_json(value, f"column '{name}'", where) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{where}: column '{name}' must be an object, got {short(value)}.")
    found = plain_data(value, f"column '{name}'", where, drop_nulls=row.drop_nulls)
    reserved = next((key for key in found if key in _RESERVED or not key.isidentifier()), None)
    if reserved is not None:
        raise BadRow(
            "argument of the chat template",
            f"{where}: column '{name}' gives {short(reserved)}, which a row cannot choose: remove it.",
        )
    return found
