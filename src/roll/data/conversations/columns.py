"""Reads the columns of a row other than its messages: system message, tools, earlier turns, template arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.config.sources import ConversationColumns
from roll.data.cells import ArrowRow, BadRow, Row, as_list
from roll.data.conversations.calls import decode_json, read_tools, to_plain_data
from roll.data.conversations.fields import IGNORED_COLUMNS, MEDIA_NAMES, is_empty, is_media, reject_unread
from roll.data.conversations.messages import MessageReader, check_text
from roll.data.media import MediaReader
from roll.errors import shorten
from roll.types import AudioPart, ImagePart, MediaKind, Message, VideoPart, get_content_key

__all__ = [
    "RowContext",
    "RowView",
    "check_columns",
    "check_media",
    "list_media_columns",
    "prepend_system_message",
    "read_context",
    "read_media",
]

_RESERVED_ARGUMENTS = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation"),
        *("max_length", "tokenizer_kwargs", "strftime_now"),
    )
)
"""Arguments of `apply_chat_template` that a row must not set."""


class RowView(Mapping[Any, Any]):
    """A view of a row without the ignored columns; it records which columns were read."""

    def __init__(self, row: Row, ignored: Iterable[str] = (), media: MediaReader | None = None) -> None:
        self._row = row
        self.media = media
        """Reads the row's media; `None` where media are not supported."""
        self._ignored = frozenset(ignored)
        self.read: set[Any] = set()
        self.drop_nulls = isinstance(row, ArrowRow)
        """Whether to leave out null arguments of tool calls, as in `calls.build_function_call`."""

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

    def has_value(self, name: str | None) -> bool:
        """Return whether a column has a value, without marking it as read."""
        return name is not None and name in self and not is_empty(self._row[name])

    def peek(self, name: Any) -> Any:
        """Return a column's value, without marking it as read."""
        return self._row[name]

    def list_unread_columns(self) -> list[Any]:
        """Return the columns that have a value but were not read."""
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
        """True if the row has no system message, history, tools or arguments of the chat template."""
        return not (self.system or self.history or self.tools or self.template_kwargs)

    def check_empty(self, location: str) -> None:
        """Check that a row of plain text has no system message, tools, history or template arguments.

        Raises:
            BadRow: The row has a system message, tools, history or template arguments.
        """
        if not self.is_empty:
            raise BadRow(
                "text with a system message or tools",
                f"{location}: a row with plain text must not have a system message, tools, history or chat template "
                "arguments, because the text is not rendered: write them into the text, or provide `messages` instead.",
            )


def read_context(row: RowView, config: ConversationColumns, location: str) -> RowContext:
    """Read the parts of a row other than its messages.

    Raises:
        BadRow: A column has a wrong type.
    """
    return RowContext(
        system=_read_system(row, config, location),
        history=_read_history(row, config, location),
        tools=_read_tools_column(row, config, location),
        template_kwargs=_read_template_kwargs(row, config, location),
    )


def prepend_system_message(
    messages: tuple[Message, ...], context: RowContext, config: ConversationColumns, location: str
) -> tuple[Message, ...]:
    """Prepend the row's system message, or the configuration's system message if the row has none.

    Raises:
        BadRow: The row has two system messages.
    """
    first = get_content_key(messages[0].content) if messages[0].role == "system" else None
    if first is not None and context.system is not None and first.strip() != context.system.strip():
        raise BadRow(
            "two system messages",
            f"{location}: the messages begin with a system message, but a column has a different one "
            f"({shorten(context.system)}): keep one.",
        )
    system = context.system or config.system_prompt
    if first is not None or not system:
        return messages
    return (Message(role="system", content=system), *messages)


def check_columns(row: RowView, config: ConversationColumns, known: Collection[str], location: str) -> None:
    """Raise an error if a non-empty column of the row was neither read nor ignored.

    Args:
        row: The row, after all known columns have been read.
        config: The names of the columns; if a name is null, its default column is ignored.
        known: Names of columns that are read in other rows.
        location: The row's location, for messages.

    Raises:
        BadRow: A non-empty column was neither read nor ignored.
    """
    left = [name for name in row.list_unread_columns() if name not in IGNORED_COLUMNS]
    if not left:
        return
    # A key that is set to null means that its default column holds something else, so that column is ignored.
    off = {
        option.default
        for name, option in type(config).model_fields.items()
        if name.endswith("_key") and getattr(config, name) is None
    }
    if left := [name for name in left if name not in off]:
        has_media = not _list_media_keys(config).isdisjoint(left)
        reject_unread(left, "column", {*known, *_list_system_keys(config)}, location, media=has_media)


def list_media_columns(row: RowView, config: ConversationColumns) -> dict[MediaKind, list[str]]:
    """Return the row's media columns by kind; the columns may be empty."""
    keys: dict[MediaKind, str | None] = {
        "image": config.images_key,
        "audio": config.audios_key,
        "video": config.videos_key,
    }
    found = {
        kind: [name for name in ([key, kind] if key == f"{kind}s" else [key]) if name is not None and name in row]
        for kind, key in keys.items()
    }
    return {kind: names for kind, names in found.items() if names}


def read_media(
    row: RowView, config: ConversationColumns, location: str
) -> tuple[ImagePart | AudioPart | VideoPart, ...]:
    """Return the media of the row's columns, in order; empty if there are none or media is not supported.

    Raises:
        BadRow: An image, audio or video cannot be read.
    """
    if row.media is None:
        return ()
    found: list[ImagePart | AudioPart | VideoPart] = []
    for kind, names in list_media_columns(row, config).items():
        for name in filter(row.has_value, names):
            value = as_list(row[name])
            is_list = isinstance(value, list | tuple)
            if kind == "image" and is_list and value and isinstance(value[0], list | int | float):
                is_list = False  # the rows of one image
            for number, one in enumerate(value if is_list else [value], 1):
                found.append(row.media.read(one, f"{location}, {kind} {number} of column '{name}'", kind))
    return tuple(found)


def check_media(row: RowView, config: ConversationColumns, location: str) -> None:
    """Check that no unread column of a prompt has images, audio or video.

    Raises:
        BadRow: The prompt has media.
    """
    names = MEDIA_NAMES | _list_media_keys(config)
    left = [
        name
        for name in row.list_unread_columns()
        if name in names or str(name).lower() in names or is_media(as_list(row.peek(name)))
    ]
    if left:
        reject_unread(left, "column", (), location, media=True)


def _list_media_keys(config: ConversationColumns) -> set[str]:
    """List the names of the columns of images, audio and video."""
    return {name for name in (config.images_key, config.audios_key, config.videos_key) if name is not None}


def _read_system(row: RowView, config: ConversationColumns, location: str) -> str | None:
    texts: dict[str, str] = {}
    for name in _list_system_keys(config):
        if not row.has_value(name):
            continue
        value = row[name]
        if not isinstance(value, str):
            raise BadRow(
                "wrong type",
                f"{location}: column '{name}' must be the text of a system message, got {shorten(value)}. If the "
                "column has another meaning, set system_key to null or to another column.",
            )
        check_text(value, name, location)
        texts[name] = value
    if len(set(texts.values())) > 1:
        raise BadRow(
            "two system messages",
            f"{location}: the system messages in the columns {' and '.join(texts)} differ: keep one.",
        )
    return next(iter(texts.values()), None)


def _list_system_keys(config: ConversationColumns) -> list[str]:
    """List the columns of system messages: `system_key` and, if this key has its default, `system_prompt`."""
    if config.system_key is None:
        return []
    is_default = config.system_key == type(config).model_fields["system_key"].default
    return [config.system_key, "system_prompt"] if is_default else [config.system_key]


def _read_history(row: RowView, config: ConversationColumns, location: str) -> tuple[Message, ...]:
    name = config.history_key
    if name is None or not row.has_value(name):
        return ()
    value = as_list(row[name])
    value = decode_json(value, f"column '{name}'", location) if isinstance(value, str) else value
    hint = f"If column '{name}' has another meaning, set history_key to null or to another column."
    if not isinstance(value, list | tuple):
        raise BadRow(
            "wrong type",
            f"{location}: column '{name}' must be a list of earlier turns, got {shorten(value)}. {hint}",
        )
    first = as_list(value[0])
    if isinstance(first, Mapping):
        reader = MessageReader(drop_nulls=row.drop_nulls, media=row.media)
        return reader.read(value, name, location).as_context(location)
    messages: list[Message] = []
    for turn in map(as_list, value):
        pair = list(turn) if isinstance(turn, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(
                "wrong type",
                f"{location}: column '{name}' must be a list of [question, answer], got {shorten(turn)}. {hint}",
            )
        for text in pair:
            check_text(text, name, location)
        messages.append(Message(role="user", content=pair[0]))
        messages.append(Message(role="assistant", content=pair[1]))
    return tuple(messages)


def _read_tools_column(row: RowView, config: ConversationColumns, location: str) -> tuple[dict[str, Any], ...]:
    name = config.tools_key
    if name is None or not row.has_value(name):
        return ()
    try:
        return read_tools(row[name], location, drop_nulls=row.drop_nulls)
    except BadRow as error:
        hint = f"If column '{name}' has another meaning, set tools_key to null or to another column."
        raise BadRow(error.reason, f"{error} {hint}") from None


def _read_template_kwargs(row: RowView, config: ConversationColumns, location: str) -> dict[str, Any]:
    name = config.template_kwargs_key
    if name is None or not row.has_value(name):
        return {}
    value = row[name]
    value = decode_json(value, f"column '{name}'", location) if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise BadRow("wrong type", f"{location}: column '{name}' must be an object, got {shorten(value)}.")
    found = to_plain_data(value, f"column '{name}'", location, drop_nulls=row.drop_nulls)
    reserved = next((key for key in found if key in _RESERVED_ARGUMENTS or not key.isidentifier()), None)
    if reserved is not None:
        raise BadRow(
            "argument of the chat template",
            f"{location}: column '{name}' sets {shorten(reserved)}, a reserved argument of the chat template: "
            "remove it.",
        )
    return found
