"""Calls of tools in what models write."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from roll.agents.tool_calls import ToolFormat, detect_tool_format, parse_tool_calls, render_tools_as_text
from roll.types import Message

FORMATS: list[ToolFormat] = ["hermes", "llama3", "mistral", "harmony", "glm", "gemma4", "plain", "none"]


def called(text: str, tool_format: ToolFormat) -> tuple[str, list[tuple[str, object]]]:
    beside, calls = parse_tool_calls(text, tool_format)
    return beside, [(call.name, dict(call.arguments)) for call in calls]


def test_agent_tool_call_hermes_calls_stand_in_tags_and_may_be_several() -> None:
    first = "<tool_call>\n" + '{"name": "a", "arguments": {"x": 1}}' + "\n</tool_call>"
    text = f"Let me see.\n{first}\n" + '<tool_call>{"name":"b"}</tool_call>'
    assert called(text, "hermes") == ("Let me see.", [("a", {"x": 1}), ("b", {})])


def test_agent_tool_call_an_unclosed_call_at_the_end_counts_if_it_is_whole() -> None:
    assert called('<tool_call>{"name": "a", "arguments": {}}', "plain") == ("", [("a", {})])
    assert called('<tool_call>{"name": "a", "argum', "plain") == ('<tool_call>{"name": "a", "argum', [])


def test_agent_tool_call_an_answer_with_a_malformed_call_stays_text() -> None:
    text = '<tool_call>nonsense</tool_call><tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert called(text, "hermes") == (text, [])


def test_agent_tool_call_qwen_coders_tags_are_read_by_the_tools_schema() -> None:
    body = "<function=a>\n<parameter=x>\n1\n</parameter>\n</function>"
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "a", "description": "", "parameters": schema}}
    _, [call] = parse_tool_calls(f"<tool_call>\n{body}\n</tool_call>", "hermes", [tool])
    assert (call.name, dict(call.arguments)) == ("a", {"x": 1})


def test_agent_tool_call_llama_answers_with_objects_alone() -> None:
    assert called('{"name": "a", "parameters": {"x": "1"}}; {"name": "b", "parameters": {}}', "llama3") == (
        "",
        [("a", {"x": "1"}), ("b", {})],
    )
    assert called('<|python_tag|>{"name": "a", "parameters": {}}', "llama3") == ("", [("a", {})])
    assert called('Sure: {"name": "a", "parameters": {}}', "llama3") == ('Sure: {"name": "a", "parameters": {}}', [])


def test_agent_tool_call_mistral_marks_calls_in_two_ways() -> None:
    assert called('[TOOL_CALLS][{"name": "a", "arguments": {"x": 1}}]', "mistral") == ("", [("a", {"x": 1})])
    assert called('Wait.[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}', "mistral") == (
        "Wait.",
        [("a", {"x": 1}), ("b", {})],
    )


def test_agent_tool_call_gpt_oss_calls_are_messages_of_their_own() -> None:
    call = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x": 1}'
    assert called(call, "harmony") == ("", [("a", {"x": 1})])
    thought = "<|channel|>analysis<|message|>to=functions.b<|end|><|start|>assistant"
    assert called(thought + call, "harmony") == ("", [("a", {"x": 1})])
    answer = "<|channel|>final<|message|>Done."
    assert called(answer, "harmony") == (answer, [])


def test_agent_tool_call_glm_calls_have_a_tag_for_each_argument() -> None:
    call = "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert called(f"So.\n{call}\n{call}", "glm") == ("So.", [("a", {"x": "1"}), ("a", {"x": "1"})])


def test_agent_tool_call_gemma_calls_have_arguments_without_quotes() -> None:
    call = '<|tool_call>call:a{x:1,y:<|"|>b<|"|>}<tool_call|>'
    assert called(f"So. {call}", "gemma4") == ("So.", [("a", {"x": 1, "y": "b"})])


@pytest.mark.parametrize(
    "arguments", ["[1]", '"text"', "1", '{"a": 1e999}', '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", "[" * 5000]
)
@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "mistral"])
def test_agent_tool_call_arguments_that_are_no_json_object_make_no_call(
    arguments: str, tool_format: ToolFormat
) -> None:
    body = f'{{"name": "a", "arguments": {arguments}}}'
    text = {"hermes": f"<tool_call>{body}</tool_call>", "llama3": body, "mistral": f"[TOOL_CALLS][{body}]"}[tool_format]
    assert called(text, tool_format) == (text, [])


@pytest.mark.parametrize(
    "piece",
    [
        "<|channel|>",
        "<|message|>",
        "<|tool_call>",
        "<|tool_call>call:a{",
        "<arg_key>",
        "<tool_call>a<arg_key>",
        "<tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "a"}</tool_call>',
        "[TOOL_CALLS]",
        "{",
        "[ARGS]",
    ],
)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_agent_tool_call_hostile_repetition_takes_no_longer_than_reading_it(
    piece: str, tool_format: ToolFormat
) -> None:
    started = time.process_time()
    _, calls = parse_tool_calls(piece * (400_000 // len(piece)), tool_format)
    assert time.process_time() - started < 10
    assert len(calls) <= 128


@given(st.text(alphabet='<tool_cal>/{}[]"name:argumentsTOLCAS,1 \\', max_size=80), st.sampled_from(FORMATS))
def test_agent_tool_call_reading_never_raises_and_says_calls_only_as_json(text: str, tool_format: ToolFormat) -> None:
    beside, calls = parse_tool_calls(text, tool_format)
    assert calls or beside == text
    for call in calls:
        assert json.loads(call.arguments_json) == call.arguments


def test_agent_tool_call_formats_are_known_by_what_a_template_teaches() -> None:
    assert detect_tool_format("{% for m in messages %}{{ m }}{% endfor %}") == "plain"
    assert detect_tool_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect_tool_format("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert detect_tool_format("""{% if tools %}{"name": x, "parameters": y}{% endif %}""") == "llama3"


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("gptoss", "harmony"),
        ("gptoss_training", "harmony"),
        ("glm4moe", "glm"),
        ("glm4moe_training", "glm"),
        ("gemma4", "gemma4"),
        ("gemma4_v5", "gemma4"),
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_5_think", "hermes"),
        ("nemotron_3_nano", "hermes"),
        ("llama3_1", "llama3"),
        ("phi3", "plain"),
        ("gemma3", "plain"),
    ],
)
def test_agent_tool_call_formats_of_published_templates_are_known(template: str, tool_format: str) -> None:
    """The texts are read from the installed TRL."""
    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps models' chat templates")
    directory = Path(package.origin).parent / "chat_templates"
    assert detect_tool_format((directory / f"{template}.jinja").read_text(encoding="utf-8")) == tool_format


def test_agent_tool_call_a_template_without_tools_is_told_of_them_in_words() -> None:
    function = {"name": "a", "arguments": {"x": 1}}
    call = {"id": "1", "type": "function", "function": function}
    messages: list[Message] = [
        Message(role="user", content="go"),
        Message(role="assistant", content="", tool_calls=(call, call)),
        Message(role="tool", content="one"),
        Message(role="tool", content="two"),
    ]
    said = render_tools_as_text(messages, [{"type": "function", "function": {"name": "a"}}])
    assert [message.role for message in said] == ["system", "user", "assistant", "user"]
    assert '"name": "a"' in said[0].text
    assert [(c.name, dict(c.arguments)) for c in parse_tool_calls(said[2].text, "plain")[1]] == [("a", {"x": 1})] * 2
    assert said[3].text.count("<tool_response>") == 2
