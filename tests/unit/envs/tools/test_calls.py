"""Calls in text: every form reads what it writes, and hostile text costs little and raises nothing."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.tools import TOOL_CALL_FORMATS, ToolCall, ToolResult
from roll.envs.tools.calls import MAX_CALLS, get_tool_call_format
from roll.envs.tools.json_text import MalformedJsonError, read_json


class Named:
    def __init__(self, name: str, **properties: dict[str, object]) -> None:
        self.name, self.description = name, f"Does {name}."
        self.parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}

    def call(self, arguments: object, /) -> str:
        return ""


TEXT, COUNT = {"type": "string"}, {"type": "integer"}
TOOLS = {
    tool.name: tool for tool in (Named("search", query=TEXT, top=COUNT), Named("python", code=TEXT), Named("today"))
}


def calls_in(form: str, text: str) -> list[tuple[str, dict[str, object]]]:
    found = TOOL_CALL_FORMATS[form].parse(text, TOOLS)
    assert not found.problems, found.problems
    return [(call.name, dict(call.arguments)) for call in found.calls]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("xml", "Let me <search>capital of France</search> now", [("search", {"query": "capital of France"})]),
        ("xml", "<search><query>a < b</query><top>3</top></search>", [("search", {"query": "a < b", "top": 3})]),
        ("xml", "```python\nprint('</x>')\n```", [("python", {"code": "print('</x>')"})]),
        ("xml", "<today></today><python>1</python>", [("today", {}), ("python", {"code": "1"})]),
        ("json", '{"name": "search", "arguments": {"query": "x"}}', [("search", {"query": "x"})]),
        ("json", 'So:\n```json\n{"name": "today", "arguments": {}}\n```', [("today", {})]),
        (
            "json",
            '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "search", '
            '"arguments": "{\\"query\\": \\"x\\"}"}}]}',
            [("search", {"query": "x"})],
        ),
        ("json", '{"answer": 42}', []),
        (
            "hermes",
            '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>',
            [("search", {"query": "x"})],
        ),
        ("hermes", '<tool_call>{"name": "today", "arguments": {}}', [("today", {})]),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"query": "</tool_call>"}}</tool_call>',
            [("search", {"query": "</tool_call>"})],
        ),
        (
            "hermes",
            "<tool_call>\n<function=search>\n<parameter=query>\ntwo\nlines\n</parameter>\n<parameter=top>\n5\n"
            "</parameter>\n</function>\n</tool_call>",
            [("search", {"query": "two\nlines", "top": 5})],
        ),
        ("llama", '{"name": "search", "parameters": {"query": "x"}}<|eom_id|>', [("search", {"query": "x"})]),
        (
            "llama",
            '{"name": "today", "parameters": {}}; {"name": "search", "parameters": {"query": "y"}}',
            [("today", {}), ("search", {"query": "y"})],
        ),
        ("llama", '<|python_tag|>search.call(query="x, y", top=2)', [("search", {"query": "x, y", "top": 2})]),
        ("llama", "<|python_tag|>print(1)", [("python", {"code": "print(1)"})]),
        ("llama", '{"temperature": 3}', []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "x"}, "id": "a1"}]',
            [("search", {"query": "x"})],
        ),
        (
            "mistral",
            '[TOOL_CALLS]search[ARGS]{"query": "x"}[TOOL_CALLS]today[ARGS]{}',
            [("search", {"query": "x"}), ("today", {})],
        ),
        ("mistral", 'search{"query": "x"}', [("search", {"query": "x"})]),
        ("mistral", '[{"name": "today", "arguments": {}}]', [("today", {})]),
        ("mistral", "[1, 2]", []),
        (
            "glm",
            "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</tool_call>b</arg_value>\n<arg_key>top</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
            [("search", {"query": "a</tool_call>b", "top": 3})],
        ),
        ("glm", "So:\n<tool_call>today\n</tool_call>\n<tool_call>today</tool_call>", [("today", {}), ("today", {})]),
        (
            "glm",
            "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value>",
            [("search", {"query": "x"})],
        ),
        (
            "glm",
            "<tool_call>search<arg_key>query</arg_key><arg_value>7</arg_value></tool_call>",
            [("search", {"query": "7"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:search{query:<|"|>a, {b}: c<|"|>,top:3}<tool_call|>',
            [("search", {"query": "a, {b}: c", "top": 3})],
        ),
        ("gemma4", "<|tool_call>call:today{}<tool_call|><|tool_call>call:today{}", [("today", {}), ("today", {})]),
        (
            "gemma4",
            '<|tool_call>call:other{a:[1,<|"|>x<|"|>,{b:true}],c:{<|"|>d e<|"|>:null,f:-1.5e3},g:word}<tool_call|>',
            [("other", {"a": [1, "x", {"b": True}], "c": {"d e": None, "f": -1500.0}, "g": "word"})],
        ),
        ("gemma4", "<|tool_call>call:search{query:7}<tool_call|>", [("search", {"query": "7"})]),
        (
            "harmony",
            '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}<|call|>',
            [("search", {"query": "x"})],
        ),
        (
            "harmony",
            ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}',
            [("search", {"query": "x"})],
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>I call to=functions.search now.<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.today <|constrain|>json<|message|>{}<|call|>",
            [("today", {})],
        ),
        (
            "harmony",
            "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            [("python", {"code": "print(1)"})],
        ),
        (
            "harmony",
            'analysisHm.assistantcommentary to=functions.search json{"query": "x"}',
            [("search", {"query": "x"})],
        ),
    ],
)
def test_tool_call_a_form_reads_what_its_models_write(form: str, text: str, expected: list[object]) -> None:
    assert calls_in(form, text) == expected
    if expected or form == "json":
        assert calls_in("auto", text) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("xml", "<search>never closed"),
        ("json", '{"name": "search", "arguments": {"query": }'),
        ("hermes", "<tool_call>{'name': 'search'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search"} and more</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"top": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"top": ' + "9" * 5000 + "}}</tool_call>"),
        ("llama", '<|python_tag|>{"name": "search", "parameters": '),
        ("llama", '<|python_tag|>search.call(query="x"'),
        ("mistral", "[TOOL_CALLS] hello"),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": '),
        ("glm", "<tool_call>search<arg_key>query</arg_key><arg_value>x</tool_call>"),
        ("glm", "<tool_call>search<arg_key>query</tool_call>"),
        ("glm", "<tool_call>search<arg_key>query</arg_key>x</tool_call>"),
        ("glm", "<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value> so </tool_call>"),
        ("gemma4", "<|tool_call>search{}<tool_call|>"),
        ("gemma4", '<|tool_call>call:search{query:<|"|>x}<tool_call|>'),
        ("gemma4", "<|tool_call>call:search{query:}<tool_call|>"),
        ("gemma4", "<|tool_call>call:search{query}<tool_call|>"),
        ("gemma4", "<|tool_call>call:search{query:1 top:2}<tool_call|>"),
        ("gemma4", "<|tool_call>call:search{a:" + "[" * 5000),
        ("gemma4", '<|tool_call>call:search{a:<|"|>\ud800<|"|>}<tool_call|>'),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>{'query': 1}<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>[1]<|call|>"),
        ("harmony", '<|channel|>commentary to=functions.search<|message|>{"a": 1} {"b": 2}<|call|>'),
    ],
)
def test_tool_call_a_malformed_call_becomes_one_sentence(form: str, text: str) -> None:
    for name in (form, "auto"):
        found = TOOL_CALL_FORMATS[name].parse(text, TOOLS)
        assert not found.calls
        assert len(found.problems) == 1
        assert len(found.problems[0]) < 200


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), VALUES, max_size=3)
NAMES = st.sampled_from(["search", "other_tool"])
CALLS = st.lists(st.builds(ToolCall, name=NAMES, arguments=ARGUMENTS), min_size=1, max_size=4)


@pytest.mark.parametrize("form", ["json", "hermes", "llama", "mistral", "harmony", "gemma4"])
@settings(max_examples=25)
@given(calls=CALLS)
def test_tool_call_what_a_form_writes_it_reads_as_the_same_calls(form: str, calls: list[ToolCall]) -> None:
    found = TOOL_CALL_FORMATS[form].parse(TOOL_CALL_FORMATS[form].render(calls), TOOLS)
    assert [(call.name, dict(call.arguments)) for call in found.calls] == [(c.name, dict(c.arguments)) for c in calls]


def test_tool_call_glm_writes_texts_bare_and_reads_them_by_the_tools_schema() -> None:
    calls = [
        ToolCall(name="search", arguments={"query": '{"a": 1}\n</tool_call>', "top": 2}),
        ToolCall(name="today", arguments={}),
    ]
    assert list(TOOL_CALL_FORMATS["glm"].parse(TOOL_CALL_FORMATS["glm"].render(calls), TOOLS).calls) == calls


def test_tool_call_gemma_reads_arguments_of_a_thousand_keys() -> None:
    body = ",".join(f"k{i}:{i}" for i in range(1000))
    [(_, arguments)] = calls_in("gemma4", f"<|tool_call>call:other{{{body}}}<tool_call|>")
    assert arguments == {f"k{i}": i for i in range(1000)}


@pytest.mark.parametrize(
    ("template", "form"), [("gptoss", "harmony"), ("glm4moe", "glm"), ("gemma4", "gemma4"), ("qwen3", "hermes")]
)
def test_tool_call_are_read_as_models_templates_write_them(template: str, form: str) -> None:
    """The texts of the templates are read from the installed TRL."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    package = find_spec("trl")
    if package is None or package.origin is None:
        pytest.skip("TRL, which set-up installs, keeps models' chat templates")
    source = (Path(package.origin).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    arguments = {"query": "where is\n'Paris'?", "top": 3}
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = environment.from_string(source).render(
        messages=[{"role": "user", "content": "?"}, said], bos_token="", strftime_now=lambda _: "", tools=None
    )
    for name in (form, "auto", "template"):
        assert calls_in(name, text) == [("search", arguments)]


THINKING = ["<think>{}</think>", "{}</think>", "[THINK]{}[/THINK]", "<|channel>thought\n{}<channel|>"]


@pytest.mark.parametrize("form", [name for name in TOOL_CALL_FORMATS if name != "harmony"])
def test_tool_call_inside_of_reasoning_are_not_made(form: str) -> None:
    thought, made = (
        TOOL_CALL_FORMATS[form].render([ToolCall(name=name, arguments={})]) for name in ("today", "search")
    )
    for thinking in THINKING:
        assert [name for name, _ in calls_in(form, thinking.format(thought) + made)] == ["search"]
        assert calls_in(form, thinking.format(thought) + "Done.") == []
    assert calls_in(form, f"<think>{thought}") == []


@pytest.mark.parametrize("form", ["auto", "hermes", "xml", "glm", "gemma4"])
def test_tool_call_inside_of_reasoning_are_made_where_they_count(form: str) -> None:
    text = f"<think>{TOOL_CALL_FORMATS[form].render([ToolCall(name='today', arguments={})])}"
    parsed = get_tool_call_format(form, parse_reasoning=True).parse(text, TOOLS)
    assert [call.name for call in parsed.calls] == ["today"]


def test_tool_call_the_tags_form_reads_what_it_writes() -> None:
    calls = [
        ToolCall(name="search", arguments={"query": "a\nb <c>", "top": 2}),
        ToolCall(name="python", arguments={"code": "x = 1\nif x:\n    print(x)"}),
    ]
    assert list(TOOL_CALL_FORMATS["xml"].parse(TOOL_CALL_FORMATS["xml"].render(calls), TOOLS).calls) == calls


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<search>", "</search>", "<query>", "</query>", "```", "```python\n", "```json"),
    *("{", "}", "[", "]", '"', "\\", '"name"', '"arguments":', ":", ",", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("search.call(", "query=", ")", ";", '{"name": "search", "arguments": {}}', "<function=search>"),
    *("<|channel|>", "<|message|>", "commentary to=functions.search ", "<|call|>", "to=functions.today{", "<|start|>"),
    *("<|tool_call>", "<tool_call|>", "call:search{", "query:", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<tool_call>search", "<think>", "</think>"),
    *("<parameter=query>", "</parameter>", "9" * 500, "\ud800", "\0", " ", "\n", "é"),
]


@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=40))
def test_tool_call_no_text_makes_a_parser_raise(parts: list[str]) -> None:
    text = "".join(parts)
    for form in TOOL_CALL_FORMATS.values():
        found = form.parse(text, TOOLS)
        assert len(found.calls) <= MAX_CALLS
        for call in found.calls:
            form.render([call])
            form.format_result(ToolResult(call=call, content="x", ok=True))


@pytest.mark.parametrize("form", list(TOOL_CALL_FORMATS))
def test_tool_call_long_text_costs_time_in_proportion(form: str) -> None:
    for fragment in FRAGMENTS:
        text = fragment * (400_000 // len(fragment))
        begun = time.process_time()
        TOOL_CALL_FORMATS[form].parse(text, TOOLS)
        assert time.process_time() - begun < 10, f"{fragment!r}: a quadratic parser takes minutes"


def test_tool_call_deep_json_is_refused_before_anything_walks_it() -> None:
    for text in ("[" * 40 + "]" * 40, "[" * 60_000, '{"a":' * 5_000 + "1" + "}" * 5_000):
        with pytest.raises(MalformedJsonError, match=r"deep|Expecting"):
            read_json(text)
    assert read_json("[" * 30 + "]" * 30)[1] == 60


def test_tool_call_every_form_but_the_templates_explains_every_tool_and_says_results() -> None:
    result = ToolResult(call=ToolCall(name="search", arguments={}, id="a1"), content="found it", ok=True)
    for name, form in TOOL_CALL_FORMATS.items():
        text = form.explain(list(TOOLS.values()))
        assert (text == "") if name == "template" else all(tool in text for tool in TOOLS)
        assert "found it" in form.format_result(result)
