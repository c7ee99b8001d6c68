"""Reads conversations in all supported formats from the rows of data sets."""

from roll.data.conversations.columns import (
    RowContext,
    RowView,
    check_columns,
    check_media,
    list_media_columns,
    prepend_system_message,
    read_context,
    read_media,
)
from roll.data.conversations.dialogs import parse_dialog
from roll.data.conversations.messages import MessageReader, ParsedMessages, check_order
from roll.data.conversations.prompt_text import apply_prompt_template, build_messages, parse_prompt_text

__all__ = [
    "MessageReader",
    "ParsedMessages",
    "RowContext",
    "RowView",
    "apply_prompt_template",
    "build_messages",
    "check_columns",
    "check_media",
    "check_order",
    "list_media_columns",
    "parse_dialog",
    "parse_prompt_text",
    "prepend_system_message",
    "read_context",
    "read_media",
]
