"""Facts, rules, and a statement that follows or does not, in the style of RuleTaker (arXiv 2002.05867).

A statement that cannot be derived is false. The depth of a question is the number of rules in its derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, extract_answer

__all__ = ["RuleTaker", "derive_traits"]

NAMES = ("Anne", "Bob", "Charlie", "Dave", "Erin", "Fiona", "Gary", "Harry")
TRAITS = (
    *("big", "blue", "cold", "furry", "green", "kind", "nice", "quiet", "red", "rough", "round", "smart"),
    *("white", "young", "calm", "brave", "tall", "loud"),
)


@dataclass(frozen=True)
class _Rule:
    premises: tuple[str, ...]
    conclusion: str

    def __str__(self) -> str:
        return f"If someone is {' and '.join(self.premises)} then they are {self.conclusion}."


def derive_traits(facts: set[str], rules: tuple[_Rule, ...]) -> dict[str, int]:
    """Return every trait that follows from one person's `facts`, with the depth of its shortest derivation."""
    depth = dict.fromkeys(facts, 0)
    level = 0
    while True:
        level += 1
        new = {r.conclusion for r in rules if r.conclusion not in depth and all(need in depth for need in r.premises)}
        if not new:
            return depth
        depth |= dict.fromkeys(new, level)


@dataclass(eq=False)
class RuleTaker(World):
    r"""A question about facts and rules, to be answered with `\boxed{True}` or `\boxed{False}`.

    The reward is 1 for the correct answer, 0 for the incorrect answer, and −0.1 for any other text.

    Args:
        depth: Depth of the question, 0 to 5.
        num_people: Number of people in the facts, 1 to 8.
        num_distractors: Number of rules that are irrelevant to the question.
    """

    depth: int = 2
    num_people: int = 3
    num_distractors: int = 4

    def __post_init__(self) -> None:
        depth, people, distractors = self.depth, self.num_people, self.num_distractors
        if not 0 <= depth <= 5 or not 1 <= people <= len(NAMES) or not 0 <= distractors <= 20:
            raise ValueError(
                f"depth must be from 0 to 5, num_people from 1 to {len(NAMES)}, num_distractors from 0 to 20; "
                f"got {depth}, {people} and {distractors}"
            )

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        random = self.random
        person, *others = random.sample(NAMES, self.num_people)
        chain = random.sample(TRAITS, self.depth + 1)
        spare = [trait for trait in TRAITS if trait not in chain]
        extra = random.sample(spare[:8], 2)  # further traits of that person, outside the chain
        unused_traits = spare[8:]  # traits that no person has and no rule implies
        rules = [_Rule(_sample_premises(random, chain[n], extra), chain[n + 1]) for n in range(self.depth)]
        for _ in range(self.num_distractors):
            rules.append(_Rule((random.choice(unused_traits), random.choice(TRAITS)), random.choice(spare[:8])))
        facts = {person: {chain[0], *extra}} | {
            other: set(random.sample([*chain[1:], *spare[:8]], 2)) if self.depth else set(random.sample(spare[:8], 2))
            for other in others
        }
        random.shuffle(rules)
        lines = [f"{name} is {trait}." for name, traits in facts.items() for trait in sorted(traits)]
        random.shuffle(lines)
        self._truth = random.random() < 0.5
        statement = self._sample_statement(person, chain[-1], unused_traits)
        text = " ".join([*lines, *map(str, rules)])
        question = f"{text}\nIs it true or false that {statement}?"
        wish = "What does not follow is false. Put True or False into \\boxed{}."
        return f"{question} {wish}", {"state": question}

    def _sample_statement(self, person: str, derived_trait: str, missing_traits: list[str]) -> str:
        """Return a statement about a person with the truth value `_truth`, negated or not at random.

        The statement uses `derived_trait`, which the person has, or one of `missing_traits`, which the person does not
        have.
        """
        negated = self.random.random() < 0.5
        trait = self.random.choice(missing_traits) if negated == self._truth else derived_trait
        return f"{person} is {'not ' if negated else ''}{trait}"

    def step(self, action: str) -> StepResult:
        """See `Env`."""
        answer = (extract_answer(action) or "").casefold()
        right = answer == str(self._truth).casefold()
        info: dict[str, Any] = {"state": "answered", "correct": right}
        if answer not in ("true", "false"):
            return "There is no True or False in \\boxed{}.", FORMAT_ERROR_REWARD, True, False, info
        return ("Right." if right else "Wrong."), float(right), True, False, info

    def sample_random_action(self) -> str:
        """Return a random answer."""
        return f"\\boxed{{{self.action_random.choice(['True', 'False'])}}}"

    def solution(self) -> str:
        """Return an expert's action."""
        return f"\\boxed{{{self._truth}}}"


def _sample_premises(random: Random, trait: str, extra: list[str]) -> tuple[str, ...]:
    return (trait, random.choice(extra)) if random.random() < 0.5 else (trait,)
