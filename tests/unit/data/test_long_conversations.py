"""Masks of long conversations: found piece by piece, they are those that every prompt's own rendering gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from unit.data.training_templates import tokenizers_of

from roll.data import ChatRenderer, turn_pieces
from roll.data.templates import ChatTemplate
from roll.data.turn_pieces import MIN_MESSAGES, compute_common_prefix
from roll.errors import DataError
from roll.models import load_tokenizer
from roll.types import Message

MakeChat = Callable[[], list[Message]]
"""Makes a conversation."""


@pytest.fixture(scope="module")
def tokenizers(tiny_model: Path) -> dict[str, PreTrainedTokenizerBase]:
    return tokenizers_of(tiny_model)


def assistant(content: str, **fields: Any) -> Message:
    return Message.from_dict({"role": "assistant", "content": content, **fields})


def said(i: int) -> str:
    return f"{i} {'word ' * random.Random(i).randint(0, 9)}"


def asked(i: int) -> Message:
    return Message(role="user", content=f"Question {said(i)}?")


def called(i: int, **fields: Any) -> list[Message]:
    """Return a call of a tool, and what the tool says."""
    name = f"{i:09}"
    call = {"id": name, "type": "function", "function": {"name": "add", "arguments": {"a": i, "b": 2}}}
    return [
        assistant("", tool_calls=[call], **fields),
        Message(role="tool", content=said(i), tool_call_id=name, name="add"),
    ]


def questions(n: int) -> list[Message]:
    return [message for i in range(n // 2) for message in (asked(i), assistant(f"Answer {said(i)}."))]


def thoughts() -> list[Message]:
    chat = questions(70)
    return [replace(m, reasoning=f"Thought {said(i)}.") if m.role == "assistant" else m for i, m in enumerate(chat)]


def spelt_thoughts() -> list[Message]:
    chat = questions(70)
    return [
        replace(m, content=f"<think>\nThought {i}.\n</think>\n\n{m.text}") if m.role == "assistant" else m
        for i, m in enumerate(chat)
    ]


def agent() -> list[Message]:
    calls = [message for i in range(33) for message in called(i)]
    return [Message(role="system", content="Be brief."), asked(0), *calls, assistant("Done.")]


def thinking_agent() -> list[Message]:
    calls = [message for i in range(33) for message in called(i, reasoning_content=f"Thought {said(i)}.")]
    return [asked(0), *calls, assistant("Done.", reasoning_content="All is done.")]


def mixed() -> list[Message]:
    chat: list[Message] = []
    for i in range(11):
        chat += [
            asked(i),
            *called(i, reasoning_content=f"Thought {i}."),
            *called(i + 100),
            assistant(f"It is {said(i)}."),
        ]
    return chat


def answers_in_a_row() -> list[Message]:
    return [m for i in range(23) for m in (asked(i), assistant(said(i)), assistant("Indeed."))]


SHAPES: dict[str, MakeChat] = {
    "questions": lambda: questions(70),
    "behind a system prompt": lambda: [Message(role="system", content="Be brief."), *questions(70)],
    "thoughts": thoughts,
    "spelt thoughts": spelt_thoughts,
    "agent": agent,
    "thinking agent": thinking_agent,
    "mixed": mixed,
    "answers in a row": answers_in_a_row,
}


SOME = ("deepseekv3", "diffusion_gemma", "glm4moe", "gptoss", "muse_glimmer", "phi3", "qwen2_5", "qwen3", "qwen3_6")
"""Templates of different kinds."""


def outcome(tokenizer: PreTrainedTokenizerBase, chat: Sequence[Message], **given: Any) -> tuple[Any, ...]:
    """Return the ids and the mask, or what is refused."""
    try:
        ids, mask = ChatRenderer(tokenizer).tokenize_conversation(chat, **given)
    except DataError as error:
        return (str(error),)
    return ids.tolist(), np.flatnonzero(mask).tolist()


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.integration
def test_conversation_long_masks_of_long_conversations_are_those_of_every_prompts_own_rendering(
    tokenizers: dict[str, PreTrainedTokenizerBase], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = SHAPES[shape]()
    assert len(chat) >= MIN_MESSAGES
    for name, tokenizer in tokenizers.items():
        if shape not in ("mixed", "questions") and name not in SOME:
            continue
        found = outcome(tokenizer, chat)
        with monkeypatch.context() as patched:
            patched.setattr(turn_pieces, "MIN_MESSAGES", 10**9)
            assert found == outcome(tokenizer, chat), name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, "questions") for name in ("qwen2_5", "qwen3", "llama3", "gptoss", "phi3", "gemma3", "glm4moe")),
        *((name, "agent") for name in ("qwen2_5", "glm4moe", "qwen3_instruct_2507")),
        *((name, "thinking agent") for name in ("qwen3", "qwen3_6", "glm4moe")),
        *((name, "thoughts") for name in ("qwen3", "glm4moe")),
    ],
)
def test_conversation_long_masks_of_long_conversations_take_time_that_grows_with_their_length(
    tokenizers: dict[str, PreTrainedTokenizerBase], name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering every prompt of n messages would render n² / 2 of them: 300 times each of 600."""
    rendered = 0
    render = ChatTemplate._render

    def counting(self: ChatTemplate, messages: Sequence[Message], *given: Any) -> str:
        nonlocal rendered
        rendered += len(messages)
        return render(self, messages, *given)

    monkeypatch.setattr(ChatTemplate, "_render", counting)
    chat = questions(600) if shape == "questions" else SHAPES[shape]()
    ChatRenderer(tokenizers[name]).tokenize_conversation(chat)
    assert rendered < 45 * len(chat)


COUNTING = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}EACH{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nASKING{% endif %}"
)
LATE = "{% if loop.index > 50 and m.role == 'assistant' %}late {% endif %}"


@pytest.mark.parametrize(
    ("each", "asking"),
    [
        ("{{ loop.index }} ", "{{ messages | length + 1 }} "),
        ("{{ loop.index % 7 }} ", "{{ (messages | length + 1) % 7 }} "),
        ("{% if messages | length > 41 and loop.index < 9 %}old {% endif %}", ""),
        ("{% if messages | length > 60 and m.role == 'user' %}late {% endif %}", ""),
        (LATE, ""),
        (LATE, "{% if messages | length >= 50 %}late {% endif %}"),
        ("{% if m.role == 'assistant' and messages[0].content in m.content %}same {% endif %}", ""),
    ],
)
def test_conversation_long_masks_of_long_conversations_of_templates_that_look_far_back(
    tiny_model: Path, each: str, asking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = COUNTING.replace("EACH", each).replace("ASKING", asking)
    chat = questions(70)
    found = outcome(tokenizer, chat)
    monkeypatch.setattr(turn_pieces, "MIN_MESSAGES", 10**9)
    assert found == outcome(tokenizer, chat)


def test_conversation_long_masks_of_long_conversations_leave_out_what_is_not_to_be_trained(
    tokenizers: dict[str, PreTrainedTokenizerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = questions(70)
    given = {"num_prompt_messages": 31, "untrained_messages": {35, 61, 69}}
    found = outcome(tokenizers["qwen3"], chat, **given)
    monkeypatch.setattr(turn_pieces, "MIN_MESSAGES", 10**9)
    assert found == outcome(tokenizers["qwen3"], chat, **given)


@pytest.mark.parametrize(
    ("one", "other", "length"), [("", "", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("ab", "abc", 2), ("x", "y", 0)]
)
def test_conversation_long_the_common_beginning_of_two_texts(one: str, other: str, length: int) -> None:
    assert compute_common_prefix(one, other) == length
    assert compute_common_prefix("é" * 999 + one, "é" * 999 + other) == 999 + length
