"""The endpoint, as vendors' interfaces have it: answers, streams, refusals, keys, budgets, agents that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from worlds.agents import Speaker, draw_of, opened

from roll.agents import Session, build_rollout
from roll.agents.request_errors import RequestError
from roll.agents.server import AgentServer
from roll.data import ChatRenderer
from roll.errors import EngineDiedError
from roll.models import load_tokenizer
from roll.types import Generation, GenerationRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
MESSAGES = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "a"}]}


class World:
    """A server, one session of it, and a client."""

    def __init__(self, http: aiohttp.ClientSession, server: AgentServer, session: Session, speaker: Speaker) -> None:
        self.http, self.server, self.session, self.speaker = http, server, session, speaker

    async def post(self, path: str, body: Any, *, key: str | None = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.session.key if key is None else key}", **headers}
        async with self.http.post(self.server.base_url + path, data=data, headers=sent) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text


@pytest.fixture
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(tiny_model)))


@asynccontextmanager
async def world(renderer: ChatRenderer, *says: str, latency_s: float = 0.0, **limits: float) -> AsyncIterator[World]:
    speaker = Speaker(renderer, list(says), latency_s=latency_s)
    async with opened(speaker, **limits) as (server, session), aiohttp.ClientSession() as http:
        yield World(http, server, session, speaker)


# ---- what is answered


async def test_agent_endpoint_a_chat_is_answered_with_its_tokens_and_their_logprobs(renderer: ChatRenderer) -> None:
    async with world(renderer, "Yes") as here:
        status, said = await here.post("/chat/completions", {**CHAT, "logprobs": True})
        call = here.session.calls[0]
    [choice] = said["choices"]
    assert status == 200 and choice["message"]["content"] == "Yes" and choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["Y", "e", "s", "<|im_end|>"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == call.logprobs.tolist()
    assert said["usage"] == {
        "prompt_tokens": len(call.context),
        "completion_tokens": 4,
        "total_tokens": len(call.context) + 4,
    }


async def test_agent_endpoint_a_stop_text_ends_the_answer_and_the_tokens_that_say_it_are_the_last(
    renderer: ChatRenderer,
) -> None:
    async with world(renderer, "Act: look\nObs: nothing", "Act: look\nObs: nothing") as here:
        _, said = await here.post("/chat/completions", {**CHAT, "stop": ["Obs:", "zzz"]})
        _, other = await here.post("/messages", {**MESSAGES, "stop_sequences": ["Obs:"]})
        calls = here.session.calls
    assert said["choices"][0]["message"]["content"] == "Act: look\n"
    assert (other["stop_reason"], other["stop_sequence"]) == ("stop_sequence", "Obs:")
    assert [renderer.decode_raw(call.token_ids) for call in calls] == ["Act: look\nObs:"] * 2
    assert [call.finish_reason for call in calls] == ["stop"] * 2


async def test_agent_endpoint_several_answers_are_several_calls_with_seeds_of_their_own(renderer: ChatRenderer) -> None:
    async with world(renderer, "a", "b", "c") as here:
        _, said = await here.post("/chat/completions", {**CHAT, "n": 3})
        assert [choice["message"]["content"] for choice in said["choices"]] == ["a", "b", "c"]
        assert len({request.sampling.seed for request in here.speaker.requests}) == 3
        assert len({request.request_id for request in here.speaker.requests}) == 3
        assert len(build_rollout(draw_of(renderer), 0, here.session.calls, text="").branches) == 3


async def test_agent_endpoint_the_runs_sampling_holds_whatever_an_agent_asks_for(renderer: ChatRenderer) -> None:
    async with world(renderer, "abcdef") as here:
        _, said = await here.post("/chat/completions", {**CHAT, "temperature": 0, "top_p": 0.1, "max_tokens": 2})
        sampling = here.speaker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (1.0, 1.0, 2)
    assert said["choices"][0]["finish_reason"] == "length" and said["choices"][0]["message"]["content"] == "ab"


async def test_agent_endpoint_a_text_that_goes_on_from_an_answer_extends_its_tokens(renderer: ChatRenderer) -> None:
    async with world(renderer, "look\nObs: x", "done") as here:
        prompt = "Q: a\nAct: "
        _, said = await here.post("/completions", {"model": "m", "prompt": prompt, "stop": "\nObs:"})
        assert said["choices"][0]["text"] == "look"
        await here.post("/completions", {"model": "m", "prompt": prompt + "look\nObs: found\nAct: "})
        rollout = build_rollout(draw_of(renderer), 0, here.session.calls, text="")
    assert len(rollout.branches) == 1
    assert renderer.decode_raw(rollout.token_ids) == "look\nObs: found\nAct: done<|im_end|>"


async def test_agent_endpoint_tokens_may_be_continued_as_they_are(renderer: ChatRenderer) -> None:
    async with world(renderer, "x") as here:
        status, _ = await here.post("/completions", {"model": "m", "prompt": [70, 71, 72]})
        assert status == 200 and here.session.calls[0].context.tolist() == [70, 71, 72]
        status, said = await here.post("/completions", {"model": "m", "prompt": [70, 10**6]})
        assert status == 400 and "1000000" in said["error"]["message"]


async def test_agent_endpoint_reasoning_is_told_apart_and_its_tokens_are_kept(renderer: ChatRenderer) -> None:
    async with world(renderer, "<think>\nhm\n</think>\n\nYes", "ok") as here:
        _, said = await here.post("/chat/completions", CHAT)
        message = said["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes", "hm")
        after = [*CHAT["messages"], {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "b"}]
        await here.post("/chat/completions", {**CHAT, "messages": after})
        assert "<think>\nhm\n</think>\n\nYes<|im_end|>" in renderer.decode_raw(here.speaker.requests[1].token_ids)


async def test_agent_endpoint_special_tokens_are_not_in_a_text_beside_which_there_might_have_been_calls(
    renderer: ChatRenderer,
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with world(renderer, "so<|im_start|> it is") as here:
        _, said = await here.post("/chat/completions", {**CHAT, "tools": tools})
        assert "<|im_start|>" in renderer.decode_raw(here.session.calls[0].token_ids)
    assert said["choices"][0]["message"]["content"] == "so it is"


async def test_agent_endpoint_responses_go_on_from_an_earlier_one(renderer: ChatRenderer) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    async with world(renderer, f"Let me see. {call}{call}", "Done") as here:
        body = {"model": "m", "instructions": "Be brief.", "input": "a", "tools": tools}
        _, first = await here.post("/responses", body)
        assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "seen"}
            for item in first["output"][1:]
        ]
        _, second = await here.post("/responses", {**body, "input": outputs, "previous_response_id": first["id"]})
        assert second["output"][0]["content"][0]["text"] == "Done"
        as_items = [{"role": "user", "content": "a"}, *first["output"], *outputs]
        here.speaker.says = ["Done"]
        await here.post("/responses", {**body, "input": as_items})
        one, two, three = here.speaker.requests
        assert two.token_ids.tolist() == three.token_ids.tolist()
        assert two.token_ids.tolist()[: len(one.token_ids)] == one.token_ids.tolist()
        status, said = await here.post("/responses", {**body, "previous_response_id": "resp_x"})
        assert status == 404 and said["error"]["param"] == "previous_response_id"


async def test_agent_endpoint_anthropics_blocks_go_there_and_back(renderer: ChatRenderer) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    tools = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]
    async with world(renderer, f"Let me see. {call}{call}", "Done") as here:
        _, first = await here.post("/messages", {**MESSAGES, "tools": tools, "max_tokens": 300, "system": "s"})
        assert [block["type"] for block in first["content"]] == ["text", "tool_use", "tool_use"]
        assert first["stop_reason"] == "tool_use" and first["content"][1]["input"] == {"at": "x"}
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "seen"}]}
            for block in first["content"][1:]
        ]
        following = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
        messages = [*MESSAGES["messages"], *following]
        body = {**MESSAGES, "tools": tools, "system": [{"type": "text", "text": "s"}], "messages": messages}
        status, said = await here.post("/v1/messages", body, key="", **{"x-api-key": here.session.key})
        assert status == 200 and said["content"] == [{"type": "text", "text": "Done"}]
        assert len(build_rollout(draw_of(renderer), 0, here.session.calls, text="").branches) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/messages"])
async def test_agent_endpoint_a_stream_says_the_same_as_one_object(renderer: ChatRenderer, path: str) -> None:
    text = "A longer answer, which is sent in several pieces, one after the other."
    body: dict[str, Any] = {
        "/chat/completions": CHAT,
        "/completions": {"model": "m", "prompt": "a"},
        "/responses": {"model": "m", "input": "a"},
        "/messages": MESSAGES | {"max_tokens": 500},
    }[path]
    async with world(renderer, text) as here:
        status, said = await here.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert status == 200
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    deltas = [
        event.get("delta") if isinstance(event.get("delta"), str) else (event.get("delta") or {}).get("text") or ""
        for event in events
    ]
    choices = [choice for event in events for choice in event.get("choices", ())]
    deltas += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(deltas) == text and sum(map(bool, deltas)) >= 3
    assert len(here.session.calls) == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
async def test_agent_endpoint_streamed_calls_of_tools_are_those_of_one_object(
    renderer: ChatRenderer, path: str
) -> None:
    text = "Hm. " + '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>' * 2
    schema = {"type": "object"}
    body: dict[str, Any] = {
        "/chat/completions": {
            **CHAT,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}],
        },
        "/responses": {
            "model": "m",
            "input": "a",
            "tools": [{"type": "function", "name": "look", "parameters": schema}],
        },
        "/messages": {**MESSAGES, "max_tokens": 300, "tools": [{"name": "look", "input_schema": schema}]},
    }[path]
    async with world(renderer, text) as here:
        status, said = await here.post(path, {**body, "stream": True})
    assert status == 200
    parts: list[str] = []
    for event in (json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")):
        if path == "/chat/completions":
            calls = event["choices"][0]["delta"].get("tool_calls", ())
            parts += [call["function"]["arguments"] for call in calls if call["function"]["arguments"]]
        elif path == "/responses":
            parts += [event["delta"]] if event["type"] == "response.function_call_arguments.delta" else []
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            parts.append(event["delta"]["partial_json"])
    assert [json.loads(part) for part in parts] == [{"at": "x"}] * 2
    assert "Hm." in said


DEMANDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice", "a call to one of the functions."),
    (
        "/chat/completions",
        CHAT | {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        "tool_choice",
        "a call to the function look.",
    ),
    (
        "/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}},
        "response_format",
        'It has this schema: {"type":"array"}',
    ),
    (
        "/responses",
        {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "array"}}}},
        "text",
        'It has this schema: {"type":"array"}',
    ),
    ("/messages", MESSAGES | {"tool_choice": {"type": "any"}}, "tool_choice", "a call to one of the functions."),
    (
        "/messages",
        MESSAGES | {"tool_choice": {"type": "tool", "name": "look"}},
        "tool_choice",
        "a call to the function look.",
    ),
]


@pytest.mark.parametrize(("path", "body", "field", "words"), DEMANDS)
async def test_agent_endpoint_a_demand_that_nothing_enforces_is_refused_or_told_in_words(
    renderer: ChatRenderer, path: str, body: dict[str, Any], field: str, words: str
) -> None:
    async with world(renderer, "Yes", "No") as here:
        status, said = await here.post(path, body)
        assert status == 400 and f"{field} cannot be enforced" in said["error"]["message"]
        assert "rollout.agent.format_constraints" in said["error"]["message"] and here.speaker.requests == []
        here.session.constraints_as_text = True
        status, _ = await here.post(path, body)
        assert status == 200 and words in renderer.decode_raw(here.speaker.requests[0].token_ids)


async def test_agent_endpoint_what_a_model_was_told_of_a_demand_stays_in_its_context_and_is_no_fork(
    renderer: ChatRenderer,
) -> None:
    async with world(renderer, "Yes", "No") as here:
        here.session.constraints_as_text = True
        await here.post("/chat/completions", {**CHAT, "tool_choice": "required"})
        after = [*CHAT["messages"], {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "b"}]
        await here.post("/chat/completions", {**CHAT, "messages": after, "tool_choice": "auto"})
        one, two = here.speaker.requests
    assert two.token_ids.tolist()[: len(one.token_ids)] == one.token_ids.tolist()
    assert len(build_rollout(draw_of(renderer), 0, here.session.calls, text="").branches) == 1


async def test_agent_endpoint_a_call_that_no_interface_can_carry_stays_text(renderer: ChatRenderer) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with world(renderer, text) as here:
        status, said = await here.post("/chat/completions", {**CHAT, "tools": tools})
    assert status == 200 and said["choices"][0]["message"]["content"] == text


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat/completions", b"{", None),
        ("/chat/completions", b'{"model": "m", "messages": ' + b"[" * 5000, None),
        ("/chat/completions", {"model": "m"}, "messages"),
        ("/chat/completions", {"model": "m", "messages": []}, "messages"),
        ("/chat/completions", {"model": "m", "messages": [{"role": "judge", "content": "a"}]}, "messages[0].role"),
        ("/chat/completions", {**CHAT, "n": 0}, "n"),
        ("/chat/completions", {**CHAT, "n": 10**6}, "n"),
        ("/chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens"),
        ("/chat/completions", {**CHAT, "temperature": 9}, "temperature"),
        ("/chat/completions", {**CHAT, "stop": ["a"] * 99}, "stop"),
        ("/chat/completions", {**CHAT, "stop": ""}, "stop"),
        ("/completions", {"model": "m", "prompt": ""}, "prompt"),
        ("/completions", {"model": "m", "prompt": "a", "echo": True}, "echo"),
        ("/responses", {"model": "m", "input": [{"type": "computer_call"}]}, "input"),
        ("/messages", {"model": "m", "messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
        ("/messages", {**MESSAGES, "messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
async def test_agent_endpoint_what_is_wrong_is_named(
    renderer: ChatRenderer, path: str, body: Any, field: str | None
) -> None:
    async with world(renderer) as here:
        status, said = await here.post(path, body)
    assert status == 400
    if path == "/messages":
        assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error"
        assert field in said["error"]["message"] or field == "messages"
    else:
        assert said["error"]["param"] == field and said["error"]["type"] == "invalid_request_error"


async def test_agent_endpoint_a_context_that_is_too_long_is_refused_in_openais_words(renderer: ChatRenderer) -> None:
    async with world(renderer, max_context=64) as here:
        for length in (100, 5000):  # the second one is not even tokenised
            messages = [{"role": "user", "content": "a" * length}]
            status, said = await here.post("/chat/completions", {"model": "m", "messages": messages})
            assert status == 400 and said["error"]["code"] == "context_length_exceeded"
        tools = [{"type": "function", "function": {"name": "f", "description": "b c " * 1_000}}]
        status, said = await here.post("/chat/completions", {**CHAT, "tools": tools})
        assert status == 400 and "bytes, which exceeds the model's context length" in said["error"]["message"]
        assert here.speaker.requests == []


async def test_agent_endpoint_other_pages_and_too_large_bodies_are_refused_in_the_vendors_form(
    renderer: ChatRenderer,
) -> None:
    async with world(renderer) as here:
        for path, body, expected in [("/nothing", {}, 404), ("/chat/completions", b" " * (9 * 2**20), 413)]:
            status, said = await here.post(path, body)
            assert status == expected and said["error"]["type"]
        headers = {"x-api-key": here.session.key, "Content-Encoding": "gzip"}
        async with here.http.post(here.server.base_url + "/messages", data=b"{}", headers=headers) as response:
            assert (
                response.status == 400 and "does not match the headers" in (await response.json())["error"]["message"]
            )
        for key, expected in [(here.session.key, 405), ("", 401)]:  # without one, nobody hears what there is
            headers = {"x-api-key": key}
            async with here.http.get(here.server.base_url + "/messages", headers=headers) as response:
                assert response.status == expected and (await response.json())["type"] == "error"


async def test_agent_endpoint_an_answer_that_comes_as_the_session_ends_is_neither_given_nor_kept(
    renderer: ChatRenderer,
) -> None:
    async with opened(Speaker(renderer, ["a"])) as (_, session):
        speaker = session._generate.__self__

        async def late(request: GenerationRequest) -> Generation:
            asyncio.get_running_loop().call_soon(session.close)  # after this, before whoever waits for it
            return await speaker.generate(request)

        session._generate = late
        with pytest.raises(RequestError, match="this session is closed"):
            await session.generate_answers(np.array([70], np.int32))
        assert len(speaker.generations) == 1 and session.calls == []


@pytest.mark.parametrize("prefix", ["/v1", "/v1/v1"])  # Anthropic's clients add their own to the address
async def test_agent_endpoint_the_model_is_listed_as_either_vendor_does(renderer: ChatRenderer, prefix: str) -> None:
    async with world(renderer) as here:
        address, headers = here.server.base_url.removesuffix("/v1") + prefix, {"x-api-key": here.session.key}
        async with here.http.get(f"{address}/models", headers=headers) as response:
            said = await response.json()
        async with here.http.get(f"{address}/models/m", headers=headers) as response:
            one = await response.json()
    assert [model["id"] for model in said["data"]] == ["policy"] and said["has_more"] is False
    assert (one["id"], one["object"], one["type"], one["display_name"]) == ("m", "model", "model", "m")


async def test_agent_endpoint_no_key_opens_another_session_and_a_key_opens_none_after_the_end(
    renderer: ChatRenderer,
) -> None:
    async with world(renderer, "a") as here:
        key = here.session.key
        wrong = [key[:-1], key + "x", key.partition(".")[0], "", "train-3.0.", key.swapcase(), "ü" * 9]
        for other in wrong:
            status, said = await here.post("/chat/completions", CHAT, key=other)
            assert (status, said["error"]["type"]) == (401, "authentication_error")
        with pytest.raises(RequestError, match="no API key"):  # a byte that is no UTF-8, as aiohttp gives it
            here.server.sessions.find(f"{here.session.session_id}.\udcff")
        for page in ("/v1/models", "/openapi.json"):
            async with here.http.get(here.server.base_url.removesuffix("/v1") + page) as response:
                assert response.status == 401
        here.server.sessions.end(here.session)
        status, said = await here.post("/chat/completions", CHAT)
        assert status == 401 and said["error"]["code"] == "session_over"
        assert here.speaker.requests == []


@pytest.mark.parametrize(("limits", "asked"), [({"turns": 2}, 2), ({"tokens": 3}, 2), ({"turns": 2, "tokens": 999}, 2)])
async def test_agent_endpoint_a_budget_that_is_used_up_refuses_more(
    renderer: ChatRenderer, limits: dict[str, int], asked: int
) -> None:
    async with world(renderer, "a", "b", "c", **limits) as here:
        statuses = [(await here.post("/chat/completions", CHAT))[0] for _ in range(4)]
        status, said = await here.post("/messages", MESSAGES)
    assert statuses == [200] * asked + [403] * (4 - asked)
    assert (status, said["error"]["type"]) == (403, "permission_error")
    assert here.session.exhausted and len(here.session.calls) == asked
    assert sum(len(call.token_ids) for call in here.session.calls) <= limits.get("tokens", 999)


async def test_agent_endpoint_requests_beyond_those_that_may_run_at_once_are_told_to_come_again(
    renderer: ChatRenderer,
) -> None:
    async with world(renderer, "a", "b", "c", parallel=2) as here:
        generate, may_end = here.session._generate, asyncio.Event()

        async def lasts(request: Any) -> Any:
            await may_end.wait()
            return await generate(request)

        here.session._generate = lasts
        asking = [asyncio.ensure_future(here.post("/chat/completions", CHAT)) for _ in range(3)]
        refused, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [asked.result()[0] for asked in refused] == [429]
        may_end.set()
        said = await asyncio.gather(*asking)
    assert sorted(status for status, _ in said) == [200, 200, 429]


# ---- what goes wrong


async def test_agent_endpoint_a_failure_of_ours_is_503_and_the_session_fails(renderer: ChatRenderer) -> None:
    async with world(renderer) as here:

        async def dies(request: object) -> Any:
            raise EngineDiedError("e", "killed")

        here.session._generate = dies
        headers = {"Authorization": f"Bearer {here.session.key}"}
        async with here.http.post(here.server.base_url + "/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
        with pytest.raises(EngineDiedError):
            await here.session.failed
        status, _ = await here.post("/chat/completions", CHAT)
        assert status == 503


async def test_agent_endpoint_an_agent_that_leaves_ends_its_request_at_the_engine(renderer: ChatRenderer) -> None:
    async with world(renderer) as here:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def waits(request: object) -> Any:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        here.session._generate = waits
        asking = asyncio.ensure_future(here.post("/chat/completions", CHAT))
        await begun.wait()
        asking.cancel()
        await asyncio.wait_for(ended.wait(), 5)
        assert here.session.calls == [] and not here.session.failed.done()


async def test_agent_endpoint_what_an_agent_that_left_was_sent_is_kept_and_no_more(renderer: ChatRenderer) -> None:
    async with world(renderer, "abcdefghij", "é1", "xy") as here:
        for _ in range(3):
            await here.post("/chat/completions", CHAT)
        first, second, third = here.session.calls
        here.session.truncate_call(first, 4)
        here.session.truncate_call(second, 1)
        here.session.truncate_call(third, 0)
        assert [renderer.decode(call.token_ids) for call in here.session.calls] == ["abcd", "é"]
        kept = here.session.calls[0]
        assert kept.finish_reason == "abort" and kept.logprobs.tolist() == first.logprobs.tolist()[:4]


async def test_agent_endpoint_a_session_that_ends_ends_what_it_asked(renderer: ChatRenderer) -> None:
    async with world(renderer) as here:
        begun = asyncio.Event()

        async def waits(request: object) -> Any:
            begun.set()
            await asyncio.Event().wait()

        here.session._generate = waits
        asking = asyncio.ensure_future(here.post("/chat/completions", CHAT))
        await begun.wait()
        here.server.sessions.end(here.session)
        status, said = await asking
        assert status == 401 and said["error"]["code"] == "session_over"
