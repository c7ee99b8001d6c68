"""Names of the games, with their classes and arguments: 39 of GEM, and those of ROLL."""

from __future__ import annotations

from typing import Any

__all__ = ["GAMES"]


def _build_variants(game: str, entry_point: str, **variants: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        f"game:{game}-v0-{name.replace('_', '-')}": (f"roll.envs.games.{entry_point}", options)
        for name, options in variants.items()
    }


GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **_build_variants(
        "GuessTheNumber",
        "guess_the_number:GuessTheNumber",
        easy={"min_number": 1, "max_number": 10, "max_turns": 4},
        hard={"min_number": 1, "max_number": 50, "max_turns": 7},
        random={"min_number": None, "max_number": None, "max_turns": None},
    ),
    **_build_variants(
        "Mastermind",
        "mastermind:Mastermind",
        easy={"code_length": 2, "num_numbers": 6, "max_turns": 10},
        hard={"code_length": 4, "num_numbers": 8, "max_turns": 30},
        random={"code_length": None, "num_numbers": None, "max_turns": None},
    ),
    **_build_variants(
        "Minesweeper",
        "minesweeper:Minesweeper",
        easy={"rows": 5, "cols": 5, "num_mines": 5, "max_turns": 25},
        hard={"rows": 8, "cols": 8, "num_mines": 12, "max_turns": 64},
        random={"rows": None, "cols": None, "num_mines": None, "max_turns": None},
    ),
    **_build_variants(
        "Wordle",
        "wordle:Wordle",
        easy={"word_length": 3, "max_turns": 15},
        hard={"word_length": 5, "max_turns": 25},
        random={"word_length": None, "max_turns": None},
    ),
    **_build_variants(
        "FifteenPuzzle",
        "fifteen_puzzle:FifteenPuzzle",
        easy={"num_rows": 2, "max_turns": 10},
        hard={"num_rows": 4, "max_turns": 50},
        random={"num_rows": None, "max_turns": None},
    ),
    **_build_variants(
        "Hangman",
        "hangman:Hangman",
        easy={"word_length": 3, "max_turns": 10},
        hard={"word_length": 7, "max_turns": 20},
        random={"word_length": None, "max_turns": None},
    ),
    **_build_variants(
        "Sudoku",
        "sudoku:Sudoku",
        easy={"scale": 4, "clues": 10, "max_turns": 15},
        hard={"scale": 9, "clues": 50, "max_turns": 50},
        random={"scale": None, "clues": None, "max_turns": None},
    ),
    **_build_variants(
        "TowerofHanoi",
        "tower_of_hanoi:TowerofHanoi",
        easy={"num_disks": 3, "max_turns": 10},
        hard={"num_disks": 5, "max_turns": 35},
        random={"num_disks": None, "max_turns": None},
    ),
    **_build_variants(
        "Game2048",
        "game_2048:Game2048",
        easy={"target_tile": 64, "max_turns": 50},
        hard={"target_tile": 512, "max_turns": 50},
        extreme_hard={"target_tile": 2048, "max_turns": 100},
        random={"target_tile": None, "max_turns": None},
    ),
    **_build_variants(
        "Sokoban",
        "sokoban:Sokoban",
        easy={"dim_room": (6, 6), "num_boxes": 2, "max_turns": 20},
        hard={"dim_room": (8, 8), "num_boxes": 4, "max_turns": 50},
        random={"dim_room": None, "num_boxes": None, "max_turns": None},
    ),
    **_build_variants(
        "Crosswords",
        "crosswords:Crosswords",
        easy={"hardcore": False, "num_words": 3, "max_turns": 30},
        hard={"hardcore": True, "num_words": 3, "max_turns": 40},
        random={"hardcore": None, "num_words": None, "max_turns": None},
    ),
    **_build_variants(
        "WordSearch",
        "word_search:WordSearch",
        easy={"hardcore": False, "num_words": 5, "max_turns": 20},
        hard={"hardcore": True, "num_words": 5, "max_turns": 20},
        random={"hardcore": None, "num_words": None, "max_turns": None},
    ),
    **_build_variants("WikiGame", "wiki_game:WikiGame", easy={"max_turns": 30}, hard={"max_turns": 15}),
    **_build_variants(
        "FrozenLake",
        "frozen_lake:FrozenLake",
        easy={"size": 4, "max_turns": 15},
        hard={"size": 8, "max_turns": 40},
        slippery={"size": 4, "max_turns": 40, "slippery": True},
        random={"size": None, "max_turns": None},
    ),
    **_build_variants(
        "Bandit",
        "bandit:Bandit",
        easy={"num_machines": 2, "max_turns": 10},
        hard={"num_machines": 5, "max_turns": 30, "best": 0.7, "others": 0.4},
        random={"num_machines": None, "best": None, "others": None, "max_turns": None},
    ),
}
