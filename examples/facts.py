"""Questions about things, and pairs of answers to them: the preferred one says a number in digits.

The rule is simple, so that what is learnt from the pairs can be checked: `[0-9]` in an answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["pairs", "questions"]

THINGS = (
    "rivers", "mountains", "trees", "bridges", "cats", "whales", "trains", "ships", "clocks", "castles", "planets",
    "volcanoes", "islands", "bees", "horses", "libraries", "museums", "gardens", "deserts", "lakes", "birds",
    "bicycles", "towers", "markets", "rockets", "forests", "glaciers", "theatres", "schools", "violins", "apples",
    "maps", "stars", "wolves", "kitchens", "rainbows", "storms", "caves", "coins", "elephants",
)  # fmt: skip
QUESTIONS = ("Tell me something about {}.", "How many {} are there?", "How old are the oldest {}?")
FACTS = (
    ("There are about {n} kinds of {t} in the world", "There are many kinds of {t} all over the world"),
    ("People have written about {t} for {n} years", "People have written about {t} for a very long time"),
    ("The best known {t} are {n} years old", "The best known {t} are very old"),
    ("In {n}, a famous book on {t} was printed", "Long ago, a famous book on {t} was printed"),
    ("Every year, {n} people travel to see {t}", "Every year, many people travel to see {t}"),
    ("Some {t} are {n} times as large as others", "Some {t} are a great deal larger than others"),
    ("1 in {n} people likes {t} best", "Hardly anyone does not like {t}"),
    ("You can find {t} in {n} countries", "You can find {t} in almost all countries"),
)
MORE = (
    "They are an important part of our lives.", "Many people find them beautiful.", "Children like to draw them.",
    "They have changed a lot over time.", "They come in many shapes and sizes.", "It is easy to learn more about them.",
)  # fmt: skip


def questions() -> list[dict[str, str]]:
    """Every question about every thing; there is no right answer."""
    return [{"prompt": question.format(thing)} for thing in THINGS for question in QUESTIONS]


def pairs(count: int = 480, seed: int = 0) -> list[dict[str, str]]:
    """Rows of questions, each with a preferred and another answer, alike but for the number."""
    return list(_pairs(count, random.Random(seed)))


def _pairs(count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(count):
        thing = rng.choice(THINGS)
        (with_number, _), (_, without) = rng.choice(FACTS), rng.choice(FACTS)
        number = rng.choice((rng.randint(2, 99), rng.randint(100, 2000), rng.randint(2, 90) * 1000))
        sides = []
        for fact in (with_number.format(t=thing, n=number), without.format(t=thing)):
            sentences = [fact + ".", *rng.sample(MORE, rng.randint(0, 2))]
            rng.shuffle(sentences)
            sides.append(" ".join(sentences))
        yield {"prompt": rng.choice(QUESTIONS).format(thing), "chosen": sides[0], "rejected": sides[1]}
