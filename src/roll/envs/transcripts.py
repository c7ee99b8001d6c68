"""Transcripts of episodes, as text or as an HTML page."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.envs.base import await_if_needed, format_observation
from roll.envs.protocol import check_reset_result, check_step_result
from roll.errors import DataError
from roll.media import decode_image, encode_thumbnail
from roll.tracking.escape import escape_controls
from roll.types import Content, ImageData, TextPart, describe_content

__all__ = [
    "Policy",
    "Transcript",
    "TranscriptTurn",
    "format_demonstrations",
    "make_random_policy",
    "play_episode",
    "render_html",
    "render_text",
]

Policy: TypeAlias = Callable[["Transcript"], str | Awaitable[str] | None]
"""Returns the next action from the episode so far; None ends the episode."""


@dataclass(frozen=True, kw_only=True)
class TranscriptTurn:
    """One action, and its result."""

    action: str
    reward: float
    observation: Content
    state: str


@dataclass(kw_only=True)
class Transcript:
    """An episode: its first observation, its turns, and its end."""

    environment: str
    seed: int | None
    first: Content
    turns: list[TranscriptTurn]
    terminated: bool = False
    truncated: bool = False

    @property
    def ending(self) -> str:
        return "truncated" if self.truncated else "terminated" if self.terminated else "left unfinished"

    @property
    def total(self) -> float:
        """Sum of the episode's rewards."""
        return sum(turn.reward for turn in self.turns)


def make_random_policy(env: Any) -> Policy:
    """Return a policy that samples random actions from the environment."""
    return lambda _: env.sample_random_action()


async def play_episode(
    env: Any, policy: Policy, *, environment: str, seed: int | None = None, max_turns: int = 200
) -> Transcript:
    """Play an episode with `policy`, at most `max_turns` turns long, and return its transcript.

    Exceptions of the environment or the policy propagate to the caller.

    Raises:
        ProtocolError: The environment's result breaks a rule.
    """
    observation, info = check_reset_result(await await_if_needed(env.reset(seed=seed)))
    played = Transcript(environment=environment, seed=seed, first=format_observation(observation, info), turns=[])
    while len(played.turns) < max_turns and not (played.terminated or played.truncated):
        action = await await_if_needed(policy(played))
        if action is None:
            break
        stepped = check_step_result(await await_if_needed(env.step(action)))
        observation, reward, played.terminated, played.truncated, info = stepped
        turn = TranscriptTurn(
            action=action,
            reward=reward,
            observation=format_observation(observation, info),
            state=str(info.get("state", "")),
        )
        played.turns.append(turn)
    return played


def render_text(transcript: Transcript) -> str:
    """Render the episode for a terminal or a text file."""
    parts = [f"═══ {transcript.environment}, seed {transcript.seed}", describe_content(transcript.first)]
    for number, turn in enumerate(transcript.turns, 1):
        parts += [
            f"─── turn {number}, action",
            turn.action,
            f"─── reward {turn.reward:g}",
            describe_content(turn.observation),
        ]
    parts.append(f"═══ {transcript.ending} after {len(transcript.turns)} turns, rewards {transcript.total:g}")
    return escape_controls("\n".join(parts))


def format_demonstrations(transcripts: list[Transcript]) -> list[str]:
    """Format the multi-turn transcripts with a total reward of at least 1 as lines for `anchors.demonstrations`."""
    successful = [each for each in transcripts if each.total >= 1 and len(each.turns) > 1]
    return [json.dumps({"seed": each.seed, "actions": [turn.action for turn in each.turns]}) for each in successful]


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;padding:.6rem .8rem;border-radius:.4rem;
background:#f2f3f5}
pre.action{background:#e6f0ff;margin-left:3rem}
pre img{display:block;max-width:100%;margin:.3rem 0}
.reward{float:right;color:#666}.good{color:#0a7d32}.bad{color:#b3261e}
summary{cursor:pointer;padding:.4rem 0;font-weight:600}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}pre{background:#24272d}pre.action{background:#1d2f4a}}
"""


_LONGEST_SIDE = 512
"""Maximum width and height of an image in a page, in pixels; larger images are scaled down."""
_MAX_IMAGE_BYTES = 64 * 2**20
"""Maximum total size of the images in a page."""


def render_html(transcripts: list[Transcript], title: str) -> str:
    """Render the episodes as one self-contained HTML page, with all text escaped, and images as data URLs."""
    images = _PageImages()
    episodes = "\n".join(_render_episode(each, images, opened=len(transcripts) == 1) for each in transcripts)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1>\n{episodes}\n</html>\n"
    )


class _PageImages:
    """Renders the images of one page, up to a total size."""

    def __init__(self) -> None:
        self._left = _MAX_IMAGE_BYTES

    def render(self, content: Content) -> str:
        """Return HTML of an observation: escaped text, and an element for each image."""
        if isinstance(content, str):
            return _escape(content)
        return "".join(
            _escape(part.text)
            if isinstance(part, TextPart)
            else self._render_image(part)
            if isinstance(part, ImageData)
            else _escape(describe_content((part,)))
            for part in content
        )

    def _render_image(self, part: ImageData) -> str:
        name = f"image {part.digest[:12]}"
        try:
            image = decode_image(part.data, name)
        except DataError as error:
            return _escape(f"[{name} cannot be shown: {error}]")
        encoded = encode_thumbnail(image, _LONGEST_SIDE)
        if len(encoded) > self._left:
            return _escape(f"[{name} is left out: the page has {_MAX_IMAGE_BYTES // 2**20} MiB of images]")
        self._left -= len(encoded)
        url = f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
        return f'<img src="{url}" alt="{name}" title="{name}: {image.width} × {image.height} pixels">'


def _render_episode(transcript: Transcript, images: _PageImages, opened: bool) -> str:
    heading = (
        f"{transcript.environment}, seed {transcript.seed}: rewards {transcript.total:g}, "
        f"{len(transcript.turns)} turns, {transcript.ending}"
    )
    first = images.render(transcript.first)
    turns = "".join(
        f'<pre class="action">{_escape(turn.action)}</pre>'
        f'<span class="reward {"good" if turn.reward > 0 else "bad" if turn.reward < 0 else ""}">{turn.reward:g}</span>'
        f"<pre>{images.render(turn.observation)}</pre>"
        for turn in transcript.turns
    )
    return (
        f"<details{' open' if opened else ''}><summary>{_escape(heading)}</summary><pre>{first}</pre>{turns}</details>"
    )


def _escape(text: str) -> str:
    return html.escape(escape_controls(text))
