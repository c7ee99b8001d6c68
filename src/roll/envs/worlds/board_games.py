"""Two-player games: rules, the view of each seat, and an expert's play."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

__all__ = ["GAMES", "Game"]


class Game(Protocol):
    """A single game between two players in seats 0 and 1."""

    turn: int

    def list_moves(self) -> list[str]:
        """Return the legal moves, in lower case."""
        ...

    def play(self, move: str) -> None:
        """Make a legal move."""
        ...

    def describe_view(self, seat: int) -> str:
        """Return a description of everything that the player in this seat can see."""
        ...

    def compute_rewards(self) -> tuple[float, float] | None:
        """Return the rewards of both seats, or `None` while the game is running."""
        ...

    def find_best_move(self) -> str:
        """Return an expert's move for the player whose turn it is."""
        ...


class Nim:
    """Heaps of stones: take any number from one heap; the player who takes the last stone wins."""

    def __init__(self, random: Random) -> None:
        self.turn = 0
        self._heaps = [random.randint(1, 5) for _ in range(3)]

    def list_moves(self) -> list[str]:
        return [f"{heap + 1}-{take}" for heap, size in enumerate(self._heaps) for take in range(1, size + 1)]

    def play(self, move: str) -> None:
        heap, take = map(int, move.split("-"))
        self._heaps[heap - 1] -= take
        self.turn = 1 - self.turn

    def describe_view(self, seat: int) -> str:
        return (
            f"Nim: heaps of {', '.join(map(str, self._heaps))} stones. Take from one heap: heap-stones, as in 1-2. "
            "The player who takes the last stone wins."
        )

    def compute_rewards(self) -> tuple[float, float] | None:
        if any(self._heaps):
            return None
        return (1.0, -1.0) if self.turn == 1 else (-1.0, 1.0)

    def find_best_move(self) -> str:
        """Return a move after which the exclusive or of the heap sizes is 0, if there is one (Bouton, 1901)."""
        total = functools.reduce(int.__xor__, self._heaps)
        for heap, size in enumerate(self._heaps):
            if size ^ total < size:
                return f"{heap + 1}-{size - (size ^ total)}"
        return self.list_moves()[0]


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def _find_winner(board: str) -> str:
    return next((board[a] for a, b, c in _LINES if board[a] != "." and board[a] == board[b] == board[c]), "")


@functools.cache
def _compute_value(board: str, mark: str) -> int:
    """Return the result under perfect play for `mark`, who moves next: 1 for a win, 0 for a draw, −1 for a loss."""
    if _find_winner(board):
        return -1
    if "." not in board:
        return 0
    other = "o" if mark == "x" else "x"
    return max(-_compute_value(board[:n] + mark + board[n + 1 :], other) for n in range(9) if board[n] == ".")


class TicTacToe:
    """Tic-tac-toe: the first player with three in a row wins."""

    def __init__(self, random: Random) -> None:
        del random
        self.turn = 0
        self._board: str = "." * 9

    def list_moves(self) -> list[str]:
        return [str(n + 1) for n in range(9) if self._board[n] == "."]

    def play(self, move: str) -> None:
        place = int(move) - 1
        self._board = self._board[:place] + "xo"[self.turn] + self._board[place + 1 :]
        self.turn = 1 - self.turn

    def describe_view(self, seat: int) -> str:
        rows = "\n".join(self._board[start : start + 3] for start in (0, 3, 6))
        return f"Tic-tac-toe: you are {'xo'[seat]}. Places are 1 to 9, row by row.\n{rows}"

    def compute_rewards(self) -> tuple[float, float] | None:
        winner = _find_winner(self._board)
        if winner:
            return (1.0, -1.0) if winner == "x" else (-1.0, 1.0)
        return None if "." in self._board else (0.0, 0.0)

    def find_best_move(self) -> str:
        mark, other = ("x", "o") if self.turn == 0 else ("o", "x")
        board = self._board
        return max(
            self.list_moves(),
            key=lambda move: -_compute_value(board[: int(move) - 1] + mark + board[int(move) :], other),
        )


class KuhnPoker:
    """Kuhn poker (1950): three cards, one card per player, one bet. The higher card wins if no player folds."""

    _NAMES = ("Jack", "Queen", "King")

    def __init__(self, random: Random) -> None:
        self.turn = 0
        self._cards = random.sample(range(3), 2)
        self._history: list[str] = []

    def list_moves(self) -> list[str]:
        return ["call", "fold"] if "bet" in self._history else ["check", "bet"]

    def play(self, move: str) -> None:
        self._history.append(move)
        self.turn = 1 - self.turn

    def describe_view(self, seat: int) -> str:
        played = ", ".join(self._history) or "nothing"
        return (
            "Kuhn poker: a Jack, a Queen and a King, one card each, one chip each in the pot; a bet is one more. "
            f"Your card: {self._NAMES[self._cards[seat]]}. Played so far: {played}."
        )

    def compute_rewards(self) -> tuple[float, float] | None:
        """Return the rewards of both seats, 0.5 per chip won or lost, or `None` while the game is running."""
        last = self._history[-1:] and self._history[-1]
        if last == "fold":
            won = 0.5 if self.turn == 0 else -0.5  # the player whose turn would be next did not fold
        elif last == "call":
            won = 1.0 if self._cards[0] > self._cards[1] else -1.0
        elif self._history == ["check", "check"]:
            won = 0.5 if self._cards[0] > self._cards[1] else -0.5
        else:
            return None
        return won, -won

    def find_best_move(self) -> str:
        """Return the move of a fixed strategy that plays reasonably but is not an equilibrium.

        With a King, bet and call; with a Queen, call only as the first player; with a Jack, neither bet nor call.
        """
        card = self._cards[self.turn]
        if "bet" in self._history:
            return "call" if card == 2 or (card == 1 and self.turn == 0) else "fold"
        return "bet" if card == 2 else "check"


GAMES: Mapping[str, Callable[[Random], Game]] = {"nim": Nim, "tic_tac_toe": TicTacToe, "kuhn_poker": KuhnPoker}
