"""Questions that require two or three documents about a small fictional world, which no model has memorized.

    company ─ founder ─► person ─ born in ─► town ─ in ─► country ─ capital ─► town
                            └─ studied at ─► university ─ in ─► town

The corpus is generated from a fixed seed, so it is the same everywhere. It has one document per entity.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.tools.environment import ToolEnv
from roll.envs.tools.search import BM25, Passage, Search
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, extract_answer, is_same_text

__all__ = ["MultiHop", "build_corpus", "make_multi_hop"]

_STARTS = (
    "Bel",
    "Cor",
    "Dan",
    "El",
    "Fal",
    "Gar",
    "Hol",
    "Ist",
    "Jor",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Or",
    "Pel",
    "Quin",
)
_MIDDLES = ("a", "e", "i", "o", "u", "ai", "ora", "ane", "ili", "enu")
_TOWN_ENDS, _COUNTRY_ENDS = ("ton", "ville", "burg", "stad", "port", "mouth"), ("land", "ia", "stan", "ovia")
_FAMILY_ENDS, _COMPANY_ENDS = ("sen", "man", "ski", "ez", "berg", "wood"), (" Works", " Mills", " Foods", " Motors")
_GIVEN_NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dora",
    "Emil",
    "Finn",
    "Greta",
    "Hugo",
    "Ines",
    "Jan",
    "Kira",
    "Leo",
    "Mina",
    "Nils",
)
_TRADES = ("chemist", "painter", "engineer", "violinist", "botanist", "chess player", "architect", "poet")

RELATIONS: Mapping[str, tuple[str, str]] = {
    "founder": ("company", "the founder of {}"),
    "birthplace": ("person", "the town where {} was born"),
    "university": ("person", "the university where {} studied"),
    "seat": ("university", "the town where {} is"),
    "country": ("town", "the country where {} lies"),
    "capital": ("country", "the capital of {}"),
    "river": ("town", "the river on which {} lies"),
}
"""The type of entity that each relation applies to, and its wording."""
_RELATION_CHAINS: Mapping[int, tuple[tuple[str, ...], ...]] = {
    2: (("founder", "birthplace"), ("founder", "university"), ("birthplace", "country"), ("university", "seat"),
        ("birthplace", "river"), ("seat", "river")),
    3: (("founder", "birthplace", "country"), ("founder", "university", "seat"), ("birthplace", "country", "capital"),
        ("university", "seat", "country"), ("university", "seat", "river"), ("founder", "birthplace", "river")),
}  # fmt: skip


@dataclass(frozen=True)
class _Corpus:
    passages: tuple[Passage, ...]
    facts: Mapping[tuple[str, str], str]
    """Maps (relation, entity) to the related entity."""
    index: BM25


@functools.cache
def build_corpus() -> _Corpus:
    """Return the documents and facts of the fictional world."""
    random = Random("multi-hop")
    used: set[str] = set()

    def draw_name(suffixes: Sequence[str]) -> str:
        while True:
            name = random.choice(_STARTS) + random.choice(_MIDDLES) + random.choice(suffixes)
            if name not in used:
                used.add(name)
                return name

    countries = [draw_name(_COUNTRY_ENDS) for _ in range(12)]
    towns = [draw_name(_TOWN_ENDS) for _ in range(60)]
    universities = [f"{draw_name(('',))} University" for _ in range(24)]
    people = [f"{random.choice(_GIVEN_NAMES)} {draw_name(_FAMILY_ENDS)}" for _ in range(120)]
    companies = [draw_name(_COMPANY_ENDS) for _ in range(80)]
    rivers = [draw_name(("",)) for _ in range(20)]
    facts: dict[tuple[str, str], str] = {}
    texts: dict[str, str] = {}
    for number, country in enumerate(countries):
        facts["capital", country] = towns[number]
        texts[country] = f"{country} is a country. Its capital is {towns[number]}."
    for number, town in enumerate(towns):
        facts["country", town] = country = countries[number if number < 12 else random.randrange(12)]
        facts["river", town] = river = random.choice(rivers)
        texts[town] = f"{town} is a town in {country}. It lies on the river {river}."
    for university in universities:
        facts["seat", university] = town = random.choice(towns)
        texts[university] = f"{university} is in {town}. It was founded in {random.randint(1400, 1950)}."
    for person in people:
        facts["birthplace", person] = town = random.choice(towns)
        facts["university", person] = university = random.choice(universities)
        trade = random.choice(_TRADES)
        texts[person] = f"{person} is a {trade} who was born in {town} and studied at {university}."
    for company in companies:
        facts["founder", company] = person = random.choice(people)
        texts[company] = f"{company} is a company. It was founded by {person} in {random.randint(1850, 2010)}."
    passages = tuple(Passage(title=title, text=text) for title, text in texts.items())
    return _Corpus(passages, facts, BM25(passages))


@dataclass(eq=False)
class MultiHop(World):
    r"""A question whose answer is given in `\boxed{}` and compared ignoring case and punctuation, as usual for QA.

    Args:
        hops: Number of documents that a question needs, 2 or 3.
    """

    hops: int = 2

    def __post_init__(self) -> None:
        if self.hops not in _RELATION_CHAINS:
            raise ValueError(f"hops must be 2 or 3, got {self.hops}")

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        facts = build_corpus().facts
        self._chain = self.random.choice(_RELATION_CHAINS[self.hops])
        self._start = thing = self.random.choice([name for relation, name in facts if relation == self._chain[0]])
        words = thing
        for relation in self._chain:
            words = RELATIONS[relation][1].format(words)
            thing = facts[relation, thing]
        self._answer = thing
        question = f"What is the name of {words}?"
        return f"{question} Put the name alone into \\boxed{{}}.", {"state": question}

    def step(self, action: str) -> StepResult:
        """See `Env`."""
        answer = extract_answer(action)
        right = answer is not None and is_same_text(answer, self._answer)
        info: dict[str, Any] = {"state": "answered", "correct": right}
        if not answer:
            return "There is no answer in \\boxed{}.", FORMAT_ERROR_REWARD, True, False, info
        return ("Right." if right else f"Wrong: it is {self._answer}."), float(right), True, False, info

    def sample_random_action(self) -> str:
        """Return a random name."""
        return f"\\boxed{{{self.action_random.choice(build_corpus().passages).title}}}"

    def solution(self) -> list[str]:
        """Return the actions of an expert who looks up every fact with a call `<search>…</search>`, then answers."""
        found = [self._start]
        for relation in self._chain:
            found.append(build_corpus().facts[relation, found[-1]])
        return [*(f"<search>{name}</search>" for name in found[:-1]), f"\\boxed{{{self._answer}}}"]


def make_multi_hop(
    hops: int = 2, num_results: int = 3, max_tool_uses: int = 6, tool_format: str = "auto", explain: bool = True
) -> ToolEnv:
    """Build `MultiHop` with the tool `search` over its corpus."""
    search = Search(build_corpus().index, num_results)
    return ToolEnv(MultiHop(hops), [search], tool_format=tool_format, max_tool_uses=max_tool_uses, explain=explain)
