"""Reasoning and calls of tools in a model's own format, told apart by the endpoint."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from worlds.agents import Speaker, opened

from roll.agents.session import Answer
from roll.data import ChatRenderer
from roll.models import load_tokenizer
from roll.types import Message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
SPECIAL = {
    "gptoss": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    "gemma4": ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool>"),
    "glm4moe": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    "qwen3_5_think": (),
}


def renderer_of(model: Path, template: str) -> ChatRenderer:
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps models' chat templates")
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[template])})
    directory = Path(package.origin).parent / "chat_templates"
    tokenizer.chat_template = (directory / f"{template}.jinja").read_text(encoding="utf-8")
    return ChatRenderer(tokenizer)


async def answer_of_model(renderer: ChatRenderer, said: str, tools: list[dict[str, Any]]) -> Answer:
    async with opened(Speaker(renderer, [said])) as (_, session):
        context = renderer.render([Message(role="user", content="?")], tools)
        [answer] = await session.generate_answers(context, tools=tools)
        return answer


ANALYSIS = "<|channel|>analysis<|message|>Look around?<|end|><|start|>assistant"
CASES = [
    # template, what the model writes, reasoning, text, calls
    ("gptoss", f"{ANALYSIS}<|channel|>final<|message|>Nothing.", "Look around?", "Nothing.", []),
    (
        "gptoss",
        f'{ANALYSIS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{"at": "a", "n": 2}}<|call|>',
        "Look around?",
        "",
        [{"at": "a", "n": 2}],
    ),
    ("gemma4", "<|channel>thought\nHm.\n<channel|>Nothing.", "Hm.", "Nothing.", []),
    (
        "gemma4",
        '<|channel>thought\nlook?<channel|>So: <|tool_call>call:look{at:<|"|>a<|"|>,n:2}<tool_call|>',
        "look?",
        "So:",
        [{"at": "a", "n": 2}],
    ),
    (
        "glm4moe",
        "\n<think>Hm.</think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "Hm.",
        "",
        [{"at": "a", "n": 2}],
    ),
    ("glm4moe", "\n<think><tool_call>look\n</tool_call></think>\nNo.", "<tool_call>look\n</tool_call>", "No.", []),
    (
        "qwen3_5_think",
        "<tool_call>\n<function=look>\n</function>\n</tool_call>\n</think>\n\nNo.",
        "<tool_call>\n<function=look>\n</function>\n</tool_call>",
        "No.",
        [],
    ),
]


@pytest.mark.parametrize(("template", "said", "reasoning", "text", "calls"), CASES)
async def test_agent_chat_format_model_formats_are_told_apart(
    tiny_model: Path, template: str, said: str, reasoning: str, text: str, calls: list[dict[str, Any]]
) -> None:
    answer = await answer_of_model(renderer_of(tiny_model, template), said, TOOLS)
    assert (answer.reasoning, answer.text) == (reasoning, text)
    assert [(call.name, dict(call.arguments)) for call in answer.tool_calls] == [("look", each) for each in calls]


async def test_agent_chat_format_model_formats_call_nothing_in_a_thought_that_never_ends(tiny_model: Path) -> None:
    """The prompt of this template begins the thought."""
    said = "I could <tool_call>\n<function=look>\n</function>\n</tool_call>"
    answer = await answer_of_model(renderer_of(tiny_model, "qwen3_5_think"), said, TOOLS)
    assert (answer.reasoning, answer.text, answer.tool_calls) == ("", said, ())
