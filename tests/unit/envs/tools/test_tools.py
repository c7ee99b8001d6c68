"""Calculator, search, and tools around an environment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from roll.envs.tools import Tool, Toolbox, ToolCall, ToolEnv, ToolError, build_tools
from roll.envs.tools.calculator import Calculator, calculate
from roll.envs.tools.search import BM25, FolderSearch, HttpSearch, Passage, Search
from roll.errors import ConfigError, InfraError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14),
        ("2^3^2", 512),
        ("-2^2", -4),
        ("(1+2)*3!", 18),
        ("7 // 2 + 7 % 2", 4),
        ("10/5", 2),
        ("1/4", 0.25),
        ("2**-1", 0.5),
        ("max(1, 2, 3) - min(4, 5)", -1),
        ("sqrt(16)", 4),
        ("comb(5,2)", 10),
        ("round(2.567, 1)", 2.6),
        ("1e3 × 2 ÷ 4", 500.0),
        ("gcd(12, 18) * lcm(4, 6)", 72),
        ("cos(pi)", -1.0),
        ("2^4000 / 2^3999", 2),
    ],
)
def test_tool_the_calculator_computes(expression: str, value: float) -> None:
    assert calculate(expression) == pytest.approx(value)
    assert type(calculate(expression)) is type(value)


HOPELESS = [
    *("", "1 +", "1/0", "9**9**9", "2^5000", "(" * 60, "-" * 900, "log(-1)", "1e400", "501!", "2.5!", "x", "1 2"),
    *("__import__('os')", "max()", "gcd(1.5, 2)", "comb(10^9, 5)", "round(1, 10^9)", "(-8)^(1/3)", "1" * 2000, "(1"),
    *("sqrt 4", "1e999*0", "floor(1e400)"),
]


@pytest.mark.parametrize("expression", HOPELESS)
def test_tool_what_has_no_value_is_told(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@given(st.text("0123456789+-*/%^!()., eE" + "sqrtlogmaxpi", max_size=60))
def test_tool_the_calculator_never_raises_anything_else(expression: str) -> None:
    try:
        assert math.isfinite(calculate(expression)) or True
    except ToolError as error:
        assert len(str(error)) < 400
    except OverflowError:  # of isfinite: a whole number beyond floating point is a value
        pass


def test_tool_bm25_scores_as_computed_by_hand() -> None:
    index = BM25([Passage(title="", text="a b"), Passage(title="", text="a a c d"), Passage(title="", text="c")])
    # lengths 2, 4, 1; mean 7/3; "a" is in 2 of 3 passages: idf = ln(1 + 1.5 / 2.5)
    idf = math.log(1.6)
    expected = [
        idf * 1 / (1 + 1.2 * (0.25 + 0.75 * 2 * 3 / 7)),
        idf * 2 / (2 + 1.2 * (0.25 + 0.75 * 4 * 3 / 7)),
    ]
    numbers, parts = index._postings["a"]
    assert list(numbers) == [0, 1]
    assert list(parts) == pytest.approx(expected)
    assert [p.text for p in index.search("a", 5)] == ["a a c d", "a b"]
    assert index.search("nothing of it", 5) == []


def test_tool_a_folder_is_searched_by_its_passages(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "france.txt").write_text("Paris is the capital of France.")
    (tmp_path / "italy.md").write_text("word " * 200 + "Rome is the capital of Italy.")
    (tool,) = build_tools([{"tool": "search", "folder": str(tmp_path), "num_results": 1}])
    assert isinstance(tool, FolderSearch)
    assert tool.call({"query": "France capital"}) == "[1] below/france.txt: Paris is the capital of France."
    assert "Rome" in tool.call({"query": "rome"})
    assert tool.call({"query": "zebra"}) == "Nothing was found."
    with pytest.raises(ConfigError, match=r"no \.txt or \.md files"):
        build_tools([{"tool": "search", "folder": str(tmp_path / "missing")}])


async def test_tool_a_search_server_is_asked_and_its_failures_are_ours() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if asked[-1]["queries"] == ["break"]:
            return web.json_response({"other": 1})
        if asked[-1]["queries"] == ["nest"]:
            return web.Response(text="[" * 100_000, content_type="application/json")
        found = [{"document": {"contents": f'"Title {n}"\nText {n}'}, "score": 1.0} for n in range(5)]
        return web.json_response({"result": [found]})

    app = web.Application()
    app.router.add_post("/retrieve", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    tool = HttpSearch(f"http://127.0.0.1:{port}/retrieve", num_results=2)
    assert await tool.call({"query": " x "}) == "[1] Title 0: Text 0\n[2] Title 1: Text 1"
    assert asked == [{"queries": ["x"], "topk": 2}]
    for query in ("break", "nest"):
        with pytest.raises(InfraError, match="did not return"):
            await tool.call({"query": query})
    await runner.cleanup()
    with pytest.raises(InfraError, match="search server"):
        await tool.call({"query": "x"})


class Echo:
    """Ends with the action as its observation."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "question", {"state": "start"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return action, 1.0, True, False, {"state": "end"}

    def spawn(self, same_state: bool = False) -> Echo:
        return Echo()


REWARDS = {"call": 0.05, "success": 0.25, "error": -0.5, "format": -0.1}


def test_tool_calls_are_answered_and_all_else_reaches_the_environment() -> None:
    env = ToolEnv(Echo(), [Calculator()], max_tool_uses=4, rewards=REWARDS)
    observation, info = env.reset(0)
    assert observation.startswith("question\n\nTools:\n<calculator>")
    assert info["state"] == "start"
    assert not info["use_tool"]
    observation, reward, ended, cut_off, info = env.step("I compute <calculator>6*7</calculator>")
    assert observation == "<result>\n42\n</result>"
    assert (reward, ended, cut_off) == (pytest.approx(0.3), False, False)
    assert (info["tool_use_counter"], info["tool_success_counter"], info["use_tool"]) == (1, 1, True)
    first_state = info["state"]
    _, reward, *_, info = env.step("<calculator>1/0</calculator>")
    assert reward == pytest.approx(-0.45)
    assert info["state"] != first_state
    _, reward, *_, info = env.step("<calculator>1")
    assert reward == pytest.approx(-0.1)
    assert info["tool_format_error_counter"] == 1
    observation, *_ = env.step("<calculator>1</calculator><calculator>2</calculator>")
    assert observation.endswith("answer now.")
    assert "2" not in observation
    observation, reward, ended, _, info = env.step("<calculator>3</calculator>")
    assert (observation, reward, ended) == ("<calculator>3</calculator>", 1.0, True), "no uses left"
    assert info["tool_use_counter"] == 4
    assert env.reset(1)[1]["prev_ep_tool_use_counter"] == 4


def test_tool_equal_histories_have_equal_states_and_others_have_others() -> None:
    def state(*actions: str) -> str:
        env = ToolEnv(Echo(), [Calculator()])
        env.reset(0)
        return [env.step(action)[-1]["state"] for action in actions][-1]

    assert state("<calculator>1</calculator>") == state("<calculator>1</calculator>")
    assert state("<calculator>1</calculator>") != state("<calculator>2</calculator>")


def test_tool_a_copy_in_the_same_state_has_used_its_tools_as_often() -> None:
    env = ToolEnv(Echo(), [Calculator()], max_tool_uses=2)
    env.reset(0)
    env.step("<calculator>1</calculator>")
    twin = env.spawn(same_state=True)
    assert twin.step("<calculator>2</calculator>") == env.step("<calculator>2</calculator>")
    assert twin.counts == env.counts and env.counts["tool_use_counter"] == 2
    assert env.spawn().counts["tool_use_counter"] == 0


class Slow:
    name, description = "slow", "Waits."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {}}

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        await asyncio.Event().wait()
        return ""


class Broken(Slow):
    name = "broken"

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        raise KeyError("inside")


async def test_tool_failures_of_tools_are_ours_and_not_the_models() -> None:
    box = Toolbox(tools=[Slow(), Broken()], call_time_limit_s=0.01)
    with pytest.raises(InfraError, match="'slow' exceeded"):
        await box.execute(ToolCall(name="slow", arguments={}))
    with pytest.raises(InfraError, match="'broken' failed: KeyError"):
        await box.execute(ToolCall(name="broken", arguments={}))


async def test_tool_an_environment_with_a_waiting_tool_is_awaited() -> None:
    class Late(Slow):
        async def call(self, arguments: Mapping[str, Any], /) -> str:
            await asyncio.sleep(0)
            return "late"

    env = ToolEnv(Echo(), [Late()])
    await env.reset(0)
    assert "late" in (await env.step("<slow></slow>"))[0]
    assert (await env.step("an answer"))[2] is True


class Typed(Slow):
    name = "typed"
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "count": {"type": "integer"},
            "mode": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["count"],
    }

    async def call(self, arguments: Mapping[str, Any], /) -> str:
        return str(sorted(arguments))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "'count' is missing"),
        ({"count": "three"}, "'count': 'three' is not of type 'integer'"),
        ({"count": 1, "other": 2}, "there is no 'other'; it has count, mode, tags"),
        ({"count": 1, "mode": "c"}, "'mode': 'c' is not one of"),
        ({"count": 1, "tags": ["x", 3]}, "'tags.1': 3 is not of type 'string'"),
        ({"count": "9" * 10_000}, "'count'"),
    ],
)
async def test_tool_wrong_arguments_are_said_to_the_model(arguments: dict[str, Any], complaint: str) -> None:
    result = await Toolbox(tools=[Typed()]).execute(ToolCall(name="typed", arguments=arguments))
    assert not result.ok
    assert complaint in result.text
    assert len(result.text) < 500


async def test_tool_long_results_lose_their_middle() -> None:
    class Long(Slow):
        async def call(self, arguments: Mapping[str, Any], /) -> str:
            return "a" * 5_000 + "b" * 5_000

    result = await Toolbox(tools=[Long()], max_result_chars=100).execute(ToolCall(name="slow", arguments={}))
    assert result.text == "a" * 50 + "\n[… 9900 characters left out …]\n" + "b" * 50


def test_tool_unknown_tools_and_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool 'calculater'. Did you mean 'calculator'"):
        build_tools(["calculater"])
    with pytest.raises(ConfigError, match="rejected the options"):
        build_tools([{"tool": "calculator", "precision": 3}])
    with pytest.raises(ConfigError, match=r"'math:sqrt'|rejected"):
        build_tools(["math:sqrt"])
    with pytest.raises(ConfigError, match="under 'tool'"):
        build_tools([{"folder": "x"}])
    with pytest.raises(ConfigError, match="must be unique, got duplicates: calculator"):
        ToolEnv(Echo(), [Calculator(), Calculator()])
    with pytest.raises(ConfigError, match=r"unknown tool call format 'hermse'. Did you mean 'hermes'"):
        ToolEnv(Echo(), [Calculator()], tool_format="hermse")


def test_tool_shipped_tools_obey_the_protocol() -> None:
    for tool in (Calculator(), Search(BM25([])), HttpSearch("http://localhost")):
        assert isinstance(tool, Tool)
