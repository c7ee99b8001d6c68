"""Calls in text: every form reads what it writes, and hostile text costs little and raises nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.envs.tools import FORMS, ToolCall, ToolResult
from roll.envs.tools.calls import MOST_CALLS
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
    found = FORMS[form].parse(text, TOOLS)
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
    ],
)
def test_a_form_reads_what_its_models_write(form: str, text: str, expected: list[object]) -> None:
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
    ],
)
def test_a_malformed_call_becomes_one_sentence(form: str, text: str) -> None:
    for name in (form, "auto"):
        found = FORMS[name].parse(text, TOOLS)
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


@pytest.mark.parametrize("form", ["json", "hermes", "llama", "mistral"])
@settings(max_examples=25)
@given(calls=CALLS)
def test_what_a_form_writes_it_reads_as_the_same_calls(form: str, calls: list[ToolCall]) -> None:
    found = FORMS[form].parse(FORMS[form].render(calls), TOOLS)
    assert [(call.name, dict(call.arguments)) for call in found.calls] == [(c.name, dict(c.arguments)) for c in calls]


def test_the_tags_form_reads_what_it_writes() -> None:
    calls = [
        ToolCall(name="search", arguments={"query": "a\nb <c>", "top": 2}),
        ToolCall(name="python", arguments={"code": "x = 1\nif x:\n    print(x)"}),
    ]
    assert list(FORMS["xml"].parse(FORMS["xml"].render(calls), TOOLS).calls) == calls


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<search>", "</search>", "<query>", "</query>", "```", "```python\n", "```json"),
    *("{", "}", "[", "]", '"', "\\", '"name"', '"arguments":', ":", ",", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("search.call(", "query=", ")", ";", '{"name": "search", "arguments": {}}', "<function=search>"),
    *("<parameter=query>", "</parameter>", "9" * 500, "\ud800", "\0", " ", "\n", "é"),
]


@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=40))
def test_no_text_makes_a_parser_raise(parts: list[str]) -> None:
    text = "".join(parts)
    for form in FORMS.values():
        found = form.parse(text, TOOLS)
        assert len(found.calls) <= MOST_CALLS
        for call in found.calls:
            form.render([call])
            form.result(ToolResult(call=call, text="x", ok=True))


@pytest.mark.parametrize("form", list(FORMS))
def test_long_text_costs_time_in_proportion(form: str) -> None:
    for fragment in FRAGMENTS:
        text = fragment * (400_000 // len(fragment))
        begun = time.process_time()
        FORMS[form].parse(text, TOOLS)
        assert time.process_time() - begun < 1.0, f"{fragment!r}: a quadratic parser takes minutes"


def test_deep_json_is_refused_before_anything_walks_it() -> None:
    for text in ("[" * 40 + "]" * 40, "[" * 60_000, '{"a":' * 5_000 + "1" + "}" * 5_000):
        with pytest.raises(MalformedJsonError, match=r"deep|Expecting"):
            read_json(text)
    assert read_json("[" * 30 + "]" * 30)[1] == 60


def test_every_form_but_the_templates_explains_every_tool_and_says_results() -> None:
    result = ToolResult(call=ToolCall(name="search", arguments={}, id="a1"), text="found it", ok=True)
    for name, form in FORMS.items():
        text = form.explain(list(TOOLS.values()))
        assert (text == "") if name == "template" else all(tool in text for tool in TOOLS)
        assert "found it" in form.result(result)
