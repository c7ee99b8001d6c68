"""Reach a page of an encyclopedia by following links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from roll.envs.games.game import Game, Outcome
from roll.envs.games.wiki_pages import list_pages

__all__ = ["WikiGame", "compute_distances"]


@dataclass(kw_only=True, eq=False)
class WikiGame(Game[str]):
    """A search for a page by following links in a small encyclopedia that ROLL ships; needs no network access.

    As in GEM, every page on the way costs 0.05, an answer that names no linked page costs 0.2, and the target gives 1.
    The target can always be reached within the maximum number of turns.
    """

    format_error_reward: ClassVar[float] = -0.2
    invalid_reward: ClassVar[float] = -0.2
    visit_reward: ClassVar[float] = -0.05

    max_turns: int | None = 10

    def _begin_episode(self, rng: Random) -> int:
        turns = self.max_turns or rng.randint(5, 15)
        start = rng.choice(sorted(list_pages()))
        reachable = sorted(title for title, steps in compute_distances(start).items() if 0 < steps <= turns)
        self._title, self._target = start, rng.choice(reachable)
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing the Wiki Game. You start at the page '{self._title}' of a small encyclopedia. Reach the "
            f"page '{self._target}' within {self._limit} turns by visiting pages that the current one links to. About "
            f"the target: {list_pages()[self._target].text} {self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return f"Write the exact title of a linked page, for example \\boxed{{{list_pages()[self._title].links[0]}}}."

    def _render_view(self) -> str:
        page = list_pages()[self._title]
        links = "\n".join(f"- {link}" for link in page.links)
        return (
            f"You are at '{page.title}': {page.text} Your target is '{self._target}'.\nLinks:\n{links}\nEnter a title."
        )

    def _encode_state(self) -> str:
        return f"{self._title} to {self._target}"

    def _parse_move(self, answer: str) -> str | None:
        return " ".join(answer.replace("_", " ").split())

    def _make_move(self, move: str) -> Outcome:
        linked = {link.lower(): link for link in list_pages()[self._title].links}
        title = linked.get(move.lower())
        if title is None:
            return Outcome(text=f"you chose '{move}', which '{self._title}' does not link to.", valid=False)
        self._title = title
        if title == self._target:
            return Outcome(text=f"You reached '{title}'!", reward=1.0, over=True)
        return Outcome(text=f"you went to '{title}'.", reward=self.visit_reward)

    def _sample_move(self, rng: Random) -> str:
        return rng.choice(list_pages()[self._title].links)


def compute_distances(start: str) -> dict[str, int]:
    """Return the number of links on the shortest path from a page to every reachable page."""
    distances = {start: 0}
    waiting = deque([start])
    while waiting:
        title = waiting.popleft()
        for link in list_pages()[title].links:
            if link not in distances:
                distances[link] = distances[title] + 1
                waiting.append(link)
    return distances
