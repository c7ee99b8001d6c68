"""Beside the package that the protocol comes from, where it is installed: either one's environments in the other's."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np
import pytest

from roll.envs import ENVS, SyncVectorEnv, make, make_vec
from roll.envs.wrappers import EpisodeTracking, ObservationHistory

pytestmark = pytest.mark.skipif(find_spec("gem") is None, reason="gem is not installed")

GEMS = {
    "guess_the_number:GuessTheNumberEnv": {"min_number": 1, "max_number": 10, "max_turns": 4},
    "mastermind:MastermindEnv": {"code_length": 2, "num_numbers": 6, "max_turns": 6},
    "minesweeper:MinesweeperEnv": {"rows": 5, "cols": 5, "num_mines": 5, "max_turns": 9},
    "fifteen_puzzle:FifteenPuzzleEnv": {"num_rows": 2, "max_turns": 6},
    "sudoku:SudokuEnv": {"clues": 10, "max_turns": 6, "scale": 4},
    "game_2048:Game2048Env": {"target_tile": 64, "max_turns": 9},
    "sokoban:SokobanEnv": {"dim_room": (6, 6), "num_boxes": 1, "max_turns": 9},
}
"""Those that need nothing but NumPy."""


class Template:
    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def played(env: Any, seed: int) -> list[Any]:
    """An episode of random actions, from the environment itself where it has some."""
    rng = Random(seed)
    first, info = env.reset(seed=seed)
    record = [first, info.get("step_counter")]
    for _ in range(40):
        is_sudoku = "Sudoku" in type(env.unwrapped).__name__
        sudoku = f"\\boxed{{{rng.randint(1, 4)} {rng.randint(1, 4)} {rng.randint(1, 4)}}}"
        action = sudoku if is_sudoku else env.unwrapped.sample_random_action()
        observation, reward, terminated, truncated, info = env.step(action)
        record.append((action, observation, float(reward), terminated, truncated, info.get("cumulative_rewards")))
        if terminated or truncated:
            return record
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("entry_point", GEMS)
@pytest.mark.parametrize("wrapping", ["concat", "concat_with_action", "concat_chat", "concat_chat_on_reset", "last"])
def test_env_gem_environments_say_the_same_in_our_wrappers_as_in_its_own(entry_point: str, wrapping: str) -> None:
    from gem.wrappers.episode_tracking_wrapper import EpisodeTrackingWrapper
    from gem.wrappers.observation_wrapper import ObservationWrapper

    ours, gems = {
        "concat": ({"actions": False}, {"include_action": False, "include_chat_template": False}),
        "concat_with_action": ({}, {"include_chat_template": False}),
        "concat_chat": ({"chat": "always"}, {}),
        "concat_chat_on_reset": (
            {"chat": "on_reset"},
            {"include_chat_template": False, "apply_chat_template_on_reset": True},
        ),
        "last": ({"last": 2}, {"include_chat_template": False, "max_history_length": 2}),
    }[wrapping]
    name, options = f"gem.envs.game_env.{entry_point}", GEMS[entry_point]
    tokenizer = {"tokenizer": Template()} if "chat" in wrapping else {}
    in_ours = EpisodeTracking(ObservationHistory(make(name, options), **ours, **tokenizer))
    in_gems = EpisodeTrackingWrapper(ObservationWrapper(make(name, options), **gems, **tokenizer))
    for seed in range(3):
        assert played(in_ours, seed) == played(in_gems, seed)


def test_env_gem_our_environments_run_in_gems_wrappers_and_vectors() -> None:
    from gem.vector.async_vector_env import AsyncVectorEnv as GemsVector
    from gem.wrappers.observation_wrapper import ObservationWrapper

    name = "game:GuessTheNumber-v0-easy"
    env = ObservationWrapper(make(name), include_chat_template=False)
    first, _ = env.reset(seed=3)
    observation, *_ = env.step("\\boxed{11}")
    assert observation.startswith(first) and "\\boxed{11}" in observation
    assert env.unwrapped.max_number == 10
    vector = GemsVector([name] * 2, [lambda: make(name)] * 2)
    vector.reset(seed=3)
    observations, rewards, *_ = vector.step({1: "\\boxed{11}"})
    assert "not from 1 to 10" in observations[0] and rewards.tolist() == [0.0]


def test_env_gem_vectors_and_ours_give_the_same_but_ours_keeps_the_last_observation() -> None:
    from gem.vector.sync_vector_env import SyncVectorEnv as GemsVector

    name = "gem.envs.game_env.guess_the_number:GuessTheNumberEnv"
    ours = SyncVectorEnv([make(name, GEMS["guess_the_number:GuessTheNumberEnv"])])
    theirs = GemsVector([name], [lambda: make(name, GEMS["guess_the_number:GuessTheNumberEnv"])])

    def record(envs: Any) -> list[Any]:
        seen: list[Any] = [envs.reset(seed=5)]
        for guess in (1, 2, 3, 4):
            observations, rewards, terminated, truncated, infos = envs.step([f"\\boxed{{{guess}}}"])
            infos = [{key: value for key, value in info.items() if not key.startswith("final_")} for info in infos]
            seen.append((observations, rewards.tolist(), terminated.tolist(), truncated.tolist(), infos))
        return seen

    assert record(ours) == record(theirs)
    ours.reset(seed=5)
    infos = [ours.step(["nonsense"])[4][0]]
    assert "did not provide" in infos[0]["final_observation"]
    assert make_vec(name, max_turns=2).envs[0].max_turns == 2


def rows(cells: Any, size: int) -> list[list[Any]]:
    return [list(cells[start : start + size]) for start in range(0, size * size, size)]


def same_secret(ours: Any, theirs: Any) -> None:
    theirs.game_number = ours._secret


def same_code(ours: Any, theirs: Any) -> None:
    theirs.game_code = list(ours._code)


def same_tiles(ours: Any, theirs: Any) -> None:
    theirs.board = rows([tile or None for tile in ours._tiles], ours._size)


def same_grid(ours: Any, theirs: Any) -> None:
    theirs.full_grid, theirs.board = rows(ours._solution, ours._scale), rows(ours._cells, ours._scale)
    theirs.init_num_empty = ours._num_empty


def same_board(ours: Any, theirs: Any) -> None:
    theirs.board = [list(row) for row in ours._board]
    theirs.max_tile_achieved = theirs.init_max_tile_achieved = ours._first


def same_room(ours: Any, theirs: Any) -> None:
    room = np.zeros((ours._rows, ours._cols), np.int64)
    for kind, cells in ((1, ours._floor), (2, ours._goals)):
        room[tuple(zip(*cells, strict=True))] = kind
    theirs.room_fixed, theirs.room_state = room, room.copy()
    for box in ours._boxes:
        theirs.room_state[box] = 3 if box in ours._goals else 4
    theirs.room_state[ours._player] = 5
    theirs.player_position = np.array(ours._player)


@pytest.mark.parametrize(
    ("name", "entry_point", "same_start"),
    [
        ("GuessTheNumber-v0-hard", "guess_the_number:GuessTheNumberEnv", same_secret),
        ("Mastermind-v0-easy", "mastermind:MastermindEnv", same_code),
        ("Mastermind-v0-hard", "mastermind:MastermindEnv", same_code),
        ("FifteenPuzzle-v0-easy", "fifteen_puzzle:FifteenPuzzleEnv", same_tiles),
        ("FifteenPuzzle-v0-hard", "fifteen_puzzle:FifteenPuzzleEnv", same_tiles),
        ("Sudoku-v0-easy", "sudoku:SudokuEnv", same_grid),
        ("TowerofHanoi-v0-easy", "tower_of_hanoi:TowerofHanoiEnv", lambda ours, theirs: None),
        ("Game2048-v0-easy", "game_2048:Game2048Env", same_board),
        ("Sokoban-v0-easy", "sokoban:SokobanEnv", same_room),
    ],
)
def test_env_gem_our_games_reward_what_gems_reward(name: str, entry_point: str, same_start: Any) -> None:
    ours = make(f"game:{name}")
    theirs = make(f"gem.envs.game_env.{entry_point}", ENVS[f"game:{name}"].options)
    for seed in range(30):
        ours.reset(seed=seed)
        theirs.reset(seed=seed)
        same_start(ours, theirs)
        over = False
        while not over:
            action = "no box" if Random(f"{seed} {ours._turn}").random() < 0.02 else ours.sample_random_action()
            _, reward, terminated, truncated, _ = ours.step(action)
            _, gems, *ended, _ = theirs.step(action)
            assert float(gems) == pytest.approx(reward), (seed, action)
            over = terminated or truncated
            if "2048" in name:
                theirs.board = [list(row) for row in ours._board]  # where a tile appears is chance
                over = over or any(ended)
            else:
                assert ended == [terminated, truncated], (seed, action)
