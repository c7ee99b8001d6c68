"""Push boxes onto goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from roll.envs.games.directions import DirectionGame
from roll.envs.games.game import Outcome, check_minimum

__all__ = ["Sokoban"]

_Cell = tuple[int, int]

_SAMPLED_VARIANTS = [((6, 6), 2, 20), ((8, 8), 5, 50)]
"""Possible rooms, boxes and turns if an argument is None."""

_WALL_FRACTION = 0.12
"""Fraction of cells inside the room that become walls."""

_NUM_ATTEMPTS = 200


@dataclass(kw_only=True, eq=False)
class Sokoban(DirectionGame):
    """A room of `dim_room` rows and columns, including the walls around it, with `num_boxes` boxes and the same number
    of goals.

    A room is generated backward from the solved state, by pulling the boxes off their goals in at most `max_turns`
    moves, so it can always be solved within the turns. The reward of the last turn is the fraction of boxes on goals.
    """

    dim_room: Sequence[int] | None = (6, 6)
    num_boxes: int | None = 3

    def _check_arguments(self) -> None:
        check_minimum(1, num_boxes=self.num_boxes)
        if self.dim_room is not None and (len(self.dim_room) != 2 or min(self.dim_room) < 5):
            raise ValueError(f"dim_room must be the numbers of rows and columns, each at least 5, got {self.dim_room}")
        if self.dim_room is not None and self.num_boxes is not None:
            room = (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
            if self.num_boxes > room // 4:
                raise ValueError(
                    f"num_boxes must be at most {room // 4} for a room of {room} cells, got {self.num_boxes}"
                )

    def _begin_episode(self, rng: Random) -> int:
        dim, boxes, turns = self.dim_room, self.num_boxes, self.max_turns
        if dim is None or boxes is None or turns is None:
            dim, boxes, turns = rng.choice(_SAMPLED_VARIANTS)
        self._rows, self._cols = dim
        best: tuple[int, int] = (-1, -1)
        # A random walk often ends near the goals, so the attempt whose boxes are farthest from them is kept.
        for _ in range(_NUM_ATTEMPTS):
            floor = self._draw_floor(rng)
            if len(floor) < 2 * boxes + 1:
                continue
            goals = frozenset(rng.sample(sorted(floor), boxes))
            player, placed = _pull_boxes(floor, goals, turns, rng)
            away = len(placed - goals), sum(min(_measure_distance(box, goal) for goal in goals) for box in placed)
            if away > best:
                best = away
                self._floor, self._goals, self._player, self._boxes = floor, goals, player, placed
            if best[0] == boxes:
                break
        return turns

    def _draw_floor(self, rng: Random) -> frozenset[_Cell]:
        """Return the cells of a random floor; all of them are connected."""
        inside = [(row, col) for row in range(1, self._rows - 1) for col in range(1, self._cols - 1)]
        free = {cell for cell in inside if rng.random() >= _WALL_FRACTION}
        waiting = [rng.choice(inside)]
        reached = set(waiting)
        while waiting:
            new = [near for near in _list_neighbors(waiting.pop()) if near in free and near not in reached]
            reached.update(new)
            waiting += new
        return frozenset(reached)

    def _describe_rules(self) -> str:
        return (
            "You are playing Sokoban. Push every box onto a goal. Walking into a box pushes it one cell, unless a wall "
            f"or another box is behind it; boxes cannot be pulled. You have {self._limit} turns. '#' is a wall, '_' "
            "floor, 'P' you, 'S' you on a goal, 'X' a box, 'O' a goal, and '√' a box on a goal. "
            + self._describe_format()
        )

    def _encode_state(self) -> str:
        return "/".join(
            "".join(self._render_cell((row, col)) for col in range(self._cols)) for row in range(self._rows)
        )

    def _render_cell(self, cell: _Cell) -> str:
        on_goal = cell in self._goals
        if cell == self._player:
            return "S" if on_goal else "P"
        if cell in self._boxes:
            return "√" if on_goal else "X"
        if cell not in self._floor:
            return "#"
        return "O" if on_goal else "_"

    def _make_move(self, move: str) -> Outcome:
        target = _move(self._player, move)
        if target in self._boxes:
            behind = _move(target, move)
            if behind not in self._floor or behind in self._boxes:
                return Outcome(text=f"you cannot push the box {move}: something is behind it.", valid=False)
            self._boxes = self._boxes - {target} | {behind}
            text = f"you pushed a box {move}."
        elif target not in self._floor:
            return Outcome(text=f"you cannot move {move}: there is a wall.", valid=False)
        else:
            text = f"you moved {move}."
        self._player = target
        if self._boxes == self._goals:
            return Outcome(text="You pushed every box onto a goal!", reward=1.0, over=True)
        return Outcome(text=text)

    def _compute_last_reward(self, outcome: Outcome, reward: float) -> float:
        return len(self._boxes & self._goals) / len(self._goals)


def _pull_boxes(
    floor: frozenset[_Cell], goals: frozenset[_Cell], max_moves: int, rng: Random
) -> tuple[_Cell, frozenset[_Cell]]:
    """Walk randomly through the solved room, at most `max_moves` moves, and pull boxes off their goals.

    Returns the player's cell and the boxes' cells in the visited position with the most boxes off their goals. In a
    tie, the position whose boxes are farthest from the goals is chosen.
    """
    player = rng.choice(sorted(floor - goals))
    boxes = goals
    best = (0, 0), player, boxes
    for _ in range(max_moves):
        steps = [(step, _move(player, step)) for step in DirectionGame.steps]
        steps = [(step, cell) for step, cell in steps if cell in floor and cell not in boxes]
        if not steps:
            break
        pulls = [(step, cell) for step, cell in steps if _move(player, step, -1) in boxes]
        step, cell = rng.choice(pulls if pulls and rng.random() < 0.7 else steps)
        behind = _move(player, step, -1)
        if behind in boxes and rng.random() < 0.9:
            boxes = boxes - {behind} | {player}
        player = cell
        away = len(boxes - goals), sum(min(_measure_distance(box, goal) for goal in goals) for box in boxes)
        if away >= best[0]:
            best = away, player, boxes
    return best[1], best[2]


def _move(cell: _Cell, step: str, times: int = 1) -> _Cell:
    return cell[0] + times * DirectionGame.steps[step][0], cell[1] + times * DirectionGame.steps[step][1]


def _list_neighbors(cell: _Cell) -> list[_Cell]:
    return [_move(cell, step) for step in DirectionGame.steps]


def _measure_distance(a: _Cell, b: _Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
