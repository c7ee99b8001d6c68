"""Tools that a configuration names: around an environment wherever it runs, a user's own in a process."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.episodes import Engine, check_exact
from tests.worlds.published_templates import PUBLISHED, published_tokenizer

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import EnvironmentData
from roll.config.load import load_config
from roll.config.sandbox import SandboxConfig
from roll.data import ChatRenderer
from roll.data.environment import EpisodeList
from roll.envs.hosting import EnvHosts
from roll.envs.run_hosts import open_hosts
from roll.envs.server import serve_environments
from roll.envs.tools import Tool, ToolError, build_tools
from roll.envs.tools.function import FunctionTool
from roll.errors import ConfigError, DataError, InfraError, UserError
from roll.pipelines.environments import collect_first_observations
from roll.rollout.episode import play_episode
from roll.rollout.episode_start import EpisodePlan
from roll.types import GenerationRequest, PromptDraw, Rollout, SamplingParams

ONE_QUESTION = {"environment": "math:Generated-v0-easy", "options": {"kinds": ["arithmetic"]}, "num_turns": 3}


def entry(**changes: Any) -> EnvironmentData:
    return EnvironmentData(**{**ONE_QUESTION, **changes})


def test_tool_config_names_and_sections_become_arguments_of_with_tools() -> None:
    given = (
        entry(
            tools=["calculator", {"tool": "search", "folder": "notes"}, {"tool": "a.b:c", "options": {"d": 1}}],
            tool_calls={"format": "json", "max_uses": 2, "rewards": {"format": -0.1}},
        )
        .build_settings(0)
        .tools
    )
    assert given == {
        "tools": [
            {"tool": "calculator"},
            {"tool": "search", "folder": "notes", "num_results": 3, "name": "search"},
            {"tool": "a.b:c", "d": 1},
        ],
        "tool_format": "json",
        "max_tool_uses": 2,
        "rewards": {"call": 0.0, "success": 0.0, "error": 0.0, "format": -0.1},
        "explain": True,
        "max_result_chars": 8_000,
        "call_time_limit_s": 120.0,
    }
    assert entry().build_settings(0).tools == {}


def test_tool_config_episodes_with_other_tools_are_other_data() -> None:
    plain, with_tool = (EpisodeList(each, "d", 0, 5).fingerprint for each in (entry(), entry(tools=["calculator"])))
    assert plain != with_tool


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("tools: [calculater]", "got 'calculater'. Did you mean 'calculator'?"),
        ("tools: [{tool: search}]", "missing key 'environments.0.tools.0.folder'"),
        ("tools: [{tool: mcp}]", "exactly one of `command` and `url` must be set"),
        ("tools: [{tool: python, limit: 3}]", "unknown key 'environments.0.tools.0.limit'"),
        ("tools: [calculator]\n    num_turns: 1", "a tool call is a separate turn"),
        ("tool_calls: {max_uses: 3}", "tool_calls requires tools: list them"),
    ],
)
def test_tool_config_what_is_wrong_with_tools_is_said_in_a_line(tmp_path: Path, written: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    turns = "" if "num_turns" in written else "num_turns: 3\n    "
    file.write_text(
        "pipeline: agentic\nname: x\nmodel: m\nalgorithm: {type: gi_gpo}\ntraining: {num_steps: 1}\n"
        f"environments:\n  - environment: guess_number\n    {turns}{written}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert message in str(caught.value)


@asynccontextmanager
async def places(host: str) -> AsyncIterator[tuple[EnvHosts, dict[str, str]]]:
    """All hosts of a run, and what an entry needs to run at this one."""
    pool = LocalWorkerPool(1)
    try:
        async with open_hosts(pool, SandboxConfig()) as hosts:
            if host != "http":
                yield hosts, {"host": host}
                return
            async with serve_environments(EnvHosts(), {"math:Generated-v0-easy"}) as url:
                yield hosts, {"host": "http", "url": url}
    finally:
        await pool.close()


@pytest.mark.parametrize("host", ["loop", "pool", "http"])
async def test_tool_config_an_environment_has_tools_wherever_it_runs(host: str) -> None:
    async with places(host) as (hosts, where):
        given = entry(tools=["calculator"], tool_calls={"max_uses": 2}, **where).build_settings(4)
        async with hosts.open(given) as env:
            asked, _ = await env.reset(4)
            assert asked.startswith("What is ") and "<calculator>…</calculator>: Computes" in asked
            sum_asked = asked[len("What is ") : asked.index("?")]
            told, reward, ended, _, info = await env.step(f"<calculator>{sum_asked}</calculator>")
            assert not ended and reward == 0 and info["use_tool"]
            assert (await env.step("<calculator>1 +</calculator>"))[0].endswith("answer now.")
            _, reward, ended, _, info = await env.step(f"\\boxed{{{told.split()[1]}}}")
            assert ended and reward == 1 and not info["use_tool"]
        found = hosts.collect_metrics()
        assert found["env/math:Generated-v0-easy/tool_uses"] == 2
        assert found["env/math:Generated-v0-easy/tool_error_share"] == 0.5


async def test_tool_config_before_a_run_a_users_own_class_acts_once(tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        "class Old:\n  def reset(self, seed=None): return 'go', {}\n  def step(self, a): return a, 0.0, True, {}"
    )
    with pytest.raises(UserError, match=r"`step\(action\)` returns .* return five values.* Every episode would fail"):
        await collect_first_observations([entry(environment=f"{file}:Old", options={})], SandboxConfig())


async def test_tool_config_before_a_run_what_tools_need_is_missed(tmp_path: Path) -> None:
    for tool, message in [
        (
            {"tool": "http_search", "url": "http://127.0.0.1:9/retrieve"},
            r"search server http://127\.0\.0\.1:9/retrieve",
        ),
        ({"tool": "search", "folder": str(tmp_path)}, r"has no \.txt or \.md files"),
        (f"{tmp_path}/own.py:lookup", "does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            await collect_first_observations([entry(tools=[tool])], SandboxConfig())
    begun = await collect_first_observations([entry(tools=["calculator"])], SandboxConfig())
    assert "<calculator>" in begun["environment"][0]


OWN = """
    import os
    from roll.envs.tools import ToolError

    def lookup(word: str, times: int = 1, book: dict = {}) -> str:
        "Looks a word up."
        if word == "die":
            os._exit(3)
        if word not in book:
            raise ToolError(f"no {word} in here, {os.getpid()}")
        return book[word] * times

    class Both:
        async def open(self):
            from roll.envs.tools.function import FunctionTool
            return [FunctionTool(lookup, {"book": {"a": "class "}})]

        async def close(self):
            pass
    """


@pytest.mark.parametrize("name", ["lookup", "Both"])
async def test_tool_config_a_users_own_tool_costs_its_own_episode_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    options = {"book": {"a": "class "}} if name == "lookup" else {}
    own = [{"tool": f"{tmp_path}/own.py:{name}", "options": options}]
    async with places("loop") as (hosts, _):
        given = entry(tools=own).build_settings(0)

        async def used(action: str) -> str:
            async with hosts.open(given) as env:
                assert "<lookup><word>…</word><times>…</times></lookup>: Looks a word up." in (await env.reset(0))[0]
                return (await env.step(action))[0]

        twice, one, other, died = await asyncio.gather(
            used("<lookup><word>a</word><times>2</times></lookup>"),
            *(used("<lookup>b</lookup>") for _ in range(2)),
            used("<lookup>die</lookup>"),
            return_exceptions=True,
        )
        assert hosts.collect_metrics()["env/math:Generated-v0-easy/failures"] == 1.0
    assert twice == "<result>\nclass class \n</result>"
    assert "no b in here" in str(one) and one != other, "each episode has a process of its own"
    assert isinstance(died, InfraError) and "code 3" in str(died)


async def test_tool_config_tools_are_closed_however_an_episode_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Source:
        async def open(self) -> list[Tool]:
            return build_tools(["calculator"])  # type: ignore[return-value]

        async def close(self) -> None:
            closed.append("tools")
            raise RuntimeError("does not close")

    monkeypatch.setattr("roll.envs.tools.build.load_function", lambda name, kind: Source)
    hosts = EnvHosts()
    given = entry(tools=["own.module:Source"]).build_settings(0)

    async def played(failure: BaseException) -> None:
        async with hosts.open(given) as env:
            await env.reset(0)
            raise failure

    for failure in (ValueError("ours"), asyncio.CancelledError()):
        with pytest.raises(type(failure)):
            await played(failure)
    assert closed == ["tools", "tools"] and hosts.num_open == 0


def test_tool_config_a_functions_signature_is_what_a_model_may_give() -> None:
    def find(words: list[str], most: int = 3, folder: str = "") -> int:
        """Finds
        words."""
        return len(words) * most + len(folder)

    tool = FunctionTool(find, {"folder": "four"})
    assert (tool.name, tool.description) == ("find", "Finds\nwords.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}},
            "most": {"type": "integer", "default": 3},
        },
        "required": ["words"],
    }
    assert tool.call({"words": ["a", "b"]}) == "10"


def _silent(word: str) -> str:
    return word


def _any(*words: str) -> str:
    """Takes anything."""
    return "".join(words)


def _odd(word: Path | ToolError) -> str:
    """Takes what no model can write."""
    return str(word)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (_silent, {}, "has no docstring"),
        (_any, {}, r"its argument '\*words: .*' cannot be passed by name"),
        (_odd, {}, "tool '_odd'"),
        (lambda: None, {}, "has no docstring"),
    ],
)
def test_tool_config_a_function_that_is_no_tool_is_refused(
    function: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionTool(function, options)


def _played(default_model: Path, template: str, answers: list[str]) -> tuple[Rollout, Engine, Any]:
    tokenizer = published_tokenizer(default_model, template)
    stop = (PUBLISHED[template] or ("<|im_end|>",))[0]
    written = [tokenizer.encode(answer + stop, add_special_tokens=False) for answer in answers]
    engine = Engine(written, (written[0][-1],))
    given = entry(tools=["calculator"], tool_calls={"format": "template"})
    prompt = EpisodeList(given, "d", 0, 1)[0]
    renderer = ChatRenderer(tokenizer)
    draw = PromptDraw(draw_id=0, prompt=prompt, token_ids=renderer.render(prompt.messages))
    sampling = SamplingParams(max_new_tokens=60, seed=1, stop_token_ids=engine.stops)
    first = GenerationRequest(request_id="train-0.0", token_ids=draw.token_ids, sampling=sampling)
    return asyncio.run(play_episode(draw, 0, first, engine.generate, renderer, plan=EpisodePlan())), engine, tokenizer


@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'),
        ("llama3_1", '{"name": "calculator", "parameters": {"expression": "6*7"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "6*7"}, "id": "call00001"}]'),
    ],
)
def test_tool_config_a_template_that_knows_tools_shows_them_in_its_own_words(
    default_model: Path, template: str, call: str
) -> None:
    rollout, engine, tokenizer = _played(default_model, template, [call, "\\boxed{1}"])
    check_exact(rollout, engine)
    asked, answered = (tokenizer.decode(request.token_ids) for request, _ in engine.seen)
    assert "Computes an arithmetic expression" in asked and "<calculator>" not in asked
    assert "42" in answered[len(asked) + len(call) :]
    assert len(rollout.turns) == 2


def test_tool_config_a_template_without_tools_is_said_to_have_none(default_model: Path) -> None:
    with pytest.raises(DataError, match="does not support tools: choose another"):
        _played(default_model, "smollm2", ["x"])
