"""Walk from page to page of an encyclopedia by its links."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from roll.envs.games.game import Game, Outcome
from roll.envs.games.wiki_pages import pages

__all__ = ["WikiGame", "distances"]


@dataclass(kw_only=True, eq=False)
class WikiGame(Game[str]):
    """Go from a page to another one by links, in an encyclopedia that is shipped: no network access.

    As in GEM, every page on the way costs 0.05, and a page that is not linked or an unreadable answer 0.2; the target
    gives 1. It can be reached within the turns.
    """

    format_error_reward: ClassVar[float] = -0.2
    invalid_reward: ClassVar[float] = -0.2
    visit_reward: ClassVar[float] = -0.05

    max_turns: int | None = 10

    def _begin(self, rng: Random) -> int:
        turns = self.max_turns or rng.randint(5, 15)
        start = rng.choice(sorted(pages()))
        reachable = sorted(title for title, steps in distances(start).items() if 0 < steps <= turns)
        self._title, self._target = start, rng.choice(reachable)
        return turns

    def _rules(self) -> str:
        return (
            f"You are playing the Wiki Game. You start at the page '{self._title}' of a small encyclopedia. Reach the "
            f"page '{self._target}' within {self._limit} turns by visiting pages that the current one links to. About "
            f"the target: {pages()[self._target].text} {self._form()}"
        )

    def _form(self) -> str:
        return f"Write the exact title of a linked page, for example \\boxed{{{pages()[self._title].links[0]}}}."

    def _view(self) -> str:
        page = pages()[self._title]
        links = "\n".join(f"- {link}" for link in page.links)
        return (
            f"You are at '{page.title}': {page.text} Your target is '{self._target}'.\nLinks:\n{links}\nEnter a title."
        )

    def _state(self) -> str:
        return f"{self._title} to {self._target}"

    def _read(self, answer: str) -> str | None:
        return " ".join(answer.replace("_", " ").split())

    def _play(self, move: str) -> Outcome:
        linked = {link.lower(): link for link in pages()[self._title].links}
        title = linked.get(move.lower())
        if title is None:
            return Outcome(text=f"you chose '{move}', which '{self._title}' does not link to.", valid=False)
        self._title = title
        if title == self._target:
            return Outcome(text=f"You reached '{title}'!", reward=1.0, over=True)
        return Outcome(text=f"you went to '{title}'.", reward=self.visit_reward)

    def _some_move(self, rng: Random) -> str:
        return rng.choice(pages()[self._title].links)


def distances(start: str) -> dict[str, int]:
    """Return the number of links on the shortest path from a page to every reachable page."""
    found = {start: 0}
    waiting = deque([start])
    while waiting:
        title = waiting.popleft()
        for link in pages()[title].links:
            if link not in found:
                found[link] = found[title] + 1
                waiting.append(link)
    return found
