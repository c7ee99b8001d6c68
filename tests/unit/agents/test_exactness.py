"""Through the endpoint, for every chat template: what the engine saw is what is trained."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from worlds.agents import Speaker, draw_of, opened, samples, seen
from worlds.chat_templates import TEMPLATES, Template

from roll.agents import Session, build_rollout
from roll.data import ChatRenderer
from roll.models import load_tokenizer
from roll.types import Message

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at":  "%s"}}</tool_call>'
"""Two spaces: nobody who writes this again would write the same tokens."""

QWEN_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nWrite <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA_3_WITH_TOOLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nRespond with {"name": ..., "parameters": ...}.' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""What is said beside a call is dropped, as in the original."""

ALL = {
    **TEMPLATES,
    "qwen-with-tools": Template(
        text=QWEN_WITH_TOOLS, special=("<|im_end|>", "<|im_start|>", "<|endoftext|>"), end="<|im_end|>"
    ),
    "llama-3-with-tools": Template(
        text=LLAMA_3_WITH_TOOLS,
        special=("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        end="<|eot_id|>",
    ),
}


def renderer_of(model: Path, template: Template) -> tuple[ChatRenderer, int]:
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_special_tokens({"additional_special_tokens": list(template.special)})
    tokenizer.eos_token = template.special[0]
    tokenizer.bos_token = template.special[1]
    tokenizer.chat_template = template.text
    return ChatRenderer(tokenizer), int(tokenizer.convert_tokens_to_ids(template.end))


class Client:
    """Talks to a session as an agent does."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session: Session) -> None:
        self.http, self.url, self.session = http, url, session

    async def chat(self, messages: list[dict[str, Any]], stream: bool = False, **more: Any) -> dict[str, Any]:
        """The answer's message."""
        body = {"model": "m", "messages": messages, "stream": stream, **more}
        headers = {"Authorization": f"Bearer {self.session.key}"}
        async with self.http.post(f"{self.url}/chat/completions", json=body, headers=headers) as response:
            said = await response.text()
        assert response.status == 200, said
        if not stream:
            return json.loads(said)["choices"][0]["message"]
        return put_together(said)


def put_together(said: str) -> dict[str, Any]:
    """A streamed answer as a message."""
    lines = [line.removeprefix("data: ") for line in said.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    content, calls = "", {}
    for line in lines:
        delta = json.loads(line)["choices"][0]["delta"]
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = part.get("id", call.get("id"))
            call["function"]["name"] += part["function"].get("name", "")
            call["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls.values())} if calls else message


def follow(message: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    """What comes after an answer: what its tools said, or the user."""
    calls = message.get("tool_calls")
    if calls:
        return [{"role": "tool", "tool_call_id": call["id"], "content": f"{chance.random()}"} for call in calls]
    return [{"role": "user", "content": chance.choice(["Go on.", " and  then?\n", "é" * 3])}]


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("seed", [0, 1])
async def test_agent_token_exactness_every_sample_is_what_the_engine_saw(
    tiny_model: Path, name: str, seed: int
) -> None:
    """Dialogues that go on, fork, are compacted and are led in parallel, streamed and not, with calls of tools."""
    renderer, end = renderer_of(tiny_model, ALL[name])
    chance = random.Random(seed)
    llama = name == "llama-3-with-tools"

    def say(context: str) -> str:
        kind = chance.random()
        if kind < 0.4:
            calls = [CALL % chance.randrange(9) for _ in range(chance.randint(1, 3))]
            if llama:
                calls = ['{"name": "look",  "parameters": {"at": "x"}}']
            return ("" if llama else "Let me look. ") + "\n".join(calls)
        return chance.choice(["  spaces at both ends  ", "Yes.", "it is  \n\n so", "ünï\ufffd\ufffd"])

    async with opened(Speaker(renderer, say, end)) as (server, session), aiohttp.ClientSession() as http:
        speaker = session._generate.__self__
        client = Client(http, server.base_url, session)
        start = [{"role": "user", "content": "Begin."}]

        async def dialogue(messages: list[dict[str, Any]], turns: int) -> list[dict[str, Any]]:
            for _ in range(turns):
                answer = await client.chat(messages, stream=chance.random() < 0.5, tools=TOOLS)
                messages = [*messages, answer, *follow(answer, chance)]
            return messages

        long = await dialogue(start, 5)
        keeps = build_rollout(draw_of(renderer), 0, session.calls, text="")
        assert len(keeps.branches) == 1  # the agent's own first context, and then only what extends it
        await asyncio.gather(
            dialogue(long[:3] if len(long[1].get("tool_calls", ())) < 2 else start, 2), dialogue(start, 2)
        )
        await dialogue([{"role": "user", "content": "In short: " + str(len(long))}], 2)
        calls = session.calls
    rollout = build_rollout(draw_of(renderer), 0, calls, text="")
    assert sorted(samples(rollout)) == sorted(seen(speaker))
    written = sum(len(generation.token_ids) for generation in speaker.generations)
    assert int((rollout.policy_versions >= 0).sum()) == written


@pytest.mark.parametrize("name", sorted(set(ALL) - {"qwen-3"}))
async def test_agent_token_exactness_a_context_reads_as_the_template_writes_the_conversation(
    tiny_model: Path, name: str
) -> None:
    """An independent view of what is between answers: the whole conversation, rendered afresh, has the same text."""
    template = ALL[name]
    renderer, end = renderer_of(tiny_model, template)
    space = " " if name == "mistral" else ""  # which the template puts before an answer
    says = [space + said for said in ("One.", "Two, and\n more", "Three")]
    async with opened(Speaker(renderer, says, end)) as (server, session), aiohttp.ClientSession() as http:
        speaker, client = session._generate.__self__, Client(http, server.base_url, session)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for text in ("b", "c", "d"):
            answer = await client.chat(messages)
            fresh = renderer.decode_raw(renderer.render([Message.from_dict(message) for message in messages]))
            assert renderer.decode_raw(speaker.requests[-1].token_ids) == fresh
            stripped = {"role": "assistant", "content": answer["content"].strip()}
            messages = [*messages, stripped, {"role": "user", "content": text}]


async def test_agent_token_exactness_an_answer_that_was_cut_off_is_ended_before_the_conversation_goes_on(
    tiny_model: Path,
) -> None:
    renderer, end = renderer_of(tiny_model, ALL["qwen-2.5"])
    async with opened(Speaker(renderer, ["abcdef", "x"], end)) as (server, session), aiohttp.ClientSession() as http:
        speaker, client = session._generate.__self__, Client(http, server.base_url, session)
        messages = [{"role": "user", "content": "a"}]
        answer = await client.chat(messages, max_tokens=3)
        assert answer["content"] == "abc"
        await client.chat([*messages, answer, {"role": "user", "content": "b"}])
    context = renderer.decode_raw(speaker.requests[1].token_ids)
    assert context.endswith("assistant\nabc<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert len(build_rollout(draw_of(renderer), 0, session.calls, text="").branches) == 1


class Halves(Speaker):
    """Begins every answer with a lone byte of a longer character."""

    @property
    def half(self) -> int:
        return int(self.renderer.tokenize("é")[0])

    async def generate(self, request: Any) -> Any:
        generation = await super().generate(request)
        generation.token_ids[0] = self.half
        return generation


async def test_agent_token_exactness_tokens_that_no_text_has_stay_as_the_engine_made_them(tiny_model: Path) -> None:
    """A lone byte of a longer character reads as a replacement, which nobody could tokenise back."""
    renderer, end = renderer_of(tiny_model, ALL["qwen-2.5"])
    async with opened(Halves(renderer, ["x y", "z"], end)) as (server, session), aiohttp.ClientSession() as http:
        speaker, client = session._generate.__self__, Client(http, server.base_url, session)
        messages = [{"role": "user", "content": "a"}]
        answer = await client.chat(messages)
        assert answer["content"] == "\ufffd y"
        await client.chat([*messages, answer, {"role": "user", "content": "b"}])
    first, second = speaker.requests
    whole = [*first.token_ids.tolist(), *speaker.generations[0].token_ids.tolist()]
    assert second.token_ids.tolist()[: len(whole)] == whole and speaker.half in whole


@pytest.mark.parametrize("name", sorted(ALL))
async def test_agent_token_exactness_an_answer_that_a_stop_text_ended_keeps_its_tokens_where_the_agent_adds_to_it(
    tiny_model: Path, name: str
) -> None:
    """Agents of text (ReAct, smolagents' CodeAgent) write what they did behind the stop text, in the same message."""
    renderer, end = renderer_of(tiny_model, ALL[name])
    says = ["x Act</code> more", "y Act</code>", "z"]
    async with opened(Halves(renderer, says, end)) as (server, session), aiohttp.ClientSession() as http:
        speaker, client = session._generate.__self__, Client(http, server.base_url, session)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for added in ("\nCalled <|b|>", ""):
            answer = await client.chat(messages, stop=["</code>", "zzz"])
            assert answer["content"] == "\ufffd Act"
            whole = {"role": "assistant", "content": f"{answer['content']}</code>{added}"}
            messages = [*messages, whole, {"role": "user", "content": "b"}]
        await client.chat(messages, stop=["</code>"])
        other = {"role": "assistant", "content": "\ufffd Act</code"}
        speaker.says = ["w"]
        await client.chat([messages[0], other, messages[2]])
    first, second, third, fresh = (request.token_ids.tolist() for request in speaker.requests)
    written = [call.token_ids.tolist() for call in session.calls]
    assert second[: len(first + written[0])] == first + written[0]
    assert third[: len(second + written[1])] == second + written[1]
    ends = renderer.decode_raw(speaker.requests[1].token_ids[len(first + written[0]) :])
    assert ends.startswith("\nCalled <|b|>") and speaker.half not in fresh
    assert len(build_rollout(draw_of(renderer), 0, session.calls[:3], text="").branches) == 1


async def test_agent_token_exactness_an_answer_is_known_again_without_its_outer_spaces_and_not_under_other_tools(
    tiny_model: Path,
) -> None:
    renderer, end = renderer_of(tiny_model, ALL["qwen-with-tools"])
    said = ["  so ", "a", "b"]
    async with opened(Speaker(renderer, said, end)) as (server, session), aiohttp.ClientSession() as http:
        speaker, client = session._generate.__self__, Client(http, server.base_url, session)
        begun = [{"role": "user", "content": "a"}]
        await client.chat(begun, tools=TOOLS)
        after = [*begun, {"role": "assistant", "content": "so"}, {"role": "user", "content": "b"}]
        await client.chat(after, tools=TOOLS)
        await client.chat(after, tools=[{"type": "function", "function": {**TOOLS[0]["function"], "name": "go"}}])
    first, second, third = (renderer.decode_raw(request.token_ids) for request in speaker.requests)
    assert second.startswith(f"{first}  so <|im_end|>")
    assert '"go"' in third and '"look"' not in third


async def test_agent_token_exactness_a_text_that_goes_on_behind_an_answer_does_not_have_the_token_that_ended_it(
    tiny_model: Path,
) -> None:
    renderer, end = renderer_of(tiny_model, ALL["qwen-2.5"])
    async with opened(Speaker(renderer, ["one", "two"], end)) as (server, session), aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.key}"}
        for prompt in ("Count: ", "Count: one, "):
            body = {"model": "m", "prompt": prompt}
            async with http.post(f"{server.base_url}/completions", json=body, headers=headers) as response:
                assert response.status == 200
        speaker = session._generate.__self__
    assert [renderer.decode_raw(request.token_ids) for request in speaker.requests] == [
        "Count: ",
        "Count: one, ",
    ]
