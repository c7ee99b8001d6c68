"""Every game by its name: won by who plays well, survived by who plays at random, unmoved by hostile texts."""

from __future__ import annotations

import itertools
import time
from random import Random
from typing import Any

import pytest
from worlds.game_solvers import SOLVERS, solved

from roll.envs import ENVS, make
from roll.envs.games.answers import extract_box, parse_numbers
from roll.envs.games.clues import list_clues
from roll.envs.games.game_2048 import slide
from roll.envs.games.mastermind import count_pegs
from roll.envs.games.sudoku import iterate_solutions
from roll.envs.games.wiki_pages import list_pages
from roll.envs.games.wordle import mark_guess
from roll.envs.games.words import list_words
from roll.errors import DataError


def game_of(name: str) -> str:
    return name.removeprefix("game:").partition("-")[0]


GAMES = [name for name in ENVS if name.startswith("game:")]
OUT_OF_REACH = {"game:Game2048-v0-hard", "game:Game2048-v0-extreme-hard", "game:FrozenLake-v0-slippery"}
"""A target that the turns do not suffice for, or chance."""

SOLVED = [name for name in GAMES if game_of(name) in SOLVERS and name not in OUT_OF_REACH]
FEW = 8
"""Seeds of the quick tests; the slow ones have those that count."""


def episode(env: Any, seed: int, actions: Any = None) -> list[Any]:
    """What happens with the environment's own random actions, or those given."""
    record = [env.reset(seed=seed)]
    for turn in itertools.count():
        record.append(env.step(env.sample_random_action() if actions is None else actions[turn]))
        if record[-1][2] or record[-1][3]:
            return record


def test_env_games_gems_39_names_are_there() -> None:
    ours = ("game:FrozenLake", "game:Bandit")
    assert len([name for name in GAMES if not name.startswith(ours)]) == 39


def check_won(name: str, seeds: range) -> None:
    for seed in seeds:
        rewards = solved(make(name), SOLVERS[game_of(name)], seed)
        if "WikiGame" in name:  # every page on the way costs
            assert rewards == [-0.05] * (len(rewards) - 1) + [1.0], seed
        else:
            assert sum(rewards) == pytest.approx(1.0), seed


@pytest.mark.parametrize("name", SOLVED)
def test_env_games_a_player_that_reads_the_observations_wins(name: str) -> None:
    check_won(name, range(2 if "Sokoban-v0-hard" in name else FEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVED)
def test_env_games_a_player_that_reads_the_observations_wins_on_a_hundred_seeds(name: str) -> None:
    check_won(name, range(100))


def check_survives(name: str, episodes: int) -> None:
    env = make(name)
    for seed in range(episodes):
        record = episode(env, seed)
        rewards = [step[1] for step in record[1:]]
        assert -0.2 * len(rewards) <= sum(rewards) <= 1 + 1e-9
        assert all(isinstance(step[0], str) and step[0] and step[4]["state"] for step in record[1:])
        with pytest.raises(RuntimeError, match="call reset"):
            env.step("\\boxed{A}")


@pytest.mark.parametrize("name", GAMES)
def test_env_games_a_random_policy_survives(name: str) -> None:
    check_survives(name, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_env_games_a_random_policy_survives_a_thousand_episodes(name: str) -> None:
    check_survives(name, 1000)


@pytest.mark.parametrize("name", GAMES)
def test_env_games_equal_seeds_give_equal_episodes_and_others_differ(name: str) -> None:
    one, two = make(name), make(name)
    one.reset()
    two.reset(seed=99)
    assert [episode(one, seed) for seed in range(3)] == [episode(two, seed) for seed in range(3)]
    distinct = {str(episode(one, seed)) for seed in range(12)}
    assert len(distinct) > 6
    one.reset(seed=4)
    two.reset(seed=4)
    assert one.reset() == two.reset()  # also the episodes that follow


@pytest.mark.parametrize("name", GAMES)
def test_env_games_sampled_actions_change_no_episode(name: str) -> None:
    env, other = make(name), make(name)
    env.reset(seed=3)
    action = env.sample_random_action()
    assert other.reset(seed=3)
    for _ in range(3):
        other.sample_random_action()
    assert env.step(action) == other.step(action)


@pytest.mark.parametrize("name", GAMES)
def test_env_games_copies_have_the_same_settings_and_if_asked_the_same_state(name: str) -> None:
    env = make(name)
    env.reset(seed=1)
    action = env.sample_random_action()
    twin = env.spawn(same_state=True)
    assert twin.step(action) == env.step(action)
    assert episode(env.spawn(), 5) == episode(make(name), 5)
    assert env.spawn(max_turns=14).max_turns == 14
    with pytest.raises(TypeError, match="colour"):
        env.spawn(colour=1)
    with pytest.raises(ValueError, match="same_state and overrides cannot be combined"):
        env.spawn(same_state=True, max_turns=3)


@pytest.mark.parametrize("name", GAMES)
def test_env_games_the_last_turn_terminates_and_truncates(name: str) -> None:
    env = make(name)
    env.reset(seed=0)
    against_the_rules = {"Wordle": "ABCDEFGHIJK", "Hangman": "ABCDEFGHIJK", "WikiGame": "Nowhere", "Bandit": "Z"}
    action = against_the_rules.get(game_of(name))
    for _ in range(200):
        move = env.sample_random_action() if action is None else f"\\boxed{{{action}}}"
        observation, _, terminated, truncated, _ = env.step(move)
        if terminated:
            break
    assert terminated and (not truncated or "your last turn" in observation)
    if action is not None:
        assert truncated


HOSTILE = {
    "nothing": "",
    "prose": "I would rather not.",
    "unclosed": "\\boxed{1",
    "empty": "\\boxed{}",
    "a megabyte": "x" * 1_000_000,
    "a megabyte in the box": "\\boxed{" + "x" * 1_000_000 + "}",
    "digits": "\\boxed{" + "9" * 200_000 + "}",
    "digits apart": "\\boxed{" + "9 " * 200_000 + "}",
    "nested": "\\boxed{" * 100_000 + "}" * 100_000,
    "opening braces": "\\boxed{" + "{" * 500_000,
    "boxes without end": "\\boxed{" * 150_000,
    "control characters": "\\boxed{1\x00 2\x07}",
    "other digits": "\\boxed{\u0661 \u0662 \u0663}",
    "superscripts": "\\boxed{² ³ ¹}",
    "surrogates": "\\boxed{\ud800}",
    "bidirectional": "\\boxed{\u202e1\u202c}",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_env_games_hostile_texts_cost_the_format_reward_and_little_time(text: str) -> None:
    started = time.process_time()
    for name in GAMES:
        env = make(name)
        env.reset(seed=0)
        observation, reward, terminated, _, _ = env.step(text)
        title = "WikiGame" in name and text in (
            "\\boxed{\u0661 \u0662 \u0663}",
            "\\boxed{² ³ ¹}",
        )  # no page has it: against the rules
        assert (reward, terminated) == ((-0.2 if "WikiGame" in name else -0.1), not title), name
        assert len(observation) < 2_000
    assert time.process_time() - started < 5  # 48 games; linear, so far below


@pytest.mark.parametrize("name", GAMES)
def test_env_games_no_short_text_makes_a_game_fail(name: str) -> None:
    rng = Random(0)
    parts = [
        "reveal",
        "flag",
        "up",
        "A",
        "0",
        "1",
        "-1",
        "99999999999999999999",
        "1.5",
        "\u0663",
        "é",
        "{",
        "}",
        "\\",
        ",",
    ]
    env = make(name)
    for seed in range(15):
        env.reset(seed=seed)
        over = False
        while not over:
            text = " ".join(rng.choices(parts, k=rng.randint(1, 4)))
            _, _, over, _, _ = env.step(f"\\boxed{{{text}}}")


def test_env_games_the_last_closed_box_counts() -> None:
    assert extract_box("first \\boxed{1}, then \\boxed{ 2 3 }.") == "2 3"
    assert extract_box("\\boxed{a{b}c}") == "a{b}c"
    assert (
        extract_box("\\boxed{a")
        is extract_box("boxed{a}")
        is extract_box("\\boxed{ }")
        is extract_box("\\boxed{a\nb}")
        is None
    )
    assert extract_box("\\boxed{" + "a" * 80 + "}") == "a" * 80
    assert extract_box("\\boxed{" + "a" * 81 + "}") is None
    assert parse_numbers("3  4", 2) == [3, 4]
    assert (
        parse_numbers("3 4", 3)
        is parse_numbers("3 -4")
        is parse_numbers("x")
        is parse_numbers("")
        is parse_numbers("²")
        is None
    )


def test_env_games_pegs_and_marks_are_those_of_the_rules() -> None:
    assert count_pegs((1, 2, 3, 4), (1, 3, 2, 5)) == (1, 2)
    assert count_pegs((1, 1, 2, 2), (1, 2, 1, 1)) == (1, 2)  # black 1; white: one 1 and one 2
    assert mark_guess("LEVEL", "HELLO") == "XGYYX"
    assert mark_guess("ABIDE", "SPEED") == "XXYXY"  # one E of two


def test_env_games_tiles_merge_once_a_move() -> None:
    board = ((2, 2, 2, 2), (4, 4, 8, 0), (0, 2, 0, 2), (2, 0, 0, 0))
    assert slide(board, "left") == ((4, 4, 0, 0), (8, 8, 0, 0), (4, 0, 0, 0), (2, 0, 0, 0))
    assert slide(board, "right")[1] == (0, 0, 8, 8)
    assert slide(board, "up") == ((2, 2, 2, 4), (4, 4, 8, 0), (2, 2, 0, 0), (0, 0, 0, 0))


def test_env_games_sudokus_have_one_solution() -> None:
    for name, seed in itertools.product(("game:Sudoku-v0-easy", "game:Sudoku-v0-hard"), range(5)):
        env = make(name)
        _, info = env.reset(seed=seed)
        cells = [int(sign) for sign in info["state"]]
        assert sum(map(bool, cells)) == env.clues
        (only,) = iterate_solutions(cells, env.scale)
        for row in range(env.scale):
            assert sorted(only[row * env.scale : (row + 1) * env.scale]) == list(range(1, env.scale + 1))
            assert sorted(only[row :: env.scale]) == list(range(1, env.scale + 1))
    assert len(list(iterate_solutions([0] * 16, 4))) == 288  # as many as there are


def test_env_games_lists_of_words_are_sound() -> None:
    for rare in (False, True):
        assert all(3 <= len(word) <= 7 and word.isascii() and word.isalpha() for word in list_words(rare=rare))
        assert all(len(list_words(length, rare)) >= 40 for length in range(3, 8))
        assert len(set(list_clues(rare).values())) == len(list_clues(rare)) > 100
        assert all(word.isalpha() and clue for word, clue in list_clues(rare).items())
    for page in list_pages().values():
        assert set(page.links) <= list_pages().keys() - {page.title}
        assert len(set(page.links)) == len(page.links) >= 3


def test_env_games_guessing_has_the_rewards_that_are_written_down() -> None:
    env = make("game:GuessTheNumber-v0-easy")
    env.reset(seed=0)
    env._secret = 7  # of 1 to 10, in 4 turns
    assert env.step("\\boxed{5}") == (
        "At turn 1, you guessed 5, and my number is higher than 5.\nEnter your next guess.",
        0.0,
        False,
        False,
        {"state": "5 higher"},
    )
    assert env.step("\\boxed{0}")[1] == env.step("\\boxed{5}")[1] == 0.0
    _, reward, terminated, truncated, _ = env.step("\\boxed{10}")
    assert (terminated, truncated) == (True, True)
    assert reward == pytest.approx(1 - 3 / 9)


def test_env_games_minesweeper_is_won_by_revealing_and_lost_by_a_mine() -> None:
    env = make("game:Minesweeper-v0-easy")
    env.reset(seed=0)
    env.step("\\boxed{reveal 2 2}")
    assert len(env._mines) == 5 and all(max(abs(r - 2), abs(c - 2)) > 1 for r, c in env._mines)
    row, col = min(env._mines)
    env.step(f"\\boxed{{flag {row} {col}}}")
    assert "remove it first" in env.step(f"\\boxed{{reveal {row} {col}}}")[0]
    env.step(f"\\boxed{{flag {row} {col}}}")
    assert env.step(f"\\boxed{{reveal {row} {col}}}")[1:4] == (0.0, True, False)


def test_env_games_slippery_ice_takes_a_player_elsewhere_two_times_of_three() -> None:
    env = make("game:FrozenLake-v0-slippery", size=5, holes=0.0)
    ahead = 0
    for seed in range(600):
        env.reset(seed=seed)
        ahead += "you moved down." in env.step("\\boxed{down}")[0]
    assert 160 < ahead < 240  # 200 of 600, give or take three and a half deviations


def test_env_games_a_bandits_best_machine_pays_as_often_as_it_should() -> None:
    env = make("game:Bandit-v0-easy", max_turns=1000)
    env.reset(seed=1)
    best = max(env._chances, key=env._chances.get)
    assert sum(env.step(f"\\boxed{{{best}}}")[1] for _ in range(1000)) == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("GuessTheNumber-v0-easy", {"max_turns": 0}, "max_turns must be at least 1, .* got 0"),
        ("Mastermind-v0-easy", {"code_length": 9}, "code_length must be <= num_numbers"),
        ("Minesweeper-v0-easy", {"num_mines": 17}, "num_mines must be at most 16"),
        ("Wordle-v0-easy", {"word_length": 9}, "word_length must be from 3 to 7, got 9"),
        ("Hangman-v0-easy", {"word_length": 2}, "word_length must be from 3 to 7, got 2"),
        ("Sudoku-v0-easy", {"scale": 6}, "scale must be 4 or 9"),
        ("Sudoku-v0-easy", {"clues": 16}, "clues must be less than the 16 cells"),
        ("Game2048-v0-easy", {"target_tile": 48}, "power of two"),
        ("Sokoban-v0-easy", {"dim_room": [4, 6]}, "each at least 5"),
        ("Sokoban-v0-easy", {"num_boxes": 5}, "num_boxes must be at most 4"),
        ("Crosswords-v0-easy", {"max_turns": 8}, "for 3 words"),
        ("WordSearch-v0-easy", {"num_words": 51}, "at most 50"),
        ("FrozenLake-v0-easy", {"holes": 1.0}, "holes must be in"),
        ("FrozenLake-v0-easy", {"size": 12}, "must be at least 22, the length of the shortest path"),
        ("Bandit-v0-easy", {"best": 1.5}, "best must be a probability from 0 to 1, got 1.5"),
        ("Bandit-v0-easy", {"num_machines": 27}, "at most 26"),
        ("TowerofHanoi-v0-easy", {"num_disks": 0}, "num_disks must be at least"),
        ("FifteenPuzzle-v0-easy", {"num_rows": 1}, "num_rows must be at least"),
    ],
)
def test_env_games_arguments_that_make_no_sense_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make(f"game:{name}", options)
