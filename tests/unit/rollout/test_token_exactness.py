"""Whatever template and history: what is trained is what the engine saw and wrote, once, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds.episodes import SUMMARY_TOKENS, Engine, Script, check_exact, run_episode
from worlds.published_templates import PUBLISHED, published_tokenizer

from roll.data import ChatRenderer
from roll.types import History, Message

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)
HISTORIES = (
    History(),
    History(kind="window", turns=1),
    History(kind="window", turns=2, keep_task=False),
    History(kind="thinking_stripped"),
    History(kind="stepwise"),
    History(kind="stepwise", keep_task=False),
    History(kind="summary", summary_tokens=SUMMARY_TOKENS, summary_request="Sum up."),
    History(kind="summary", summary_tokens=SUMMARY_TOKENS, summary_request="Sum up.", train_summary=False),
)
WORDS = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "7",
        " yes",
        "<think>",
        "so\n</think>\n\n",
        "</think>",
        "é",
        "\u4e2d",
        '<tool_call>\n{"name": "look"}',
    ]
)


@st.composite
def answers(
    draw: st.DrawFn, stops: Sequence[int], others: Sequence[int], spell: Callable[[str], list[int]]
) -> list[int]:
    """Tokens as a model may write them: texts, any tokens in any order, special ones, nothing; then how it ends."""
    parts = draw(
        st.lists(
            st.one_of(
                WORDS.map(spell),
                st.lists(st.integers(0, 49151), max_size=3),
                st.sampled_from(others).map(lambda token: [token]),
            ),
            max_size=4,
        )
    )
    body = [token for part in parts for token in part]
    ending = draw(st.sampled_from(["first", "first", "first", "second", "none"]))
    return [*body, *{"first": stops[:1], "second": stops[1:2], "none": []}[ending]]


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    text = draw(st.sampled_from(["Go on.", "", " spaced \n", "word " * 120, "<tool_response>", "{'a': 1}"]))
    kind = draw(st.sampled_from(["user", "user", "tool", "calls", "calls"]))
    if kind == "user":
        return text, {}
    if kind == "tool":
        return text, {"use_tool": True}
    ids = [f"call0000{i}" for i in range(draw(st.integers(1, 2)))]
    call = {"name": "look", "arguments": {"word": "a"}}
    return text, {
        "tool_calls": [{"id": name, "type": "function", "function": call} for name in ids],
        "tool_results": [{"content": text, "tool_call_id": name, "name": "look"} for name in ids],
    }


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_rollout_token_exactness_what_is_trained_is_what_the_engine_saw_and_wrote(
    default_model: Path, name: str, data: st.DataObject
) -> None:
    tokenizer = published_tokenizer(default_model, name)
    renderer = ChatRenderer(tokenizer)
    special = PUBLISHED[name] or ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    stops = tuple(tokenizer.convert_tokens_to_ids(token) for token in (special[0], special[-1]))
    others = [tokenizer.convert_tokens_to_ids(token) for token in special[1:-1]]
    one = answers(stops, others, lambda text: tokenizer.encode(text, add_special_tokens=False))
    engine = Engine(data.draw(st.lists(one, min_size=1, max_size=6)), stops)
    script = Script(data.draw(st.lists(replies(), min_size=1, max_size=5)))
    tools = data.draw(st.sampled_from([(), TOOLS]))
    prompt = renderer.render([Message(role="user", content="Play.")], tools)
    max_context = data.draw(st.sampled_from([None, len(prompt) + 90, len(prompt) + 300]))
    history = data.draw(st.sampled_from(HISTORIES))
    rollout = run_episode(renderer, engine, script, history, tools=tools, max_context=max_context, min_answer_tokens=8)
    check_exact(rollout, engine, max_context=max_context)
