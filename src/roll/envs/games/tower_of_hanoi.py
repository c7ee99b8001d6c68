"""Move a tower, disk by disk."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from roll.envs.games.game import Game, Outcome, check_minimum

__all__ = ["TowerofHanoi"]

_SAMPLED_VARIANTS = [(3, 10), (4, 20), (5, 35)]
"""Possible numbers of disks and turns if `num_disks` is None."""


@dataclass(kw_only=True, eq=False)
class TowerofHanoi(Game[tuple[str, str]]):
    """Towers A, B and C, with `num_disks` disks on A that must be moved to C.

    The reward of the last turn is the fraction of disks that are on C.
    """

    num_disks: int | None = 3

    def _check_arguments(self) -> None:
        check_minimum(1, num_disks=self.num_disks)

    def _begin_episode(self, rng: Random) -> int:
        disks, turns = self.num_disks, self.max_turns
        if disks is None or turns is None:
            disks, turns = rng.choice(_SAMPLED_VARIANTS)
        self._disks = disks
        self._towers: dict[str, list[int]] = {"A": list(range(disks, 0, -1)), "B": [], "C": []}
        return turns

    def _describe_rules(self) -> str:
        return (
            f"You are playing Tower of Hanoi. Bring all {self._disks} disks from tower A to tower C within "
            f"{self._limit} turns. Disks are numbered by size, and towers are shown from bottom to top. Only the "
            f"topmost disk of a tower can be moved, and no disk may lie on a smaller one. {self._describe_format()}"
        )

    def _describe_format(self) -> str:
        return "Write from which tower to which, for example \\boxed{A C}."

    def _render_view(self) -> str:
        lines = [f"{tower}: {' '.join(map(str, disks))}".rstrip() for tower, disks in self._towers.items()]
        return "\n".join([*lines, "Enter your move."])

    def _encode_state(self) -> str:
        return "/".join(" ".join(map(str, disks)) for disks in self._towers.values())

    def _parse_move(self, answer: str) -> tuple[str, str] | None:
        letters = [letter for letter in answer.upper() if letter not in " ,"]
        return (letters[0], letters[1]) if len(letters) == 2 and set(letters) <= set("ABC") else None

    def _make_move(self, move: tuple[str, str]) -> Outcome:
        source, target = (self._towers[tower] for tower in move)
        tried = f"you moved from tower {move[0]} to tower {move[1]}"
        if not source:
            return Outcome(text=f"{tried}, but tower {move[0]} is empty.", valid=False)
        if source is target:
            return Outcome(text=f"{tried}, which is the same one.", valid=False)
        if target and target[-1] < source[-1]:
            return Outcome(text=f"{tried}, but disk {source[-1]} is larger than disk {target[-1]}.", valid=False)
        target.append(source.pop())
        if len(self._towers["C"]) == self._disks:
            return Outcome(text="You moved the whole tower!", reward=1.0, over=True)
        return Outcome(text=f"you moved disk {target[-1]} from tower {move[0]} to tower {move[1]}.")

    def _compute_last_reward(self, outcome: Outcome, reward: float) -> float:
        return len(self._towers["C"]) / self._disks

    def _sample_move(self, rng: Random) -> str:
        return " ".join(rng.sample("ABC", 2))
