"""Episodes that are written down."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from typing import Any

import pytest
from PIL import Image

from roll.envs import make
from roll.envs.transcripts import Transcript, TranscriptTurn, make_random_policy, play_episode, render_html, render_text
from roll.types import ImageData, ImagePart, TextPart


def scripted(*actions: str) -> Any:
    left = list(actions)
    return lambda _: left.pop(0)


def test_env_transcripts_an_episode_is_written_as_it_was_played() -> None:
    env = make("guess_number", max_number=3, num_turns=2, secret=2)
    played = asyncio.run(play_episode(env, scripted("1", "2"), environment="guess_number", seed=0))
    assert render_text(played) == (
        "═══ guess_number, seed 0\n"
        "Pick one: 1, 2 or 3. Answer with a number.\n"
        "─── turn 1, action\n"
        "1\n"
        "─── reward 0\n"
        "No, my number is higher than 1. Pick one: 1, 2 or 3. Answer with a number.\n"
        "─── turn 2, action\n"
        "2\n"
        "─── reward 1\n"
        "Right!\n"
        "═══ terminated after 2 turns, rewards 1"
    )
    assert [turn.state for turn in played.turns] == ["1 higher", "won"]


def test_env_transcripts_coroutines_and_boards_beside_the_observation_are_played_and_shown() -> None:
    class Late:
        async def reset(self, seed: int | None = None) -> Any:
            return "Rules.", {"suffix": "[board]"}

        async def step(self, action: str) -> Any:
            return action, 0.0, False, False, {"prefix": "now "}

    async def policy(so_far: Transcript) -> str:
        return str(len(so_far.turns))

    played = asyncio.run(play_episode(Late(), policy, environment="late", max_turns=2))
    assert (played.first, played.turns[1].observation, played.ending) == ("Rules.[board]", "now 1", "left unfinished")


def test_env_transcripts_a_page_shows_hostile_texts_as_they_are() -> None:
    turn = TranscriptTurn(action="<script>alert(1)</script>\x00\ud800", reward=-0.1, observation="a & b", state="")
    page = render_html([Transcript(environment="x", seed=1, first="<b>", turns=[turn])], "A <title>")
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;\\x00\\xd800" in page
    assert "<title>A &lt;title&gt;</title>" in page and "&lt;b&gt;" in page and 'class="reward bad">-0.1' in page
    assert page.encode()


def _encode(image: Image.Image) -> ImageData:
    data = io.BytesIO()
    image.save(data, "PNG")
    return ImageData.from_bytes(data.getvalue())


def test_env_transcripts_a_page_shows_images_as_small_data_urls() -> None:
    shown, bad = _encode(Image.new("RGB", (1024, 256), "red")), ImageData.from_bytes(b"<svg onload=alert(1)>")
    first = (TextPart(text="<b>Look: "), shown, ImagePart(digest="0f" * 32))
    turn = TranscriptTurn(action="a", reward=0.0, observation=(bad,), state="")
    page = render_html([Transcript(environment="x", seed=1, first=first, turns=[turn])], "t")
    (url,) = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    image = Image.open(io.BytesIO(base64.b64decode(url)))
    assert image.format == "PNG" and image.size == (512, 128) and image.getpixel((5, 5)) == (255, 0, 0)
    assert "&lt;b&gt;Look: <img" in page and "1024 × 256 pixels" in page
    assert f"[image {'0f' * 6}]" in page  # only its digest is known
    assert f"[image {bad.digest[:12]} cannot be shown: " in page and "<svg" not in page


def test_env_transcripts_a_page_has_a_limit_on_images(monkeypatch: pytest.MonkeyPatch) -> None:
    image = _encode(Image.new("RGB", (8, 8)))
    monkeypatch.setattr("roll.envs.transcripts._MAX_IMAGE_BYTES", 100)
    page = render_html([Transcript(environment="x", seed=1, first=(image, image), turns=[])], "t")
    assert page.count("<img") == 1 and f"[image {image.digest[:12]} is left out: " in page


def test_env_transcripts_a_terminal_obeys_no_text_of_a_transcript() -> None:
    turn = TranscriptTurn(action="\x1b]0;title\x07", reward=0.0, observation="\u202e\ud800\tok", state="")
    text = render_text(Transcript(environment="x", seed=1, first="", turns=[turn]))
    assert "\\x1b]0;title\\x07" in text and "\\x202e\\xd800\tok" in text and "\x1b" not in text
    assert text.encode()


def test_env_transcripts_random_players_use_the_environments_own_actions() -> None:
    env = make("game:Sokoban-v0-easy")
    played = asyncio.run(play_episode(env, make_random_policy(env), environment="sokoban", seed=3))
    again = asyncio.run(play_episode(env, make_random_policy(env), environment="sokoban", seed=3))
    assert played == again and played.turns
    assert played.total == pytest.approx(sum(turn.reward for turn in played.turns))
