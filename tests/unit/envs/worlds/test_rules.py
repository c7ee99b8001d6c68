"""What single worlds promise, by numbers computed by hand or another way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from roll.envs.tools.build import with_tools
from roll.envs.worlds.board_games import KuhnPoker, TicTacToe, _compute_value
from roll.envs.worlds.catalogue import build_catalogue
from roll.envs.worlds.dialogue import Booking
from roll.envs.worlds.house import TASKS
from roll.envs.worlds.household import Household
from roll.envs.worlds.logic import RuleTaker, _Rule, derive_traits
from roll.envs.worlds.mathematics import KINDS, MathQuestion, parse_number
from roll.envs.worlds.multi_hop import MultiHop, build_corpus, make_multi_hop
from roll.envs.worlds.shopping import Goal, Shopping, compute_purchase_reward
from roll.envs.worlds.two_player import Match, TwoPlayer
from roll.envs.worlds.world import extract_answer, is_same_text
from roll.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{3} or \\boxed{ 4 }", "4"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("<answer>Paris</answer> done", "Paris"),
        ("<answer>not closed", "not closed"),
        ("\\boxed{1", None),
        ("nothing", None),
        ("\\boxed{" + "x" * 2_000 + "}", None),
    ],
)
def test_env_rules_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", Fraction(42)),
        ("-1,200", Fraction(-1200)),
        ("2.50", Fraction(5, 2)),
        ("6/4", Fraction(3, 2)),
        ("-\\frac{3}{6}", Fraction(-1, 2)),
        ("$3", Fraction(3)),
        ("1/0", None),
        ("\\frac{1}{0}", None),
        ("x", None),
        ("1.5/2", None),
        ("9" * 5_000, None),
    ],
)
def test_env_rules_numbers_are_read_exactly(text: str, number: Fraction | None) -> None:
    assert parse_number(text) == number


def test_env_rules_questions_repeat_with_their_seed_and_arithmetic_is_right() -> None:
    for kind, make in KINDS.items():
        for seed in range(50):
            question, answer = make(Random(seed), 2)
            assert make(Random(seed), 2) == (question, answer)
            if kind == "arithmetic":
                expression = question.removeprefix("What is ").removesuffix("?")
                assert answer == eval(expression)
    env = MathQuestion(kinds=["equation"])
    observation, _ = env.reset(1)
    assert observation.startswith("Solve for x")
    with pytest.raises(ValueError, match="unknown"):
        MathQuestion(kinds=["algebra"])


def test_env_rules_a_statement_is_as_deep_and_as_true_as_was_asked_for() -> None:
    for depth in (0, 1, 2, 3, 5):
        truths = set()
        for seed in range(40):
            env = RuleTaker(depth)
            text, _ = env.reset(seed)
            body, _, question = text.partition("\nIs it true or false that ")
            statement = question.partition("?")[0].split()
            person, negated, trait = statement[0], "not" in statement, statement[-1]
            sentences = [sentence.strip(". ").split() for sentence in body.split(". ")]
            facts = {words[2] for words in sentences if words[0] == person}
            rules = tuple(
                _Rule(tuple(w for w in words[3 : words.index("then")] if w != "and"), words[-1])
                for words in sentences
                if words[0] == "If"
            )
            depths = derive_traits(facts, rules)
            truth = (trait in depths) is not negated
            assert env.solution() == f"\\boxed{{{truth}}}"
            assert depths.get(trait, depth) == depth
            truths.add((truth, negated))
        assert len(truths) == 4


def test_env_rules_the_corpus_answers_its_questions_through_search_alone() -> None:
    assert len(build_corpus().passages) == 12 + 60 + 24 + 120 + 80
    env = make_multi_hop(hops=3)
    env.reset(11)
    *searches, answer = env.unwrapped.solution()
    found = [env.step(search)[0] for search in searches]
    assert is_same_text(answer[len("\\boxed{") : -1], env.unwrapped._answer)
    assert env.unwrapped._answer in found[-1], "the last document has the answer"
    assert env.unwrapped._answer not in MultiHop(3).reset(11)[0]
    assert is_same_text("The  Belton!", "belton")
    assert not is_same_text("Belton", "Belville")


def test_env_rules_a_purchase_is_worth_what_webshops_formula_says() -> None:
    product = build_catalogue()["B00000"]
    attributes = frozenset(sorted(product.attributes)[:2])
    options = {name: values[0] for name, values in product.options.items()}
    goal = Goal(product=product, attributes=attributes, options=options, price=product.price)
    assert compute_purchase_reward(goal, product, dict(options)) == 1.0
    assert compute_purchase_reward(goal, product, {}) == pytest.approx(3 / 5)
    cheap = Goal(product=product, attributes=attributes, options=options, price=product.price - 1)
    assert compute_purchase_reward(cheap, product, dict(options)) == pytest.approx(4 / 5)
    other = next(p for p in build_catalogue().values() if p.department == product.department and p.kind != product.kind)
    met = len(attributes & other.attributes) + 2 + (other.price <= goal.price)
    assert compute_purchase_reward(goal, other, dict(options)) == pytest.approx(0.5 * met / 5)
    foreign = next(p for p in build_catalogue().values() if p.department != product.department)
    assert compute_purchase_reward(goal, foreign, dict(options)) == 0.0


def test_env_rules_pages_of_the_shop_are_walked() -> None:
    env = Shopping()
    env.reset(0)
    observation, reward, *_ = env.step("click[buy now]")
    assert (reward, observation.splitlines()[0]) == (-0.1, "There is no 'buy now' to click on this page.")
    first, *_, info = env.step("I think search[ Desk  LAMP ]")
    assert "Page 1 of" in first
    assert "click[next >]" in info["admissible"]
    second, *_ = env.step("click[next >]")
    assert "Page 2 of" in second
    assert env.step("click[< prev]")[0] == first
    assert "There is no search field" in env.step("search[x]")[0]
    item = next(a for a in env.step("click[next >]")[-1]["admissible"] if a.startswith("click[b0"))
    page, *_ = env.step(item)
    assert "This" in env.step("click[description]")[0]
    assert env.step("click[< prev]")[0] == page
    assert "(chosen)" in env.step("click[white]")[0]
    assert env.step("click[back to search]")[0] == "[search field]"


def test_env_rules_all_six_kinds_of_household_tasks_come_and_none_is_done_at_first() -> None:
    kinds = set()
    for seed in range(60):
        env = Household()
        _, info = env.reset(seed)
        kinds.add(info["task"])
        assert env.step("look")[1] == 0.0
        assert env.step("fly to the moon")[:2] == ("Nothing happens.", -0.1)
    assert kinds == set(TASKS)
    env = Household(max_turns=2)
    env.reset(0)
    env.step("look")
    assert env.step("look")[3] is True


def test_env_rules_what_is_not_treated_does_not_count() -> None:
    env = Household(tasks=["pick_heat_then_place"])
    env.reset(3)
    for command in (c for c in env.solution() if not c.startswith(("heat", "go to microwave", "open microwave"))):
        _, reward, done, *_ = env.step(command)
    assert (reward, done) == (0.0, False)


def test_env_rules_the_user_tells_what_is_asked_and_a_booking_counts_its_share() -> None:
    env = Booking(num_wishes=4, num_told=0)
    env.reset(0)
    name, value = next(iter(env._wishes.items()))
    assert f"The {name} should be {value}." in env.step(f"What {name} would you like?")[0]
    _, reward, done, *_ = env.step(f"book({name}={value}, nonsense=1)")
    assert (reward, done) == (0.25, True)


async def test_env_rules_a_user_can_be_any_async_function() -> None:
    heard: list[Sequence[Any]] = []

    async def user(messages: Sequence[Any]) -> str:
        await asyncio.sleep(0)
        heard.append(messages)
        return "Thai food."

    env = Booking(user=user)
    env.reset(0)
    observation, *_ = await env.step("What food?")
    assert observation == "User: Thai food."
    assert [m["role"] for m in heard[0]] == ["system", "assistant", "user"]
    assert "thai" in heard[0][0]["content"] or "You want" in heard[0][0]["content"]


def test_env_rules_tic_tac_toe_is_a_draw_between_experts_and_a_game_has_no_more_than_its_places() -> None:
    assert _compute_value("." * 9, "x") == 0
    match = Match("tic_tac_toe")
    while match.rewards is None:
        assert match.act(f"\\boxed{{{match.find_best_move()}}}")
    assert match.rewards == (0.0, 0.0)
    game = TicTacToe(Random(0))
    for move in "14253":  # x: 1 2 3, o: 4 5
        game.play(move)
    assert game.compute_rewards() == (1.0, -1.0)


def test_env_rules_kuhn_poker_pays_the_higher_card_and_who_does_not_fold() -> None:
    for moves, winner in ((["check", "check"], 0.5), (["bet", "call"], 1.0), (["check", "bet", "call"], 1.0)):
        game = KuhnPoker(Random(0))
        for move in moves:
            assert game.compute_rewards() is None
            game.play(move)
        sign = 1 if game._cards[0] > game._cards[1] else -1
        assert game.compute_rewards() == (winner * sign, -winner * sign)
    for moves, rewards in ((["bet", "fold"], (0.5, -0.5)), (["check", "bet", "fold"], (-0.5, 0.5))):
        game = KuhnPoker(Random(1))
        for move in moves:
            game.play(move)
        assert game.compute_rewards() == rewards


def test_env_rules_both_seats_can_be_played_by_a_model() -> None:
    match = Match("kuhn_poker", seed=4)
    seen = [match.observe(0), match.observe(1)]
    assert "Moves: check, bet" in seen[0]
    assert "Moves" not in seen[1]
    assert seen[0].partition("Your card")[2][:8] != seen[1].partition("Your card")[2][:8]
    assert not match.act("\\boxed{call}")
    assert match.act("I \\boxed{bet}")
    assert match.turn == 1
    assert match.act("\\boxed{fold}")
    assert match.rewards == (0.5, -0.5)


async def test_env_rules_an_opponent_is_random_an_expert_or_any_function() -> None:
    env = TwoPlayer("nim", opponent="expert", seat=1)
    env.reset(0)
    assert env._match.turn == 1, "the opponent has moved"

    def silent(seen: str, moves: list[str]) -> str:
        return "no idea"

    env = TwoPlayer("nim", opponent=silent, seat=1)
    assert env.reset(0)[0].startswith("The opponent gave no legal move; its first legal move was made.")

    async def first(seen: str, moves: list[str]) -> str:
        await asyncio.sleep(0)
        return f"\\boxed{{{moves[0]}}}"

    env = TwoPlayer("nim", opponent=first, seat=1)
    observation, _ = await env.reset(0)
    assert observation.startswith("Nim")
    while True:
        _, reward, ended, *_ = await _late(env)
        if ended:
            break
    assert reward in (1.0, -1.0)
    with pytest.raises(ConfigError, match=r"unknown two-player game 'chess'"):
        TwoPlayer("chess")
    with pytest.raises(ValueError, match="opponent must be"):
        TwoPlayer(opponent="strong")


async def _late(env: TwoPlayer) -> Any:
    result = env.step(env.solution())
    return await result if asyncio.iscoroutine(result) else result


def test_env_rules_any_world_takes_tools() -> None:
    env = with_tools(MathQuestion(), ["calculator"], rewards={"call": 0.1})
    env.reset(0)
    observation, reward, ended, *_ = env.step("<calculator>2+3</calculator>")
    assert (observation, reward, ended) == ("<result>\n5\n</result>", 0.1, False)
    assert env.step(env.unwrapped.solution())[1:3] == (1.0, True)
