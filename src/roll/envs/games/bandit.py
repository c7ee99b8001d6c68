"""Find the slot machine with the highest win probability."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["Bandit"]


@dataclass(kw_only=True, eq=False)
class Bandit(Game[str]):
    """Slot machines A, B, ... with hidden win probabilities. Each turn pulls one machine; a win gives 1 / `max_turns`.

    No policy always wins. The optimal policy identifies the machine with the highest probability and keeps pulling it.

    Args:
        num_machines: Number of machines, 2 to 26; None samples 2 to 5.
        best, others: Win probability of the best machine, which is chosen at random, and of all other machines. If
            either is None, every probability is sampled from 0 to 1.
    """

    max_turns: int | None = 10
    num_machines: int | None = 2
    best: float | None = 0.9
    others: float | None = 0.1

    def _check_arguments(self) -> None:
        check_minimum(2, num_machines=self.num_machines)
        if self.num_machines is not None and self.num_machines > 26:
            raise ValueError(
                f"num_machines must be at most 26 (machines are named by the letters A to Z), got {self.num_machines}"
            )
        for name, chance in (("best", self.best), ("others", self.others)):
            if chance is not None and not 0 <= chance <= 1:
                raise ValueError(f"{name} must be a probability from 0 to 1, got {chance}")

    def _begin_episode(self, rng: Random) -> int:
        names: str = string.ascii_uppercase[: self.num_machines or rng.randint(2, 5)]
        if self.best is None or self.others is None:
            self._chances = {name: rng.random() for name in names}
        else:
            chosen = rng.choice(names)
            self._chances = {name: self.best if name == chosen else self.others for name in names}
        self._pulls: dict[str, int] = dict.fromkeys(names, 0)
        self._pays: dict[str, int] = dict.fromkeys(names, 0)
        return self.max_turns or 10 * len(names)

    def _describe_rules(self) -> str:
        return (
            f"You stand before {len(self._chances)} slot machines: {', '.join(self._chances)}. Each pays with a chance "
            f"of its own, which never changes. You have {self._limit} pulls: get as many pays as you can. "
            f"{self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return "Write a machine's letter, for example \\boxed{A}."

    def _render_view(self) -> str:
        seen = ", ".join(f"{name} paid {self._pays[name]} of {self._pulls[name]}" for name in self._chances)
        return f"{seen}.\nChoose a machine."

    def _encode_state(self) -> str:
        return " ".join(f"{self._pays[name]}/{self._pulls[name]}" for name in self._chances)

    def _parse_move(self, answer: str) -> str | None:
        return answer.upper() if len(answer) == 1 and answer.isascii() and answer.isalpha() else None

    def _make_move(self, move: str) -> Outcome:
        if move not in self._chances:
            return Outcome(text=f"you chose {move}, but there is no such machine.", valid=False)
        paid = self._rng.random() < self._chances[move]
        self._pulls[move] += 1
        self._pays[move] += paid
        return Outcome(
            text=f"machine {move} {'paid' if paid else 'did not pay'}.", reward=1 / self._limit if paid else 0.0
        )

    def _sample_move(self, rng: Random) -> str:
        return rng.choice(list(self._chances))
