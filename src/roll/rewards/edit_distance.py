"""Edit distance between an answer and a reference, for text that was read from an image (OCR)."""

from __future__ import annotations

from roll.config.rewards import EditDistanceReward
from roll.protocols import WorkerPool
from roll.rewards.base import Judgement, Verifier, run_in_pool
from roll.rewards.final_answer import find_last_tagged
from roll.types import Rollout

__all__ = ["build_edit_distance_verifier", "compute_edit_distance", "compute_similarity"]

MAX_LENGTH = 20_000
"""Maximum number of characters that are compared: a longer answer is truncated, and its removed characters are treated
as errors."""


def compute_edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the minimum number of insertions, deletions and replacements of characters.

    This is the bit-parallel algorithm of Myers (JACM 46(3), 1999) in the form of Hyyrö (2003): a column of the dynamic
    program is two integers, so the run time is proportional to the product of both lengths, divided by the number of
    bits that an addition processes at once.
    """
    if not one:
        return len(other)
    places: dict[str, int] = {}
    for index, letter in enumerate(one):
        places[letter] = places.get(letter, 0) | 1 << index
    last, whole = 1 << (len(one) - 1), (1 << len(one)) - 1
    rises, falls, distance = whole, 0, len(one)  # vertical differences of +1 and of -1
    for letter in other:
        same = places.get(letter, 0)
        diagonal = (((same & rises) + rises) ^ rises) | same | falls
        up = falls | (~(diagonal | rises) & whole)
        down = rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up = (up << 1 | 1) & whole
        rises = (down << 1 & whole) | (~(diagonal | up) & whole)
        falls = up & diagonal
    return distance


def compute_similarity(answer: str, reference: str, *, ignore_case: bool = False) -> float:
    """Return 1 minus the edit distance divided by the longer length; 1 if both texts are empty.

    Each run of whitespace is treated as one space. Characters of the answer after the first `MAX_LENGTH` are treated as
    edits.
    """
    answer, reference = (" ".join(text.split()) for text in (answer, reference))
    if ignore_case:
        answer, reference = answer.casefold(), reference.casefold()
    longest = max(len(answer), len(reference))
    lost = max(len(answer) - MAX_LENGTH, 0)
    distance = compute_edit_distance(answer[:MAX_LENGTH], reference[:MAX_LENGTH]) + lost
    return max(1.0 - distance / longest, 0.0) if longest else 1.0


def _score(text: str, reference: str, ignore_case: bool) -> float:
    tagged = find_last_tagged(text)
    return compute_similarity(text if tagged is None else tagged, reference, ignore_case=ignore_case)


def build_edit_distance_verifier(config: EditDistanceReward, pool: WorkerPool) -> Verifier:
    """Build a verifier whose value is the similarity of the answer and the reference. It runs in the worker pool."""

    async def judge(rollout: Rollout) -> Judgement:
        arguments = rollout.text, rollout.prompt.answer, config.ignore_case
        value = await run_in_pool(pool, _score, *arguments, time_limit_s=config.time_limit_s)
        solved = value >= config.solved_at
        return Judgement(value=value, verdict="correct" if solved else "partly" if value else "wrong", correct=solved)

    return Verifier(judge=judge, decides_correctness=True)
