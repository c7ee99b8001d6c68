"""By what an answer is known again."""

from __future__ import annotations

from typing import Any

import pytest

from roll.agents.contexts import Conversation
from roll.agents.wire import build_chat_message, build_function_call

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}]


def digest(
    *, said: str = "so", call: str = "look", given: str = '{"a": 1}', reply_to: str = "x", call_id: str = "x",
    tools: list[dict[str, Any]] = TOOLS,
) -> bytes:  # fmt: skip
    messages = [
        build_chat_message("user", "a"),
        build_chat_message("assistant", said, tool_calls=[build_function_call(call_id, call, given)]),
        build_chat_message("tool", "found", tool_call_id=reply_to),
    ]
    return Conversation(messages=messages, tools=tools).compute_digest_with(build_chat_message("assistant", "done"))


@pytest.mark.parametrize(
    "change", [{"said": "no"}, {"call": "go"}, {"given": '{"a": 2}'}, {"reply_to": "y"}, {"tools": []}]
)
def test_agent_context_a_changed_history_is_another_one(change: dict[str, Any]) -> None:
    assert digest(**change) != digest()


@pytest.mark.parametrize("same", [{"said": " so\n"}, {"given": '{ "a":1 }'}, {"call_id": "y"}])
def test_agent_context_what_a_client_may_write_otherwise_does_not_count(same: dict[str, Any]) -> None:
    assert digest(**same) == digest()
