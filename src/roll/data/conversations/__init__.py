"""The reader of conversations, for rows of every pipeline, in any of the known formats."""

from roll.data.conversations.asking import messages_of, prompt_of_text, with_prompt_template
from roll.data.conversations.columns import RowContext, RowView, check_columns, check_media, read_context, with_system
from roll.data.conversations.dialogs import dialog_messages
from roll.data.conversations.messages import MessageReader, ReadMessages, check_order

__all__ = [
    "MessageReader",
    "ReadMessages",
    "RowContext",
    "RowView",
    "check_columns",
    "check_media",
    "check_order",
    "dialog_messages",
    "messages_of",
    "prompt_of_text",
    "read_context",
    "with_prompt_template",
    "with_system",
]
