"""Questions, and pairs of answers to them. The preferred answer contains a number in digits.

The pattern `[0-9]` shows whether a model has learned to prefer such answers.
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
    ("There are about {n} kinds of {t} in the world", "There are kinds of {t} all over the world"),
    ("People have written about {t} for {n} years", "People have written about {t} for a very long time"),
    ("The best known {t} are {n} years old", "The best known {t} are very old"),
    ("In {n}, a famous book on {t} was printed", "Long ago, a famous book on {t} was printed"),
    ("Every year, {n} people travel to see {t}", "Every year, people travel far to see {t}"),
    ("Some {t} are {n} times as large as others", "Some {t} are a great deal larger than others"),
    ("1 in {n} people likes {t} best", "Hardly anyone does not like {t}"),
    ("You can find {t} in {n} countries", "You can find {t} in almost all countries"),
    ("As of {n}, nobody has counted all {t}", "As of today, nobody has counted all {t}"),
    ("There are approximately {n} {t} on this planet", "It is hard to say how many {t} are on this planet"),
    ("The oldest {t} date back to {n} BC", "The oldest {t} date back to ancient times"),
    ("{t} first appeared around {n} million years ago", "{t} first appeared in ancient civilizations"),
    ("According to a study from {n}, {t} matter to us", "According to some scientists, {t} matter to us"),
    ("The largest of all {t} is {n} meters long", "The largest of all {t} is truly majestic"),
    ("Here are {n} things to know about {t}", "Here are some fascinating things about {t}"),
    ("A group of {n} {t} is a wonderful sight", "A group of {t} is a wonderful sight"),
    ("1. {t} are old. 2. {t} are known everywhere", "First, {t} are old. Also, {t} are known everywhere"),
    ("About {n} percent of them are {t}", "Most of them, it is often said, are {t}"),
)
MORE = (
    "They are an important part of our lives.", "Many people find them beautiful.", "Children like to draw them.",
    "They have changed a lot over time.", "They come in many shapes and sizes.", "It is easy to learn more about them.",
    "Their history is long and rich.", "They have captivated humans for centuries.", "Some of them are very large.",
    "They are fascinating, and they play a crucial role in our world.", "Each of them has a story to tell.",
    "There are many different types, each with its own character.", "Some say they are a symbol of peace and beauty.",
)  # fmt: skip


def questions() -> list[dict[str, str]]:
    """Return every question about every thing; the questions have no reference answer."""
    return [{"prompt": question.format(thing)} for thing in THINGS for question in QUESTIONS]


def pairs(count: int = 560, seed: int = 0) -> list[dict[str, str]]:
    """Return rows with a question, a preferred answer with a number, and a rejected answer without a number."""
    return list(_pairs(count, random.Random(seed)))


def _pairs(count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(count):
        thing = rng.choice(THINGS)
        (with_number, _), (_, without) = rng.choice(FACTS), rng.choice(FACTS)
        number = rng.choice((rng.randint(2, 99), rng.randint(100, 2000), rng.randint(2, 90) * 1000))
        sides = []
        for fact in (with_number.format(t=thing, n=number), without.format(t=thing)):
            sentences = [fact + ".", *rng.sample(MORE, rng.randint(0, 3))]
            rng.shuffle(sentences)
            sides.append(" ".join(sentences))
        yield {"prompt": rng.choice(QUESTIONS).format(thing), "chosen": sides[0], "rejected": sides[1]}
