"""Transcripts of episodes, as text or as an HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.envs.base import awaited, shown
from roll.envs.protocol import checked_start, checked_step
from roll.tracking.visible import printable
from roll.types import Content, described

__all__ = [
    "Policy",
    "Transcript",
    "TranscriptTurn",
    "as_demonstrations",
    "as_html",
    "as_text",
    "play_episode",
    "random_policy",
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


def random_policy(env: Any) -> Policy:
    """Return a policy that samples random actions from the environment."""
    return lambda _: env.sample_random_action()


async def play_episode(
    env: Any, policy: Policy, *, environment: str, seed: int | None = None, most_turns: int = 200
) -> Transcript:
    """Play from `reset` to the end, at most `most_turns` turns.

    Exceptions of the environment or the policy propagate to the caller.

    Raises:
        ProtocolError: The environment's result breaks a rule.
    """
    observation, info = checked_start(await awaited(env.reset(seed=seed)))
    played = Transcript(environment=environment, seed=seed, first=shown(observation, info), turns=[])
    while len(played.turns) < most_turns and not (played.terminated or played.truncated):
        action = await awaited(policy(played))
        if action is None:
            break
        stepped = checked_step(await awaited(env.step(action)))
        observation, reward, played.terminated, played.truncated, info = stepped
        turn = TranscriptTurn(
            action=action,
            reward=reward,
            observation=shown(observation, info),
            state=str(info.get("state", "")),
        )
        played.turns.append(turn)
    return played


def as_text(transcript: Transcript) -> str:
    """Render the episode for a terminal or a text file."""
    parts = [f"═══ {transcript.environment}, seed {transcript.seed}", described(transcript.first)]
    for number, turn in enumerate(transcript.turns, 1):
        parts += [f"─── turn {number}, action", turn.action, f"─── reward {turn.reward:g}", described(turn.observation)]
    parts.append(f"═══ {transcript.ending} after {len(transcript.turns)} turns, rewards {transcript.total:g}")
    return printable("\n".join(parts))


def as_demonstrations(transcripts: list[Transcript]) -> list[str]:
    """Return the multi-turn transcripts with a total reward of at least 1, as lines for `anchors.demonstrations`."""
    found = [each for each in transcripts if each.total >= 1 and len(each.turns) > 1]
    return [json.dumps({"seed": each.seed, "actions": [turn.action for turn in each.turns]}) for each in found]


_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;padding:.6rem .8rem;border-radius:.4rem;
background:#f2f3f5}
pre.action{background:#e6f0ff;margin-left:3rem}
.reward{float:right;color:#666}.good{color:#0a7d32}.bad{color:#b3261e}
summary{cursor:pointer;padding:.4rem 0;font-weight:600}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}pre{background:#24272d}pre.action{background:#1d2f4a}}
"""


def as_html(transcripts: list[Transcript], title: str) -> str:
    """Render the episodes as one self-contained HTML page, with all texts escaped."""
    episodes = "\n".join(_episode(each, opened=len(transcripts) == 1) for each in transcripts)
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1>\n{episodes}\n</html>\n"
    )


def _episode(transcript: Transcript, opened: bool) -> str:
    heading = (
        f"{transcript.environment}, seed {transcript.seed}: rewards {transcript.total:g}, "
        f"{len(transcript.turns)} turns, {transcript.ending}"
    )
    turns = "".join(
        f'<pre class="action">{_escaped(turn.action)}</pre>'
        f'<span class="reward {"good" if turn.reward > 0 else "bad" if turn.reward < 0 else ""}">{turn.reward:g}</span>'
        f"<pre>{_escaped(described(turn.observation))}</pre>"
        for turn in transcript.turns
    )
    return (
        f"<details{' open' if opened else ''}><summary>{_escaped(heading)}</summary>"
        f"<pre>{_escaped(described(transcript.first))}</pre>{turns}</details>"
    )


def _escaped(text: str) -> str:
    return html.escape(printable(text))
