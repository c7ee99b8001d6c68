"""`roll env`: listing, playing, rollouts and checks, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from roll.cli.commands import CommandState, roll
from roll.cli.play import PlayerSettings, build_messages, play_episodes
from roll.envs.transcripts import Transcript
from roll.errors import InfraError, UserError
from roll.types import ImagePart, TextPart

OWN = """
import random

class Maze:
    def __init__(self, size=3):
        self.size = size
    def reset(self, seed=None):
        self.at = random.Random(seed).randrange(self.size)
        return f"You stand at {self.at} of {self.size}.", {"state": str(self.at)}
    def step(self, action):
        return "Done.", 1.0, True, False, {"state": "end"}
    def sample_random_action(self):
        return "on"

class Broken(Maze):
    def step(self, action):
        return "Done.", 1.0, True, {}

class NoInfo(Maze):
    def reset(self, seed=None):
        return "Go."

class Raises(Maze):
    def step(self, action):
        return {}["exit"]

class Unbuilt(Maze):
    def __init__(self):
        raise RuntimeError("no licence")

class NotOne:
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "mazes.py"
    file.write_text(OWN)
    return str(file)


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(roll, ["env", *arguments], input=typed, obj=CommandState(), standalone_mode=False)


def test_cli_env_names_are_listed_with_their_arguments() -> None:
    shown = run("list", "sokoban").output
    assert "game:Sokoban-v0-hard    dim_room=(8, 8), num_boxes=4, max_turns=50" in shown
    assert "GuessTheNumber" not in shown and "file.py:Class" in shown
    assert "gem:NAME" not in shown and "gem:NAME" in run("list", "gem").output
    listed = [json.loads(line) for line in run("list", "--json").output.splitlines()]
    assert {"id": "guess_number", "entry_point": "roll.envs.guess_number:GuessNumber", "options": {}} in listed


def test_cli_env_a_person_types_what_stands_in_the_box(tmp_path: Path) -> None:
    page = tmp_path / "played.html"
    found = run("play", "game:GuessTheNumber-v0-easy", "max_number=3", "--seed=1", f"--html={page}", typed="3\n1\n2\n")
    assert "Enter your first guess." in found.output and "Right! The number is" in found.output
    assert "rewards 1" in found.output and "\\boxed{3}" in page.read_text()


def test_cli_env_what_was_won_is_added_to_demonstrations_and_what_was_not_is_not(tmp_path: Path) -> None:
    shown = tmp_path / "shown.jsonl"
    game = ("play", "game:GuessTheNumber-v0-easy", "max_number=3", "--seed=1", f"--demonstrations={shown}")
    for typed, added in (("1\n", 0), ("3\n", 0), ("1\n3\n", 1)):  # 3 is right: at once, nothing lies before it
        assert f"{added} of 1 episode(s) added" in run(*game, typed=typed).output
    assert json.loads(shown.read_text()) == {"seed": 1, "actions": ["\\boxed{1}", "\\boxed{3}"]}


def test_cli_env_an_empty_line_plays_at_random_and_an_end_of_input_leaves(tmp_path: Path) -> None:
    page = tmp_path / "played.html"
    found = run("play", "game:Sokoban-v0-easy", f"--html={page}", typed="\n")
    assert found.exception is None and "left unfinished after 1 turns" in found.output
    assert "\\boxed{" in found.output and page.is_file()


def test_cli_env_random_rollouts_are_shown_counted_and_written(own: str, tmp_path: Path) -> None:
    text = tmp_path / "episodes.txt"
    found = run("rollout", f"{own}:Maze", "size=5", "--episodes=3", "--seed=4", f"--text={text}")
    assert "You stand at " in found.output and "seed 6" in found.output
    assert "3 episode(s): mean reward 1.000, from 1 to 1; 1.0 turns on average." in found.output
    assert text.read_text().count("═══ terminated after 1 turns, rewards 1") == 3
    assert "You stand" not in run("rollout", f"{own}:Maze", "--quiet").output


def test_cli_env_a_check_names_rules_of_every_environment_in_a_file_and_fails_if_one_is_broken(own: str) -> None:
    found = run("check", f"{own}:Maze")
    assert found.return_value == 0 and f"{own}:Maze: follows the protocol." in found.output
    found = run("check", own)
    assert found.return_value == 1
    assert f"{own}:Maze: follows the protocol." in found.output
    assert f"{own}:Broken: broken: `step(action)` returns" in found.output and "NotOne" not in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["play", "guess_number", "secret"], "expected KEY=VALUE, for example size=5, got 'secret'"),
        (["rollout", "guess_number", "secret=[1"], "while parsing"),
        (["rollout", "guess_number", "colour=1"], "has no argument 'colour'"),
        (["rollout", "guess_number", "--policy=model"], "--policy model requires --model"),
        (["rollout", "guess_number", "--policy=openai", "--model=x"], "--policy openai requires --url"),
        (["list", "sokobann"], "no environment name contains 'sokobann'. Did you mean 'sokoban'?"),
        (["play", "mazes.py"], "'mazes.py' is a file: specify the class in the file, for example mazes.py:Maze"),
        (["check", "nowhere.py"], "'nowhere.py' cannot be read"),
        (["play", "game:Sokobann-v0-easy"], "Did you mean 'game:Sokoban-v0-easy'"),
    ],
)
def test_cli_env_mistakes_are_answered_with_what_to_do(arguments: list[str], message: str) -> None:
    assert message in str(run(*arguments).exception)


@pytest.mark.parametrize("command", ["play", "rollout"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Broken", r"`step\(action\)` returns .*Found: \('Done.', 1.0, True, {}\). Fix: return five values"),
        ("NoInfo", r"`reset\(seed\)` returns .*Found: 'Go.'. Fix: return `observation, info`"),
        ("Raises", r"failed: KeyError: 'exit' \(.*mazes.py:\d+\). Check the environment with `roll env check`"),
        ("Unbuilt", "failed: RuntimeError: no licence"),
    ],
)
def test_cli_env_an_environment_that_fails_is_named_with_the_place(
    own: str, command: str, name: str, message: str
) -> None:
    with pytest.raises(InfraError, match=f"environment '{own}:{name}', seed 0.*{message}"):
        raise run(command, f"{own}:{name}", typed="on\n").exception or AssertionError


async def test_cli_env_a_server_plays_from_the_whole_conversation() -> None:
    asked = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        guess = len(asked[-1]["messages"])  # 1, then 3
        return web.json_response({"choices": [{"message": {"content": str(guess)}}]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        sampling = PlayerSettings(model="m", url=f"http://127.0.0.1:{port}/v1/", max_new_tokens=7, temperature=0.5)
        options = {"max_number": 3, "secret": 3}
        (played,) = await play_episodes("guess_number", options, "openai", sampling, [0], 9)
        elsewhere = PlayerSettings(model="m", url=f"http://127.0.0.1:{port}/v2", max_new_tokens=7, temperature=0.5)
        with pytest.raises(UserError, match="/v2/chat/completions returned status 404"):
            await play_episodes("guess_number", options, "openai", elsewhere, [0], 9)
    finally:
        await runner.cleanup()
    assert [turn.action for turn in played.turns] == ["1", "3"] and played.total == 1
    assert (asked[1]["model"], asked[1]["max_tokens"], asked[1]["temperature"]) == ("m", 7, 0.5)
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "user"]
    with pytest.raises(InfraError, match="cannot be reached"):
        await play_episodes("guess_number", options, "openai", sampling, [0], 9)


async def test_cli_env_the_embedded_engine_plays(tiny_model: Path) -> None:
    sampling = PlayerSettings(model=str(tiny_model), url=None, max_new_tokens=4, temperature=1.0)
    played = await play_episodes("guess_number", {"max_number": 3}, "model", sampling, [0, 0], 2)
    assert played[0] == played[1] and played[0].turns


def test_cli_env_a_model_that_plays_reads_only_text() -> None:
    shown = (TextPart(text="Look: "), ImagePart(digest="00ff"))
    transcript = Transcript(environment="screens.py:Screens", seed=0, first=shown, turns=[])
    with pytest.raises(
        UserError, match=r"'screens.py:Screens' returns images, but this command supports only text: use"
    ):
        build_messages(transcript)


def test_cli_env_a_players_own_tool_is_written_as_in_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def lookup(word: str, *, book: str) -> str:\n  'Looks a word up.'\n  return {}[word]")
    found = run(
        "rollout",
        "math:Generated-v0-easy",
        "--tool-format=xml",
        f"--tool={{tool: '{file}:lookup', options: {{book: b}}}}",
    )
    assert "<lookup>…</lookup>: Looks a word up." in found.output


def test_cli_env_a_player_may_have_tools() -> None:
    found = run("rollout", "math:Generated-v0-easy", "--tool=calculator", "--tool-format=json")
    assert '"name": "calculator"' in found.output and "1 turns" in found.output
    assert "Did you mean 'calculator'?" in str(run("rollout", "guess_number", "--tool=calculater").exception)
    assert "Did you mean 'xml'?" in str(
        run("rollout", "guess_number", "--tool=calculator", "--tool-format=xm").exception
    )
