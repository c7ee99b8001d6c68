"""Rollouts by agent programs: coroutines, processes, and programs in a sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from worlds.agents import Speaker, draw_of, request_of

from roll.agents.agent_loop import AgentLoop, open_agent_loop
from roll.agents.programs import check_agent
from roll.config.agents import AgentConfig
from roll.config.sandbox import SandboxConfig
from roll.data import ChatRenderer
from roll.errors import ConfigError, EngineDiedError, InfraError
from roll.models import load_tokenizer
from roll.types import Rollout

ASKS = """
    import json, os, sys, urllib.request

    def ask(messages):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

    task = sys.stdin.read()
    messages = [{"role": "user", "content": task}]
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "Sure?"})
    print("I say", ask(messages)["content"])
"""


@pytest.fixture
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(tiny_model)))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(ASKS))
    return file


def function(tmp_path: Path, body: str) -> str:
    """A user's coroutine in a file of its own."""
    file = tmp_path / f"agent_{abs(hash(body))}.py"
    head = "import asyncio, aiohttp\nasync def agent(task, base_url, api_key):\n"
    ask = """
    async def ask(text):
        async with aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            headers = {"Authorization": f"Bearer {api_key}"}
            async with http.post(base_url + "/chat/completions", json=body, headers=headers) as response:
                said = await response.json()
                return said["choices"][0]["message"]["content"] if response.status == 200 else response.status
    """
    file.write_text(head + ask + "\n" + textwrap.indent(textwrap.dedent(body), "    "))
    return f"{file}:agent"


@asynccontextmanager
async def agents(**settings: Any) -> AsyncIterator[AgentLoop]:
    async with open_agent_loop(AgentConfig(**settings), SandboxConfig(warm=0), max_context=4096) as loop:
        yield loop


async def rollout_by(
    loop: AgentLoop, speaker: Speaker, text: str = "What is 6 times 7?", name: str = "train-3.0"
) -> Rollout:
    draw = draw_of(speaker.renderer, text, metadata={"kind": "sum"})
    first = request_of(draw.token_ids, name)
    return await loop(draw, 0, first, speaker.generate, speaker.renderer)


# ---- coroutines


async def test_agent_loop_a_coroutine_is_trained_on_what_it_asked_and_scored_by_what_it_says(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    body = "first = await ask(task.text)\nawait ask(first + task.metadata['kind'])\nreturn 'It is ' + first"
    async with agents(function=function(tmp_path, body), train="all") as loop:
        speaker = Speaker(renderer, ["42", "yes"])
        rollout = await rollout_by(loop, speaker)
    assert rollout.text == "It is 42" and rollout.finish_reason == "stop"
    assert [renderer.decode(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns] == ["42", "yes"]
    assert (
        rollout.branches[0].start == 3
    )  # the first context is the prompt as it was drawn: only the second is a branch
    assert rollout.policy_versions.tolist() == [1, 1, 1, 2, 2, 2, 2]


async def test_agent_loop_without_an_answer_of_its_own_the_models_last_one_is_scored(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async with agents(function=function(tmp_path, "await ask('a')\nawait ask('b')")) as loop:
        assert (await rollout_by(loop, Speaker(renderer, ["one", "two"]))).text == "two"


@pytest.mark.parametrize(
    ("body", "limits", "says"),
    [
        ("await ask('a')\nraise KeyError('x')", {}, "KeyError"),
        ("await ask('a')\nawait asyncio.sleep(60)", {"time_s": 0.5}, "did not end within 0.5 s"),
        ("return 'nothing asked'", {}, "before it received a response"),
    ],
)
async def test_agent_loop_a_crash_a_hang_and_silence_are_failures_of_ours(
    renderer: ChatRenderer, tmp_path: Path, body: str, limits: dict[str, Any], says: str
) -> None:
    async with agents(function=function(tmp_path, body), limits=limits) as loop:
        with pytest.raises(InfraError, match=says):
            await rollout_by(loop, Speaker(renderer, lambda context: "x"))


async def test_agent_loop_requests_beside_the_longest_conversation_are_not_trained(
    renderer: ChatRenderer, program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A title at the end, longer than the answers, as some programs ask for one."""
    title = 'print(ask([{"role": "user", "content": "A title"}])["content"], file=sys.stderr)'
    program.write_text(f"{program.read_text()}\n{title}\n")
    for train, expected in (("main_chain", ["6", "42"]), ("all", ["6", "42", "T" * 9])):
        async with agents(command=[sys.executable, str(program)], train=train) as loop:
            with caplog.at_level("WARNING"):
                for _ in range(2):
                    rollout = await rollout_by(loop, Speaker(renderer, ["6", "42", "T" * 9]))
        assert [renderer.decode(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns] == expected
        assert rollout.text == "I say 42\n" and rollout.finish_reason == "stop"
    [note] = [record.message for record in caplog.records if "not part of its longest conversation" in record.message]
    assert "sent 1 requests" in note and "of 2 answers" in note and "Set rollout.agent.train to `all`" in note


async def test_agent_loop_without_an_answer_of_its_own_that_of_the_longest_conversation_is_scored(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    body = """
    async with aiohttp.ClientSession() as http:
        messages = []
        for text in ("a", "b"):
            messages.append({"role": "user", "content": text})
            headers = {"Authorization": f"Bearer {api_key}"}
            body = {"model": "m", "messages": messages}
            async with http.post(base_url + "/chat/completions", json=body, headers=headers) as response:
                messages.append((await response.json())["choices"][0]["message"])
    await ask("title")
    """
    async with agents(function=function(tmp_path, body)) as loop:
        rollout = await rollout_by(loop, Speaker(renderer, ["one", "two", "A title"]))
    assert rollout.text == "two" and len(rollout.turns) == 2


async def test_agent_loop_failures_are_scored_where_the_configuration_says_so(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    path = function(tmp_path, "await ask('a')\nraise KeyError('x')")
    async with agents(function=path, on_failure="score") as loop:
        rollout = await rollout_by(loop, Speaker(renderer, ["x"]))
    assert (rollout.text, rollout.finish_reason) == ("x", "length")


async def test_agent_loop_an_agent_that_used_its_budget_up_is_scored_however_it_ends(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    body = "while True:\n    if await ask('a') == 403:\n        raise RuntimeError('no more')"
    async with agents(function=function(tmp_path, body), limits={"turns": 3}, train="all") as loop:
        rollout = await rollout_by(loop, Speaker(renderer, lambda context: "x"))
    assert len(rollout.turns) == 3 and rollout.finish_reason == "length" and rollout.text == "x"


async def test_agent_loop_an_agent_that_fails_on_an_answer_that_was_cut_off_is_scored(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    path = function(tmp_path, "await ask('a')\nraise KeyError('an incomplete answer')")
    async with agents(function=path) as loop:
        rollout = await rollout_by(loop, Speaker(renderer, ["x" * 500]))
    assert (rollout.text, rollout.finish_reason) == ("x" * 400, "length")


async def test_agent_loop_a_failure_of_the_engine_ends_the_agent_at_once(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    async with agents(function=function(tmp_path, "await ask('a')\nawait asyncio.sleep(60)")) as loop:
        speaker = Speaker(renderer, [])

        async def dies(request: object) -> Any:
            raise EngineDiedError("e", "killed")

        speaker.generate = dies  # type: ignore[method-assign]
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(rollout_by(loop, speaker), 10)


async def test_agent_loop_a_rollout_that_is_not_wanted_any_more_ends_its_agent(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    flag = tmp_path / "ended"
    body = f"""
    try:
        await ask('a')
        await asyncio.sleep(60)
    finally:
        open({str(flag)!r}, "w").close()
    """
    async with agents(function=function(tmp_path, body)) as loop:
        speaker = Speaker(renderer, lambda context: "x")
        making = asyncio.ensure_future(rollout_by(loop, speaker))
        while not speaker.requests:
            await asyncio.sleep(0.01)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert flag.exists()


async def test_agent_loop_a_plain_function_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("def agent(task, base_url, api_key): ...")
    with pytest.raises(ConfigError, match="async def"):
        async with agents(function=f"{file}:agent"):
            pass


# ---- programs


async def test_agent_loop_a_program_finds_address_and_key_in_its_environment(
    renderer: ChatRenderer, program: Path
) -> None:
    async with agents(command=[sys.executable, str(program)]) as loop:
        speaker = Speaker(renderer, ["forty-two", "yes"])
        rollout = await rollout_by(loop, speaker, "ünï")
    assert rollout.text == "I say yes\n"
    assert len(rollout.turns) == 2 and rollout.branches == ()  # its first context is the prompt as it was drawn
    assert "ünï" in renderer.decode_raw(speaker.requests[0].token_ids)


async def test_agent_loop_a_program_that_fails_says_why(renderer: ChatRenderer) -> None:
    async with agents(command=[sys.executable, "-c", "import sys; sys.exit('no such thing')"]) as loop:
        with pytest.raises(InfraError, match="exit code 1: no such thing"):
            await rollout_by(loop, Speaker(renderer, []))


async def test_agent_loop_a_program_that_hangs_is_ended_with_all_that_it_started(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; wait"
    async with agents(command=["sh", "-c", script], limits={"time_s": 1.0}) as loop:
        with pytest.raises(InfraError, match="did not end"):
            await asyncio.wait_for(rollout_by(loop, Speaker(renderer, [])), 20)
    await _ended(int(child.read_text()))


async def test_agent_loop_what_a_program_leaves_behind_holds_nothing_up(renderer: ChatRenderer, tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; exit 3"
    async with agents(command=["sh", "-c", script]) as loop:
        with pytest.raises(InfraError, match="exit code 3"):
            await asyncio.wait_for(rollout_by(loop, Speaker(renderer, [])), 20)
    await _ended(int(child.read_text()))


async def _ended(process: int) -> None:
    async with asyncio.timeout(20):
        while _alive(process):
            await asyncio.sleep(0.01)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]


async def test_agent_loop_a_program_that_fails_says_first_what_the_endpoint_refused(renderer: ChatRenderer) -> None:
    asks = """
import json, os, urllib.request
wrong = [("chat/completions", {"messages": []}), ("responses", {"input": "a", "tools": [{"type": "mcp"}]})]
for path, body in wrong * 2:
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/" + path
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps({"model": "m", **body}).encode(), headers))
    except urllib.error.HTTPError:
        pass
raise SystemExit("API error")
"""
    async with agents(command=[sys.executable, "-c", asks]) as loop:
        with pytest.raises(InfraError) as raised:
            await rollout_by(loop, Speaker(renderer, []))
    assert str(raised.value) == (
        "the agent failed: the endpoint rejected /v1/chat/completions: 400 messages: List should have at least 1 item "
        "after validation, not 0; /v1/responses: 400 unsupported tools: mcp. Only the vendor's models or "
        "servers support them: disable the tool in the agent's settings, or give the agent a function with the same "
        "effect. "
        "The agent: exit code 1: API error"
    )
    assert raised.value.__cause__ is None  # it is printed once


async def test_agent_loop_a_long_traceback_keeps_its_beginning_and_its_last_line(renderer: ChatRenderer) -> None:
    fails = "def f(n):\n    if n: g(n)\n    raise KeyError('what')\ndef g(n): f(n - 1)\nf(40)"
    async with agents(command=[sys.executable, "-c", fails]) as loop:
        with pytest.raises(InfraError) as raised:
            await rollout_by(loop, Speaker(renderer, []))
    said = str(raised.value)
    assert said.startswith("the agent failed: exit code 1: Traceback (most recent call last):\n  File")
    assert said.endswith("\nKeyError: 'what'") and len(said) < 1400 and said.count("Traceback") == 1
    assert " characters …]\n  " in said


async def test_agent_loop_a_program_that_complains_where_it_prints_is_quoted(renderer: ChatRenderer) -> None:
    async with agents(command=["sh", "-c", "echo 'API Error: no'; exit 1"]) as loop:
        with pytest.raises(InfraError, match="exit code 1: API Error: no"):
            await rollout_by(loop, Speaker(renderer, []))


# ---- directories and answers


async def test_agent_loop_every_rollout_works_in_a_copy_of_its_prompts_directory(
    renderer: ChatRenderer, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sum", "product"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "start.txt").write_text(name)
    monkeypatch.chdir(tmp_path)
    more = "import pathlib\nprint(pathlib.Path.cwd().name, *sorted(os.listdir()), open('start.txt').read())"
    more += "\nopen('start.txt', 'w').write('changed')\nopen('new', 'w').close()"
    program.write_text(f"{program.read_text()}\n{more}\n")
    command = [sys.executable, program.name]  # in the run's directory, not in the rollout's
    async with agents(command=command, directory="tasks/{kind}") as loop:
        rollouts = await asyncio.gather(
            *(rollout_by(loop, Speaker(renderer, ["a", "b"]), name=f"t-{n}") for n in range(3))
        )
    assert [rollout.text for rollout in rollouts] == ["I say b\nsum start.txt sum\n"] * 3
    assert (tmp_path / "tasks" / "sum" / "start.txt").read_text() == "sum"
    async with agents(command=command, directory="tasks/{which}") as loop:
        with pytest.raises(ConfigError, match=r"no column 'which'. Columns: kind"):
            await rollout_by(loop, Speaker(renderer, []))


async def test_agent_loop_a_fresh_directory_is_empty_and_removed(
    renderer: ChatRenderer, program: Path, tmp_path: Path
) -> None:
    program.write_text(f"{program.read_text()}\nprint(os.listdir(), os.getcwd())\nopen('made', 'w').close()\n")
    async with agents(command=[sys.executable, str(program)], directory="fresh", answer_pattern=r"\[\] (.+)") as loop:
        places = [(await rollout_by(loop, Speaker(renderer, ["a", "b"]))).text for _ in range(2)]
    assert len(set(places)) == 2 and not any(Path(place).exists() for place in places)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"answer_pattern": "say (.*)"}, "b"),
        ({"answer_pattern": "I|say"}, "say"),
        ({"answer_pattern": "nothing(x)?"}, ""),
        ({"answer_pattern": "say(x)?"}, ""),
        ({"answer_file": "out/answer.txt"}, "first\nlast\n"),
        ({"answer_file": "out/answer.txt", "answer_pattern": "(?m)^.+$"}, "last"),
        ({"answer_file": "missing.txt"}, ""),
    ],
)
async def test_agent_loop_the_answer_is_from_a_file_or_a_pattern(
    renderer: ChatRenderer, program: Path, settings: dict[str, str], expected: str
) -> None:
    more = "os.mkdir('out')\nopen('out/answer.txt', 'w').write('first\\nlast\\n')"
    program.write_text(f"{program.read_text()}\n{more}\n")
    async with agents(command=[sys.executable, str(program)], directory="fresh", **settings) as loop:
        assert (await rollout_by(loop, Speaker(renderer, ["a", "b"]))).text == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"command": ["python3"], "directory": "no/such"}, "agent.directory: 'no/such' does not exist"),
        ({"command": ["no-such-program"]}, "program 'no-such-program' is not on the PATH"),
    ],
)
def test_agent_loop_what_an_agent_lacks_is_found_before_the_run(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_agent(AgentConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"function": "a.py:b", "directory": "fresh", "answer_file": "a"},
            "directory and answer_file can be set only with a",
        ),
        ({"command": ["a"], "answer_file": "../a"}, "inside the agent's directory"),
        ({"command": ["a"], "answer_file": "/a"}, "inside the agent's directory"),
        ({"command": ["a"], "answer_pattern": "("}, "is not a valid regular expression"),
    ],
)
def test_agent_loop_settings_of_an_agent_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        AgentConfig(**settings)


# ---- sandboxes


async def test_agent_loop_a_program_in_a_sandbox_works_with_the_prompts_files_and_leaves_its_answer(
    renderer: ChatRenderer, program: Path, tmp_path: Path
) -> None:
    if not shutil.which("bwrap"):
        pytest.skip("there is no bubblewrap here")
    task = tmp_path / "tasks" / "sum" / "deep"
    task.mkdir(parents=True)
    (task / "start.txt").write_text("begin")
    program.write_text(f"{program.read_text()}\nopen('answer', 'w').write(open('deep/start.txt').read() + ' end')\n")
    async with agents(
        command=["python3", "agent.py"],
        sandbox=True,
        files={"agent.py": str(program)},
        directory=str(tmp_path / "tasks" / "{kind}"),
        answer_file="answer",
        limits={"time_s": 60.0},
    ) as loop:
        assert (await rollout_by(loop, Speaker(renderer, ["a", "b"]))).text == "begin end"


async def test_agent_loop_a_program_in_a_sandbox_reaches_the_model_and_nothing_else(
    renderer: ChatRenderer, program: Path, tmp_path: Path
) -> None:
    if not shutil.which("bwrap") or not shutil.which("curl"):
        pytest.skip("there is no bubblewrap or no curl here")
    shell = Path(__file__).parents[3] / "examples" / "agents" / "ask_twice.sh"
    async with agents(
        command=["sh", "ask_twice.sh"], sandbox=True, files={"ask_twice.sh": str(shell)}, limits={"time_s": 60.0}
    ) as loop:
        speaker = Speaker(renderer, ['6 "times" 7\nis 42', "42"])
        rollout = await rollout_by(loop, speaker)
        assert rollout.text.strip() == '"42"'
        assert len(rollout.turns) == 2 and rollout.branches == ()
    outside = "import socket; socket.create_connection(('127.0.0.1', int(__import__('sys').argv[1])), 5)"
    async with agents(
        command=["python3", "-c", outside, "9"], sandbox=True, limits={"time_s": 60.0}, on_failure="reissue"
    ) as loop:
        port = loop._server.base_url.rpartition(":")[2].removesuffix("/v1")
        loop._program._command = ["python3", "-c", outside, port]  # type: ignore[attr-defined]
        with pytest.raises(InfraError, match="refused"):
            await rollout_by(loop, Speaker(renderer, []))
