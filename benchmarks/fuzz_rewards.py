"""Fuzzed answers through every verifier that scores by default.

    make bench NAME=fuzz-rewards [ARGS="--answers 20000 --processes 2"]

Answers are mutations of real ones: pieces cut, doubled and shuffled, brackets that do not close, commands without
arguments, signs of other scripts, one fragment repeated up to 100,000 characters. Two things are shown:

1. volume: what verifiers run in workers is called here in processes like those, with whatever it needs; no exception,
   no answer that costs more than its limit, and memory that does not grow;
2. the way that a run takes: every fiftieth answer through `build_reward` and the worker pool, with every callback of
   the controller's loop timed.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _report import report
from bench_rewards import GSM8K, KINDS, PUBLISHED, rollout

from roll.cluster.pool import LocalWorkerPool
from roll.config.rewards import FormatReward, RewardList, expand_rewards
from roll.rewards import build_reward
from roll.rewards.base import MAX_TEXT_LENGTH
from roll.rewards.choice import score_choice
from roll.rewards.control_tokens import escape_control_tokens
from roll.rewards.format import check_format
from roll.rewards.instructions import check_instructions
from roll.rewards.math import prepare_worker, score_math
from roll.rewards.short_answer import compare_answer
from roll.rewards.simple import compute_repeated_fraction

MATH_LIMIT_S = 0.5
SLOWEST_S = 20.0
"""After so long on one answer a process is ended, as the pool would end it, and its answer counted."""
HOLD_LIMIT_S = 0.050
GROWTH_LIMIT_BYTES = 32 * 2**20
REFERENCES = [
    r"7",
    r"391",
    r"\frac{1}{2}",
    r"\sqrt{2}",
    r"x^2+1",
    r"1,2",
    r"\{1,2\}",
    r"(1,2)",
    r"[0,1)\cup(2,3)",
    r"x=5",
    r"2x+3y=6",
    r"52_8",
    r"50\%",
    r"Blue",
]
REFERENCES += [r"x\le 3", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"5\text{ cm}"]
REFERENCES += [gold for entries in KINDS.values() for _, gold in entries]
REFERENCES += sorted({json.loads(line)["gold"] for line in PUBLISHED.read_text().splitlines()})
"""Among them the golds of published cases: two answers without a meaning seldom meet what two equations do."""
PIECES = [
    r"\frac",
    r"\sqrt{",
    r"\boxed{",
    r"\text{",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\left(",
    r"\right",
    r"$",
    r"$$",
    r"\(",
    r"\]",
    r"{",
    r"}",
    r"(",
    r")",
    r"[",
    r"]",
    r"\{",
    r"|",
    r"^",
    r"_",
    r"!",
]
PIECES += [
    r"%",
    r",",
    r";",
    r"=",
    r"<",
    r"\le",
    r"\cup",
    r"\pm",
    r"\approx",
    r"\equiv",
    r"\pmod",
    r"10^{10^{10}}",
    r"...",
    r"1,234",
    r"1e9",
    r"0.\overline{3}",
    r"i",
    r"\\",
    r"```",
    r"**",
    r"#",
    r"&",
    r"~",
]
PIECES += ["½", "√", "∞", "\u202e", "İ", "é", "\ud7ff", "'", '"', "<answer>", "</answer>", "<think>", "(A)"]
PIECES += ["9" * 50, " or ", " and ", "not ", "answer is ", "\x00", "\n", "\t", " ", r"\int_0^1", r"\sum_{k=1}^n"]
FORM = FormatReward(type="format", tags=["think", "answer"], json_tag="answer", json_schema={"type": "object"})
INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("punctuation:no_comma", {}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("keywords:forbidden_words", {"forbidden_words": ["seven", "or"]}),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}),
]


def seeds() -> list[str]:
    """Real answers to start from."""
    found = [answer for entries in KINDS.values() for answer, _ in entries]
    for row in map(json.loads, PUBLISHED.read_text().splitlines()):
        found += [row["answer"], row["gold"], rf"\boxed{{{row['gold']}}}"]
    if GSM8K.is_file():
        found += [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()[:300]]
    return found


def fuzzed(number: int, start: list[str]) -> str:
    """Answer `number`: always the same for a number."""
    rng = random.Random(number)
    text = rng.choice(start)
    for _ in range(rng.randint(0, 6)):
        at = rng.randint(0, len(text))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[min(len(text), at + rng.randint(1, 9)) :]
        elif kind == 2:
            end = min(len(text), at + rng.randint(1, 30))
            text = text[:end] + text[at:end] * rng.randint(1, 5) + text[end:]
        elif kind == 3:
            text = text[:at] + chr(rng.choice([rng.randint(0, 0x2FF), rng.randint(0x2000, 0x2BFF)])) + text[at:]
        else:
            other = rng.choice(start)
            text = text[:at] + other[rng.randint(0, len(other)) :]
    if number % 50 == 0:
        fragment = rng.choice([rng.choice(PIECES), text[:30] or "x", rng.choice(PIECES) + rng.choice(PIECES)])
        times = rng.choice([900, 20_000, 100_000]) // len(fragment) + 1
        text = (r"\boxed{" if rng.random() < 0.3 else "") + fragment * times
    return text[:100_000]


def verifiers(number: int) -> dict[str, Callable[[str], object]]:
    """What runs in workers, by name, as functions of the text alone."""
    reference = REFERENCES[number % len(REFERENCES)]
    extract = ("auto", "auto", "boxed", "last_number")[number % 4]
    return {
        "math": lambda text: score_math(text[-MAX_TEXT_LENGTH:], reference, extract, MATH_LIMIT_S),
        "choice": lambda text: score_choice(text[-MAX_TEXT_LENGTH:], "B", "ABCDE"),
        "short_answer": lambda text: compare_answer(text[-MAX_TEXT_LENGTH:], ["7", "Tuesday", reference]),
        "format": lambda text: check_format(text, text, FORM, '{"type": "object"}'),
        "instructions": lambda text: check_instructions(text, INSTRUCTIONS, number % 5 == 0),
        "repetition": lambda text: compute_repeated_fraction(
            np.frombuffer(text.encode("utf-16-le", "replace"), np.uint16), 4
        ),
        "defused": escape_control_tokens,
        "exact": lambda text: text.strip().casefold() == "tuesday",
    }


@dataclass
class Part:
    """What a process found since it last said so."""

    num_answers: int = 0
    errors: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    """CPU time."""
    verdicts: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Bytes resident."""


def work(begin: int, end: int, stride: int, place: Any, results: Any) -> None:
    """Score answers `begin`, `begin + stride`, …; `place` says which one is being scored, and since when."""
    prepare_worker()
    start = seeds()
    part = Part()
    for count, number in enumerate(range(begin, end, stride)):
        if count % 500 == 0:
            part.memory.append(_resident_bytes())
            results.put(part)  # what a process has found is not lost with it
            part = Part()
        place[0], place[1] = number, time.monotonic()
        text = fuzzed(number, start)
        for name, verify in verifiers(number).items():
            started = time.thread_time()
            try:
                result = verify(text)
            except Exception as error:
                part.errors.append(f"{name}, answer {number}: {type(error).__name__}: {error}"[:300])
                continue
            part.slowest_s[name] = max(part.slowest_s.get(name, 0.0), time.thread_time() - started)
            if name == "math":
                assert isinstance(result, tuple)
                part.verdicts[result[1]] += 1
        part.num_answers += 1
    part.memory.append(_resident_bytes())
    results.put(part)
    results.put(None)


def _resident_bytes() -> int:
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Lane:
    """A process, and what it and those before it found."""

    process: Any = None
    place: Any = None
    results: Any = None
    done: bool = False
    parts: list[Part] = field(default_factory=list)
    growth_bytes: int = 0
    """Since a process had scored a fifth of its answers, or 5,000; the largest."""
    _memory: list[int] = field(default_factory=list)

    def launch(self, begin: int, end: int, stride: int) -> None:
        """Start a process at answer `begin`."""
        context = multiprocessing.get_context("spawn")
        self.place, self.results = context.Array("d", [begin, time.monotonic()]), context.SimpleQueue()
        self.process = context.Process(target=work, args=(begin, end, stride, self.place, self.results))
        self.process.start()
        self._memory = []

    def gather(self) -> None:
        """Take what came."""
        while not self.results.empty():
            part = self.results.get()
            if part is None:
                self.done = True
                return
            self.parts.append(part)
            self._memory += part.memory
            settled = self._memory[min(len(self._memory) // 5, 10)]
            self.growth_bytes = max(self.growth_bytes, self._memory[-1] - settled)


def volume(num_answers: int, num_processes: int, first: int, seconds: float) -> dict[str, Any]:
    """Part 1."""
    slow: list[int] = []
    died: list[str] = []
    started = said = time.monotonic()
    end = first + num_answers
    lanes = [Lane() for _ in range(num_processes)]
    for number, lane in enumerate(lanes):
        lane.launch(first + number, end, num_processes)
    while not all(lane.done for lane in lanes) and time.monotonic() - started < seconds:
        time.sleep(0.2)
        for lane in lanes:
            lane.gather()
            if lane.done:
                continue
            at, since = int(lane.place[0]), lane.place[1]
            imports_s = 60.0 if at < first + num_processes else 0.0
            if not lane.process.is_alive():
                died.append(f"answer {at}: exit code {lane.process.exitcode}")
            elif time.monotonic() - since > SLOWEST_S + imports_s:
                slow.append(at)
            else:
                continue
            lane.process.kill()
            lane.process.join()
            lane.done = at + num_processes >= end
            if not lane.done:
                lane.launch(at + num_processes, end, num_processes)
        if time.monotonic() - said > 15:
            said = time.monotonic()
            done = sum(part.num_answers for lane in lanes for part in lane.parts)
            errors = sum(len(part.errors) for lane in lanes for part in lane.parts)
            line = f"{done:,} answers after {said - started:.0f} s, {len(slow)} slow, {len(died)} died, {errors} errors"
            print(line, file=sys.stderr, flush=True)
    for lane in lanes:
        lane.gather()
        lane.process.kill()
        lane.process.join()
    parts = [part for lane in lanes for part in lane.parts]
    memory = [size for part in parts for size in part.memory]
    names = sorted({name for part in parts for name in part.slowest_s})
    return {
        "num_answers": sum(part.num_answers for part in parts),
        "errors": [error for part in parts for error in part.errors],
        "died": died,
        "slow": slow,
        "slowest_s": {name: max(part.slowest_s.get(name, 0.0) for part in parts) for name in names},
        "math_verdicts": dict(sum((part.verdicts for part in parts), Counter())),
        "memory_growth_bytes": max(lane.growth_bytes for lane in lanes),
        "memory_bytes": max(memory, default=0),
        "wall_s": time.monotonic() - started,
    }


class TimedCallbacks:
    """How long single callbacks hold the loop, in CPU time of its thread."""

    longest_s = 0.0

    def __enter__(self) -> "TimedCallbacks":
        self._run = run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - started)

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.events.Handle._run = self._run  # type: ignore[method-assign]


async def as_a_run(numbers: Iterable[int], seconds: float) -> dict[str, Any]:
    """Part 2."""
    from pydantic import TypeAdapter

    start = seeds()
    entries = ["math", "short_answer", "exact", {"type": "repetition", "ngram_size": 4}]
    entries += [{"type": "length", "free_tokens": 10, "full_tokens": 20}]
    entries += [{"type": "format", "tags": ["answer"]}, {"type": "regex", "pattern": "answer.*{answer}"}]
    pool = LocalWorkerPool(2)
    reward, choice = (
        build_reward(TypeAdapter(RewardList).validate_python(expand_rewards(each)), pool)
        for each in (entries, ["choice"])
    )
    await asyncio.gather(reward(rollout("7", "7")), choice(rollout("B", "B")))
    errors: list[str] = []
    count, started = 0, time.monotonic()
    with TimedCallbacks() as timed:
        for number in numbers:
            if time.monotonic() - started > seconds:
                break
            count += 1
            try:
                text = fuzzed(number, start)
                await asyncio.gather(
                    reward(rollout(text, REFERENCES[number % len(REFERENCES)])), choice(rollout(text, "B"))
                )
            except Exception as error:
                errors.append(f"answer {number}: {type(error).__name__}: {error}"[:300])
    health = pool.health()
    await asyncio.gather(reward.close(), choice.close())
    await pool.close()
    return {"num_answers": count, "errors": errors, "longest_hold_s": timed.longest_s, **health}


def main() -> None:
    """Run both parts, print, write the record; the exit code is 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="end volume after so long, and the other part after a quarter of it",
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first answer")
    options = parser.parse_args()
    run = asyncio.run(as_a_run(range(options.first, options.first + options.answers, 50), options.seconds / 4))
    figures = {"as_a_run": run, "volume": volume(options.answers, options.processes, options.first, options.seconds)}
    growth = figures["volume"]["memory_growth_bytes"]
    ok = not run["errors"] and not figures["volume"]["errors"] and run["longest_hold_s"] < HOLD_LIMIT_S
    ok = ok and not figures["volume"]["died"] and growth < GROWTH_LIMIT_BYTES
    report("rewards_fuzz", {**figures, "ok": ok})
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
