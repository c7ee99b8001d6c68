"""What published agents send: the vendor's tools, late system messages, pictures, deferred tools, token counts."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from worlds.agents import Speaker, draw_of, opened
from worlds.chat_templates import TEMPLATES, Template

from roll.agents import Session, build_rollout
from roll.agents.server import AgentServer
from roll.config.agents import AgentConfig
from roll.data import ChatRenderer
from roll.models import load_tokenizer
from roll.types import Message

WITH_TOOLS = Template(
    text="""\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    special=("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    end="<|im_end|>",
)
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SHOWN = "[image not shown: this model reads only text]"


class World:
    """A server, one session of it, and a client."""

    def __init__(self, http: aiohttp.ClientSession, server: AgentServer, session: Session, speaker: Speaker) -> None:
        self.http, self.server, self.session, self.speaker = http, server, session, speaker

    async def post(self, path: str, **body: Any) -> Any:
        """The answer, which is no refusal."""
        status, said = await self.try_post(path, **body)
        assert status == 200, said
        return said

    async def try_post(self, path: str, **body: Any) -> tuple[int, Any]:
        headers = {"x-api-key": self.session.key}
        async with self.http.post(
            self.server.base_url + path, json={"model": "m", **body}, headers=headers
        ) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    def seen(self, place: int = -1) -> str:
        """What the engine was given."""
        return self.speaker.renderer.decode_raw(self.speaker.requests[place].token_ids)

    @property
    def num_chains(self) -> int:
        return len(build_rollout(draw_of(self.speaker.renderer), 0, self.session.calls, text="").branches)


@asynccontextmanager
async def world(model: Path, *says: str, template: Template = WITH_TOOLS) -> AsyncIterator[World]:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    tokenizer.eos_token, tokenizer.bos_token = template.special[0], template.special[1]
    tokenizer.chat_template = template.text
    speaker = Speaker(ChatRenderer(tokenizer), list(says), end=int(tokenizer.convert_tokens_to_ids(template.end)))
    async with opened(speaker, max_context=16384) as (server, session), aiohttp.ClientSession() as http:
        yield World(http, server, session, speaker)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ---- Anthropic's Messages, as Claude Code writes them


async def test_agent_api_messages_system_in_the_midst_stands_where_it_was_said(tiny_model: Path) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "Edit it."}]}
    told = {"role": "system", "content": [{"type": "text", "text": "# Environment"}], "output_config": {"effort": "x"}}
    async with world(tiny_model, "Done", "Again") as here:
        said = await here.post("/messages", max_tokens=50, messages=[asked, told])
        assert here.seen().endswith(
            "user\nEdit it.<|im_end|>\n<|im_start|>system\n# Environment<|im_end|>\n<|im_start|>assistant\n"
        )
        answered = {"role": "assistant", "content": said["content"]}
        await here.post("/messages", max_tokens=50, messages=[asked, told, answered, told, asked])
        assert here.seen().endswith(
            "assistant\nDone<|im_end|>\n<|im_start|>system\n# Environment<|im_end|>\n<|im_start|>user\n"
            "Edit it.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert here.num_chains == 1


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_agent_api_messages_system_in_the_midst_is_read_with_every_template(tiny_model: Path, name: str) -> None:
    """Templates that refuse it or leave it out have it as the user's; several messages of a user may become one."""
    ask = {"role": "user", "content": "Go on."}
    async with world(tiny_model, "One", "Two", template=TEMPLATES[name]) as here:
        first = [{"role": "system", "content": "FIRST"}, ask, {"role": "system", "content": "SECOND"}, ask]
        said = await here.post("/chat/completions", messages=first)
        assert 0 <= here.seen().find("FIRST") < here.seen().find("SECOND") and here.seen().count("Go on.") == 2
        later = [said["choices"][0]["message"], {"role": "system", "content": "THIRD"}, ask, ask]
        await here.post("/chat/completions", messages=[*first, *later])
        assert 0 <= here.seen().find("SECOND") < here.seen().find("One") < here.seen().find("THIRD")
        assert here.seen().count("Go on.") == 4 and here.num_chains == 1


async def test_agent_api_messages_pictures_in_results_are_told_in_words_with_one_note(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [{"name": "Read", "input_schema": {"type": "object"}}]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "See"}, PICTURE]}]
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, call("Read", at="a.png"), call("Read", at="b.png"), "A cat.") as here:
            for _ in range(2):
                said = await here.post("/messages", max_tokens=99, messages=messages, tools=tools)
                [used] = said["content"]
                result = {"type": "tool_result", "tool_use_id": used["id"], "content": [PICTURE]}
                messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
            await here.post("/messages", max_tokens=99, messages=messages, tools=tools)
            assert here.seen().count(SHOWN) == 3 and here.num_chains == 1
    assert [record.message for record in caplog.records if "image" in record.message] == [
        f"agents send message parts of the type 'image', which the policy does not support: the policy "
        f"receives the text '{SHOWN}' instead."
    ]


async def test_agent_api_messages_tools_of_the_vendor_are_left_out_with_one_note(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    bash = {"type": "bash_20250124", "name": "bash"}
    mine = {"type": "custom", "name": "look", "input_schema": {"type": "object"}, "eager_input_streaming": True}
    group = {"type": "mcp_toolset", "mcp_server_name": "x"}
    ask = [{"role": "user", "content": "a"}]
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "b", "c") as here:
            for _ in range(2):
                await here.post("/messages", max_tokens=9, messages=ask, tools=[web, bash, mine, group])
            assert '"look"' in here.seen() and "web_search" not in here.seen() and "bash" not in here.seen()
            status, said = await here.try_post("/messages", max_tokens=9, messages=ask, tools=[web])
            assert status == 400 and "unsupported tools: web_search" in said["error"]["message"]
            assert "disable the tool" in said["error"]["message"] and len(here.speaker.requests) == 2
            status, said = await here.try_post("/messages", max_tokens=9, messages=ask, tools=[{"name": "look"}])
            assert status == 400 and said["error"]["message"].startswith("tools[0].input_schema")
    notes = [record.message for record in caplog.records]
    assert [note.partition(",")[0] for note in notes] == [
        f"agents send the tool '{name}'" for name in ("web_search", "bash", "mcp_toolset")
    ]


async def test_agent_api_messages_deferred_tools_are_shown_where_the_conversation_refers_to_them(
    tiny_model: Path,
) -> None:
    schema = {"type": "object", "properties": {"url": {"type": "string"}}}
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    fetch = {"name": "WebFetch", "description": "Fetch.", "input_schema": schema, "defer_loading": True}
    messages: list[Any] = [{"role": "user", "content": "a"}]
    async with world(tiny_model, call("ToolSearch", query="web"), call("WebFetch", url="u")) as here:
        said = await here.post("/messages", max_tokens=99, messages=messages, tools=[search])
        found = [{"type": "tool_reference", "tool_name": "WebFetch"}]
        result = {"type": "tool_result", "tool_use_id": said["content"][0]["id"], "content": found}
        messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
        said = await here.post("/messages", max_tokens=99, messages=messages, tools=[search, fetch])
        assert (said["content"][0]["name"], said["content"][0]["input"]) == ("WebFetch", {"url": "u"})
        assert here.num_chains == 1  # the tools at the beginning are the same
        assert here.seen().count('"WebFetch"') == 1 and '<function>{"name":"WebFetch"' in here.seen()
        await_all = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
        here.speaker.says = ["b"]
        await here.post("/messages", max_tokens=99, messages=messages[:1], tools=[await_all, search, fetch])
        assert here.seen().index('"WebFetch"') < here.seen().index("user\na")  # nobody else would show it


async def test_agent_api_messages_calls_that_come_back_with_defaults_are_known_again(tiny_model: Path) -> None:
    tools = [{"name": "Edit", "input_schema": {"type": "object"}}]
    wrote = {"path": "a", "new": "x"}
    for sent, num_chains in [
        ({"replace_all": False, **wrote}, 1),
        (wrote, 1),
        ({**wrote, "new": "y"}, 2),  # the agent has changed what the model wrote
        ({"path": "a"}, 2),
    ]:
        async with world(tiny_model, call("Edit", **wrote), "Done") as here:
            messages: list[Any] = [{"role": "user", "content": "a"}]
            said = await here.post("/messages", max_tokens=99, messages=messages, tools=tools)
            used = {**said["content"][0], "input": sent}
            result = {"type": "tool_result", "tool_use_id": used["id"], "content": "ok"}
            messages += [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
            await here.post("/messages", max_tokens=99, messages=messages, tools=tools)
            assert here.num_chains == num_chains, sent
            assert ("replace_all" in here.seen()) is False


async def test_agent_api_messages_the_line_for_the_vendors_books_is_no_part_of_the_prompt(tiny_model: Path) -> None:
    async with world(tiny_model, "a", "b") as here:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        for build in ("1f", "2e"):
            books = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={build};"}
            said = await here.post(
                "/messages", max_tokens=9, messages=messages, system=[books, {"type": "text", "text": "Be brief."}]
            )
            messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "b"}]
        assert "billing" not in here.seen() and "Be brief." in here.seen() and here.num_chains == 1


async def test_agent_api_counts_of_tokens_are_those_of_the_prompt_and_ask_nothing_of_the_model(
    tiny_model: Path,
) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "system": "s", "tools": tools}
    async with world(tiny_model, "b") as here:
        counted = await here.post("/messages/count_tokens", **body)
        assert here.speaker.requests == []
        said = await here.post("/messages", max_tokens=9, **body)
        assert counted == {"input_tokens": said["usage"]["input_tokens"]}
        long = [{"role": "user", "content": "a" * 400_000}]
        assert (await here.post("/messages/count_tokens", messages=long))["input_tokens"] >= 100_000
        counted = await here.post("/responses/input_tokens", input="a")
        assert counted["input_tokens"] == len(here.speaker.renderer.render([Message(role="user", content="a")]))
        status, said = await here.try_post("/messages/count_tokens", messages=[])
        assert status == 400 and said["type"] == "error"


# ---- OpenAI's Responses, as Codex writes them

EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Run.",
    "format": {"type": "grammar", "definition": "start: S"},
}
GROUP = {
    "type": "namespace",
    "name": "functions",
    "description": "",
    "tools": [EXEC, {"type": "function", "name": "wait", "strict": False, "parameters": {"type": "object"}}],
}
OTHER = {"type": "namespace", "name": "clock", "tools": [{"type": "function", "name": "wait"}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_agent_api_responses_tools_in_items_and_groups_are_called_in_their_own_form(
    tiny_model: Path, stream: bool
) -> None:
    begin: list[Any] = [
        {"type": "additional_tools", "role": "developer", "tools": [GROUP, OTHER, {"type": "web_search"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are Codex."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Edit."}]},
    ]
    calls = call("exec", input='text("é")') + call("clock__wait") + call("functions__wait")
    async with world(tiny_model, calls, "Done") as here:
        said = await here.post("/responses", input=begin, stream=stream, store=False, reasoning={"effort": "low"})
        items = _items(said) if stream else said["output"]
        assert '"exec"' in here.seen() and "start: S" in here.seen() and "web_search" not in here.seen()
        assert [(i["type"], i["name"], i["namespace"]) for i in items] == [
            ("custom_tool_call", "exec", "functions"),
            ("function_call", "wait", "clock"),
            ("function_call", "wait", "functions"),
        ]
        assert items[0]["input"] == 'text("é")'
        if stream:
            assert 'response.custom_tool_call_input.delta","sequence_number":3' in said
        picture = [
            {"type": "input_text", "text": "ok"},
            {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
        ]
        results = [
            {"type": f"{i['type']}_output", "call_id": i["call_id"], "output": picture if n == 0 else "ok"}
            for n, i in enumerate(items)
        ]
        strange = [{"type": "reasoning", "encrypted_content": "x"}, {"type": "local_shell_call", "action": {"a": []}}]
        await here.post("/responses", input=[*begin, *strange, *items, *results])
        assert here.num_chains == 1 and f"ok\n{SHOWN}" in here.seen()


def _items(said: str) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


async def test_agent_api_responses_items_that_are_kept_elsewhere_are_refused_with_what_to_do(tiny_model: Path) -> None:
    async with world(tiny_model) as here:
        status, said = await here.try_post("/responses", input=[{"type": "item_reference", "id": "msg_1"}])
        assert status == 400 and "send the items again" in said["error"]["message"]
        [reference] = here.session.rejected_requests
        assert reference.startswith("/v1/responses: 400 an item_reference in input")


# ---- OpenAI's Chat Completions


@pytest.mark.parametrize("stream", [False, True])
async def test_agent_api_chat_tools_of_one_text_and_of_the_vendor(tiny_model: Path, stream: bool) -> None:
    tools = [
        {"type": "custom", "custom": {"name": "exec", "format": {"type": "text"}}},
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "web_search", "web_search": {}},
    ]
    asked: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    async with world(tiny_model, call("exec", input="ls") + call("look"), "Done") as here:
        said = await here.post("/chat/completions", messages=asked, tools=tools, stream=stream)
        if stream:
            assert '"type":"custom","custom":{"name":"exec","input":""}' in said and '"custom":{"input":"ls"}' in said
            return
        message = said["choices"][0]["message"]
        assert [c.get("custom") for c in message["tool_calls"]] == [{"name": "exec", "input": "ls"}, None]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message["tool_calls"]]
        await here.post("/chat/completions", messages=[*asked, message, *results], tools=tools)
        assert here.num_chains == 1 and SHOWN in here.seen()
        old = [{"name": "look", "parameters": {}}]
        status, said = await here.try_post("/chat/completions", messages=asked, functions=old)
        assert status == 400 and "to send `tools`" in said["error"]["message"]


async def test_agent_api_a_demand_that_is_told_in_words_is_noted_once(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [{"role": "user", "content": "a"}]
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "b", "c") as here:
            here.session.constraints_as_text = AgentConfig(command=["a"]).format_constraints == "prompt"
            for _ in range(2):
                await here.post("/chat/completions", messages=asked, tool_choice="required")
            assert "Answer with a call to one of the functions." in here.seen()
    [note] = [record.message for record in caplog.records]
    assert note.startswith(
        "agents send tool_choice, which cannot be enforced: the constraint is passed to the model as text"
    )


async def test_agent_api_the_models_list_says_how_long_a_context_is(tiny_model: Path) -> None:
    async with world(tiny_model) as here:
        headers = {"x-api-key": here.session.key}
        async with here.http.get(here.server.base_url + "/models?client_version=1", headers=headers) as response:
            said = await response.json()
        async with here.http.head(here.server.base_url + "/models", headers=headers) as response:
            assert response.status == 200
    [model] = said["data"]
    assert (said["first_id"], said["last_id"], model["max_model_len"]) == ("policy", "policy", 16384)


# ---- fields that are not served, and odd values of those that are

ASK = [{"role": "user", "content": "a"}]
LOOK = {"type": "function", "function": {"name": "look"}}
SERVED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": ASK},
    "/completions": {"prompt": "a"},
    "/responses": {"input": "a"},
    "/messages": {"messages": ASK, "max_tokens": 9},
}


@pytest.mark.parametrize("path", sorted(SERVED))
async def test_agent_api_fields_that_are_not_known_are_left_out_with_one_note_each(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    deep: Any = 1
    for _ in range(150):
        deep = {"a": deep}
    odd = {"seed": 5, "zzz": deep, "x\n\x1b[2J": "text", "parallel_tool_calls": False}
    off = {"background": False, "plugins": [], "options": {}, "modalities": None, "mask": ""}
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "b", "c") as here:
            for _ in range(2):
                body = {**SERVED[path], **odd, **off, "metadata": {"user_id": "u"}, "store": True}
                await here.post(path, **body)
    assert sorted(record.message for record in caplog.records) == [
        f"agents send the field '{name}', which is not supported and has no effect."
        for name in ("parallel_tool_calls", "seed", "x \\x1b[2J", "zzz")
    ]


async def test_agent_api_fields_inside_of_messages_and_tools_are_noted_as_well(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = [
        {"role": "assistant", "content": "b", "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "tool", "tool_call_id": "x", "name": "look", "content": "c"},
    ]
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "c") as here:
            tools = [{"type": "function", "function": {"name": "look", "strict": True}, "cache_control": {}}]
            await here.post("/chat/completions", messages=[*ASK, *told, *ASK], tools=tools)
            assert sorted(record.message.split("'")[1] for record in caplog.records) == ["function_call", "strict"]
            here.speaker.says = ["d"]
            await here.post("/chat/completions", messages=[{**ASK[0], "name": "Ann"}])
    assert "'name'" in caplog.records[-1].message


async def test_agent_api_notes_end_with_one_that_says_so(caplog: pytest.LogCaptureFixture, tiny_model: Path) -> None:
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "b", "c") as here:
            for _ in range(2):
                await here.post("/responses", input="a", **{f"field_{number}": 1 for number in range(99)})
    assert len(caplog.records) == 65 and "no further warnings are logged" in caplog.records[-1].message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": ASK, "stream": True, "stream_options": {"include_usage": None}}),
        ("/chat/completions", {"messages": ASK, "tools": [{**LOOK, "type": None}], "stop": None, "n": None}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": None, "text": None}]}]}),
        (
            "/chat/completions",
            {
                "messages": [
                    *ASK,
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": None, "type": None, "function": {"name": "look", "arguments": None}}],
                    },
                    *ASK,
                ]
            },
        ),
        (
            "/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": None, "name": "look", "input": None}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": None, "content": None}]},
                ],
            },
        ),
        ("/responses", {"input": [{"type": None, "role": "user", "content": "a"}], "text": {"format": None}}),
        ("/responses", {"input": [{"type": "function_call", "call_id": None, "name": "look", "arguments": None}]}),
        ("/responses", {"input": [{"type": "custom_tool_call", "name": "look", "input": None}]}),
        ("/responses", {"input": "a", "tools": [{"type": "namespace", "name": "x", "tools": None}]}),
    ],
)
async def test_agent_api_optional_fields_that_are_null_are_as_if_they_were_absent(
    tiny_model: Path, path: str, body: dict[str, Any]
) -> None:
    async with world(tiny_model, "b") as here:
        await here.post(path, **body)


@pytest.mark.parametrize(
    ("path", "choice", "words"),
    [
        ("/chat/completions", {"type": "auto"}, None),
        ("/chat/completions", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [LOOK]}}, None),
        ("/chat/completions", {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}, "one of the functions"),
        ("/chat/completions", {"type": "custom", "custom": {"name": "look"}}, "the function look"),
        ("/responses", {"type": "allowed_tools", "mode": "auto", "tools": []}, None),
        ("/responses", {"type": "allowed_tools", "mode": "required", "tools": []}, "one of the functions"),
        ("/responses", {"type": "function", "name": "look"}, "the function look"),
        ("/responses", {"type": "web_search"}, None),
    ],
)
async def test_agent_api_choices_of_tools_demand_a_call_only_where_they_do(
    tiny_model: Path, path: str, choice: dict[str, Any], words: str | None
) -> None:
    look = LOOK if path == "/chat/completions" else {"type": "function", "name": "look"}
    async with world(tiny_model, "b", "c") as here:
        here.session.constraints_as_text = True
        await here.post(path, **SERVED[path], tools=[look], tool_choice=choice)
        assert ("Answer with a call" in here.seen()) is (words is not None)
        assert words is None or f"Answer with a call to {words}." in here.seen()
        assert '"look"' in here.seen()
        await here.post(path, **SERVED[path], tools=[look], tool_choice={"type": "none"})
        assert "Answer with a call" not in here.seen() and '"look"' not in here.seen()


async def test_agent_api_a_choice_of_the_vendors_tool_is_noted(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with world(tiny_model, "b") as here:
            await here.post("/responses", input="a", tool_choice={"type": "web_search"})
    assert ["'web_search'" in record.message for record in caplog.records] == [True]


async def test_agent_api_other_formats_of_an_answer_are_told_in_words(tiny_model: Path) -> None:
    async with world(tiny_model, "b", "c") as here:
        here.session.constraints_as_text = True
        await here.post("/responses", input="a", text={"format": {"type": "grammar", "definition": "x"}})
        assert 'Answer in this format: {"type":"grammar","definition":"x"}' in here.seen()
        await here.post("/chat/completions", messages=ASK, response_format={"type": "text"})
        assert "format" not in here.seen()


@pytest.mark.parametrize("field", ["conversation", "prompt"])
async def test_agent_api_what_the_vendor_keeps_is_refused_with_what_to_send(tiny_model: Path, field: str) -> None:
    async with world(tiny_model) as here:
        status, said = await here.try_post("/responses", input="a", **{field: {"id": "x"}})
        assert (
            status == 400
            and said["error"]["param"] == field
            and "send the messages in input" in said["error"]["message"]
        )


async def test_agent_api_halves_of_characters_are_replaced(tiny_model: Path) -> None:
    """Agents written in JavaScript cut what a tool printed in the middle of a character."""
    content = r"cut \ud83d\u0021 \\ud83d \ud83d\ude00 \udcff."
    body = f'{{"model": "m", "messages": [{{"role": "user", "content": "{content}"}}]}}'
    async with world(tiny_model, "b") as here:
        headers = {"x-api-key": here.session.key}
        async with here.http.post(
            f"{here.server.base_url}/chat/completions", data=body.encode(), headers=headers
        ) as response:
            assert response.status == 200, await response.text()
        assert "cut \ufffd! \\ud83d \U0001f600 \ufffd." in here.seen()


async def test_agent_api_a_body_of_very_many_objects_is_refused_before_all_are_read(tiny_model: Path) -> None:
    async with world(tiny_model) as here:
        messages = [{"role": "user", "content": [{}] * 70_000}]
        status, said = await here.try_post("/chat/completions", messages=messages)
        assert status == 413 and "65536 messages, parts and tools" in said["error"]["message"]


USED = {"type": "tool_use", "id": "x", "name": "look", "input": {"at": "y"}}
RICH: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}], "name": "Ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": "b"},
        ],
        "tools": [LOOK, {"type": "custom", "custom": {"name": "exec", "format": {"type": "text"}}}],
        "stream_options": {"include_usage": True},
    },
    "/responses": {
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [GROUP]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "x", "name": "wait", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "b"}]},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": {}}, {"type": "web_search"}],
        "text": {"format": {"type": "text"}},
    },
    "/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, PICTURE]},
            {"role": "assistant", "content": [USED]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [PICTURE]}]},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "output_config": {"format": {"type": "text"}},
    },
}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a body, the outermost first."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)


@pytest.mark.parametrize("path", sorted(RICH))
async def test_agent_api_an_unknown_field_or_a_null_anywhere_ends_no_episode(tiny_model: Path, path: str) -> None:
    """A null is refused only where the field has to be there."""
    async with world(tiny_model) as here:
        here.speaker.says = lambda context: "b"
        for place, found in enumerate(_objects(RICH[path])):
            for change in [{"zzz": {"a": [1]}}, *({name: None} for name in found)]:
                body = deepcopy(RICH[path])
                list(_objects(body))[place].update(change)
                status, said = await here.try_post(path, **body)
                allowed = "zzz" not in change and ("required" in str(said) or "tool_call_id" in str(said))
                assert status == 200 or (status == 400 and allowed), (change, found, said)
