"""Players of the games that read what a model reads, and win.

Each is a generator: it is given the first observation, and what follows each of its actions is sent to it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from typing import Any

from roll.envs.games.clues import list_clues
from roll.envs.games.game_2048 import Board, slide
from roll.envs.games.mastermind import count_pegs
from roll.envs.games.sudoku import iterate_solutions
from roll.envs.games.wiki_pages import list_pages
from roll.envs.games.wordle import mark_guess
from roll.envs.games.words import list_words

__all__ = ["SOLVERS", "solved"]

Play = Generator[str, str, None]
Cell = tuple[int, int]

STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def solved(env: Any, solver: Callable[[str, Any], Play], seed: int) -> list[float]:
    """Rewards of an episode."""
    observation, _ = env.reset(seed=seed)
    play = solver(observation, env)
    action = next(play)
    rewards = []
    while True:
        observation, reward, terminated, truncated, _ = env.step(f"I think it is \\boxed{{{action}}}.")
        rewards.append(reward)
        if terminated or truncated:
            return rewards
        action = play.send(observation)


def guess_the_number(first: str, _: Any) -> Play:
    low, high = found(r"from (\d+) to (\d+)", first)
    while True:
        middle = (low + high) // 2
        told = yield str(middle)
        low, high = (middle + 1, high) if "is higher than" in told else (low, middle - 1)


def mastermind(first: str, _: Any) -> Play:
    length, highest = found(r"code of (\d+) numbers, each from 1 to (\d+)", first)
    left = list(itertools.permutations(range(1, highest + 1), length))
    while True:
        guess = left[len(left) // 2]
        told = yield " ".join(map(str, guess))
        result = found(r"(\d+) black and (\d+) white", told)
        left = [code for code in left if count_pegs(code, guess) == result]


def minesweeper(first: str, env: Any) -> Play:
    """Sees the mines: no player can be sure to win."""
    lines = [line for line in first.splitlines() if re.match(r"[ \d]\d  [.\dF]", line)]
    told = yield f"reveal {len(lines) // 2} {len(lines) // 2}"
    while True:
        rows = [line.split()[1:] for line in told.splitlines() if re.match(r"[ \d]\d  [.\dF]", line)]
        hidden = ((r, c) for r, row in enumerate(rows) for c, sign in enumerate(row) if sign == ".")
        row, col = next(cell for cell in hidden if cell not in env.unwrapped._mines)
        told = yield f"reveal {row} {col}"


def wordle(first: str, _: Any) -> Play:
    (length,) = found(r"word of (\d+) letters", first)
    left = list(list_words(length))
    while True:
        guess = left[len(left) // 2]
        told = yield guess
        left = [word for word in left if mark_guess(word, guess) == told.splitlines()[2]]


def hangman(first: str, _: Any) -> Play:
    (length,) = found(r"word of (\d+) letters", first)
    left, tried = list(list_words(length)), set()
    while True:
        counts = Counter(letter for word in left for letter in set(word) if letter not in tried)
        letter = min(counts, key=lambda each: (abs(counts[each] - len(left) / 2), each), default="")
        guess = left[0] if len(left) <= 2 else letter
        told = yield guess
        if len(guess) > 1:
            left.remove(guess)
            continue
        tried.add(guess)
        shown = told.splitlines()[1].replace(" ", "")
        left = [word for word in left if "".join(c if c in tried else "_" for c in word) == shown]


def fifteen_puzzle(first: str, _: Any) -> Play:
    (limit,) = found(r"You have (\d+) turns", first)
    rows = [line.split() for line in first.splitlines() if re.fullmatch(r"(\s*(\d+|__))+", line)]
    tiles = tuple(0 if tile == "__" else int(tile) for row in rows for tile in row)
    for weight in (2.0, 1.5, 1.0):
        moves = slide_puzzle(tiles, len(rows), weight)
        if len(moves) <= limit:
            break
    yield from sent(moves)


def slide_puzzle(tiles: tuple[int, ...], size: int, weight: float) -> list[str]:
    """Moves that order the tiles: A*, whose estimate is weighted."""

    def estimate(state: tuple[int, ...]) -> int:
        return sum(
            abs(place // size - (tile - 1) // size) + abs(place % size - (tile - 1) % size)
            for place, tile in enumerate(state)
            if tile
        )

    goal = (*range(1, size * size), 0)
    sources = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}

    def following(state: tuple[int, ...]) -> Iterable[tuple[str, tuple[int, ...], int]]:
        gap = state.index(0)
        for move, (down, right) in sources.items():
            row, col = gap // size + down, gap % size + right
            if 0 <= row < size and 0 <= col < size:
                changed = list(state)
                source = row * size + col
                changed[gap], changed[source] = changed[source], 0
                yield move, tuple(changed), 1

    found_path = searched(tiles, lambda state: state == goal, following, lambda state: weight * estimate(state))
    assert found_path is not None
    return found_path


def searched(start: Any, is_goal: Any, following: Any, estimate: Any, most: float = math.inf) -> list[str] | None:
    """Actions from a start to a goal, by A*; actions of one edge are separated by spaces."""
    counter = itertools.count()
    waiting = [(estimate(start), next(counter), 0, start)]
    best: dict[Any, tuple[int, Any, str]] = {start: (0, None, "")}
    while waiting:
        _, _, cost, state = heapq.heappop(waiting)
        if cost > best[state][0]:
            continue
        if is_goal(state):
            actions: list[str] = []
            while best[state][1] is not None:
                actions[:0] = best[state][2].split()
                state = best[state][1]
            return actions
        for action, after, step in following(state):
            total = cost + step
            if total <= most and (after not in best or total < best[after][0]):
                best[after] = total, state, action
                heapq.heappush(waiting, (total + estimate(after), next(counter), total, after))
    return None


def sudoku(first: str, _: Any) -> Play:
    rows = [line.replace("|", " ").split()[1:] for line in first.splitlines() if re.match(r"R\d ", line)]
    given = [0 if sign == "." else int(sign) for row in rows for sign in row]
    for cell, number in enumerate(next(iterate_solutions(given, len(rows)))):
        if not given[cell]:
            yield f"{cell // len(rows) + 1} {cell % len(rows) + 1} {number}"


def tower_of_hanoi(first: str, _: Any) -> Play:
    (disks,) = found(r"all (\d+) disks", first)

    def moves(count: int, source: str, target: str, other: str) -> list[str]:
        if count == 0:
            return []
        return [
            *moves(count - 1, source, other, target),
            f"{source} {target}",
            *moves(count - 1, other, target, source),
        ]

    yield from sent(moves(disks, "A", "C", "B"))


def game_2048(first: str, env: Any) -> Play:
    """Plays a copy of the game to its end, by one measure of a board and then by others: one alone loses 2 of 100."""
    for measure in (room_and_order, room_and_size, room_and_neighbours):
        copy, told, moves, total = env.spawn(same_state=True), first, [], 0.0
        over = False
        while not over:
            moves.append(best_move(told, measure))
            told, reward, over, _, _ = copy.step(f"\\boxed{{{moves[-1]}}}")
            total += reward
        if total > 0.999:
            break
    yield from sent(moves)


def best_move(told: str, measure: Callable[[Board], float]) -> str:
    rows = [line.split() for line in told.splitlines() if re.fullmatch(r"( *(\d+|\.))+", line)]
    board = tuple(tuple(0 if sign == "." else int(sign) for sign in row) for row in rows)
    moves = [move for move in STEPS if slide(board, move) != board]
    return max(moves, key=lambda move: expected(slide(board, move), measure))


def expected(board: Board, measure: Callable[[Board], float]) -> float:
    """Worth of a board, over where a 2 may appear, after the best answer to it."""
    empty = [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]
    total = 0.0
    for row, col in empty:
        filled = tuple(tuple(2 if (r, c) == (row, col) else t for c, t in enumerate(w)) for r, w in enumerate(board))
        total += max(measure(after) for after in (slide(filled, move) for move in STEPS))
    return total / len(empty)


def room(board: Board) -> int:
    return sum(tile == 0 for row in board for tile in row)


def room_and_order(board: Board) -> float:
    snake = [tile for r, row in enumerate(board) for tile in (row if r % 2 == 0 else row[::-1])]
    merged = sum(tile * math.log2(tile) for tile in snake if tile)
    return 2.7 * room(board) + 0.1 * merged + sum(tile * 0.5**place for place, tile in enumerate(snake))


def room_and_size(board: Board) -> float:
    return 3 * room(board) + sum(tile * tile for row in board for tile in row) / 16 + 0.7 * smoothness(board)


def room_and_neighbours(board: Board) -> float:
    return 2 * room(board) + 2 * smoothness(board) + max(map(max, board))


def smoothness(board: Board) -> float:
    pairs = [pair for rows in (board, zip(*board, strict=True)) for row in rows for pair in itertools.pairwise(row)]
    return -sum(abs(math.log2(a) - math.log2(b)) for a, b in pairs if a and b)


def sokoban(first: str, _: Any) -> Play:
    (limit,) = found(r"You have (\d+) turns", first)
    rows = [line.split() for line in first.splitlines() if re.fullmatch(r"([#_OX√PS] ?)+", line)]
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    floor = {cell for cell, sign in cells.items() if sign != "#"}
    goals = frozenset(cell for cell, sign in cells.items() if sign in "O√S")
    player = next(cell for cell, sign in cells.items() if sign in "PS")
    boxes = frozenset(cell for cell, sign in cells.items() if sign in "X√")

    def live() -> set[Cell]:
        """Where a box can still be brought to a goal."""
        reached, waiting = set(goals), deque(goals)
        while waiting:
            cell = waiting.popleft()
            for step in STEPS.values():
                box, pusher = plus(cell, step, -1), plus(cell, step, -2)
                if box in floor and pusher in floor and box not in reached:
                    reached.add(box)
                    waiting.append(box)
        return reached

    alive = live()

    def following(state: tuple[Cell, frozenset[Cell]]) -> Iterable[tuple[str, tuple[Cell, frozenset[Cell]], int]]:
        """Walk anywhere and push once."""
        at, placed = state
        ways, waiting = {at: ""}, deque([at])
        while waiting:
            cell = waiting.popleft()
            for name, step in STEPS.items():
                near, behind = plus(cell, step), plus(cell, step, 2)
                if near in placed:
                    if behind in alive and behind not in placed:
                        way = f"{ways[cell]} {name}"
                        yield way, (near, placed - {near} | {behind}), len(way.split())
                elif near in floor and near not in ways:
                    ways[near] = f"{ways[cell]} {name}"
                    waiting.append(near)

    def estimate(state: tuple[Cell, frozenset[Cell]]) -> float:
        return sum(min(abs(b[0] - g[0]) + abs(b[1] - g[1]) for g in goals) for b in state[1])

    for weight in (3.0, 1.0):
        moves = searched(
            (player, boxes), lambda state: state[1] == goals, following, lambda s, w=weight: w * estimate(s), limit
        )
        if moves is not None:
            yield from sent(moves)


def crosswords(first: str, _: Any) -> Play:
    by_clue = {clue: word for hard in (False, True) for word, clue in list_clues(hard).items()}
    done = set()
    for clue, way, row, col in re.findall(r"\d+\. (.*) \((across|down) from row (\d+) column (\d+), \d", first):
        for step, letter in enumerate(by_clue[clue]):
            cell = (int(row), int(col) + step) if way == "across" else (int(row) + step, int(col))
            if cell not in done:
                done.add(cell)
                yield f"{cell[0]} {cell[1]} {letter}"


def word_search(first: str, _: Any) -> Play:
    rows = [line.split()[1:] for line in first.splitlines() if re.match(r"R\d\d ", line)]
    known = sorted({*list_words(), *list_words(rare=True)}, key=len, reverse=True)
    lines = [("across", r, "".join(row)) for r, row in enumerate(rows)]
    lines += [("down", c, "".join(column)) for c, column in enumerate(zip(*rows, strict=True))]
    for word in known:
        for way, line, letters in lines:
            start = letters.find(word) if len(word) >= 4 else -1
            if start >= 0:
                end = start + len(word) - 1
                yield f"{line} {start} {line} {end}" if way == "across" else f"{start} {line} {end} {line}"


def wiki_game(first: str, _: Any) -> Play:
    match = re.search(r"You are at '(.*?)':.*Your target is '(.*?)'\.", first)
    assert match is not None
    path = searched(
        match[1].replace(" ", "_"),
        lambda title: title == match[2].replace(" ", "_"),
        lambda title: [
            (link.replace(" ", "_"), link.replace(" ", "_"), 1) for link in list_pages()[title.replace("_", " ")].links
        ],
        lambda _: 0,
    )
    assert path is not None
    yield from sent(path)


def frozen_lake(first: str, _: Any) -> Play:
    rows = [line.split() for line in first.splitlines() if re.fullmatch(r"([PGO_] ?)+", line)]

    def following(cell: Cell) -> Iterable[tuple[str, Cell, int]]:
        for name, step in STEPS.items():
            row, col = plus(cell, step)
            if 0 <= row < len(rows) and 0 <= col < len(rows) and rows[row][col] != "O":
                yield name, (row, col), 1

    path = searched((0, 0), lambda cell: rows[cell[0]][cell[1]] == "G", following, lambda _: 0)
    assert path is not None
    yield from sent(path)


def sent(moves: list[str]) -> Play:
    """One after the other, whatever is sent."""
    return (move for move in moves)


def plus(cell: Cell, step: Cell, times: int = 1) -> Cell:
    return cell[0] + times * step[0], cell[1] + times * step[1]


def found(pattern: str, text: str) -> tuple[int, ...]:
    match = re.search(pattern, text)
    assert match is not None, text
    return tuple(map(int, match.groups()))


SOLVERS: dict[str, Callable[[str, Any], Play]] = {
    "GuessTheNumber": guess_the_number,
    "Mastermind": mastermind,
    "Minesweeper": minesweeper,
    "Wordle": wordle,
    "FifteenPuzzle": fifteen_puzzle,
    "Hangman": hangman,
    "Sudoku": sudoku,
    "TowerofHanoi": tower_of_hanoi,
    "Game2048": game_2048,
    "Sokoban": sokoban,
    "Crosswords": crosswords,
    "WordSearch": word_search,
    "WikiGame": wiki_game,
    "FrozenLake": frozen_lake,
}
"""By the game's name. Bandit has none: its outcome is chance; nor has slippery ice."""
