"""Programming tasks, generated from the seed; the answer is a program, run in a sandbox on hidden test cases.

The sandbox contains the program and the inputs of the cases, but never the expected results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from roll.envs.base import ResetResult, StepResult
from roll.envs.tools.sandboxes import SandboxLease, SandboxOptions
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, check_names
from roll.sandbox_errors import sandbox_errors
from roll_sandbox import Limits, OversizedUploadError, PythonCode

__all__ = ["TASKS", "CodeQuestion", "CodeTask", "extract_program"]

_MAX_PROGRAM_LENGTH = 20_000
_RUNNER_SOURCE = """
import json as _json, os as _os, sys as _sys
_results = []
for _arguments in _json.loads(_sys.stdin.read()):
    _results.append(solve(*_arguments))
_os.write(3, _json.dumps(_results).encode())
"""
"""Code appended to the model's program. Its output is untrusted, and is compared outside the sandbox."""


@dataclass(frozen=True, kw_only=True)
class CodeTask:
    """A programming task: the expected behavior of the function `solve`."""

    text: str
    solution: str
    """Body of a correct `solve`, which is also the reference."""
    arguments: str
    """Parameters of `solve`."""
    case: Callable[[Random], tuple[Any, ...]]
    """Samples the arguments of a case."""
    reference: Callable[..., Any]


def _draw_numbers(random: Random, minimum: int = 0) -> list[int]:
    return [random.randint(-20, 99) for _ in range(random.randint(minimum, 12))]


def _draw_text(random: Random) -> str:
    return "".join(random.choices("abcde  xyz", k=random.randint(1, 25)))


def _make_multiples_task(random: Random) -> CodeTask:
    a, b = random.sample(range(2, 12), 2)
    return CodeTask(
        text=f"the sum of all whole numbers from 1 to n, both included, that {a} or {b} divides",
        arguments="n",
        solution=f"return sum(i for i in range(1, n + 1) if i % {a} == 0 or i % {b} == 0)",
        case=lambda r: (r.randint(0, 300),),
        reference=lambda n: sum(i for i in range(1, n + 1) if i % a == 0 or i % b == 0),
    )


def _make_kth_largest_task(random: Random) -> CodeTask:
    k = random.randint(1, 4)
    return CodeTask(
        text=f"the number at place {k} of a list without repetitions, the largest at place 1; None if there is none",
        arguments="numbers",
        solution=f"found = sorted(set(numbers), reverse=True); return found[{k - 1}] if len(found) >= {k} else None",
        case=lambda r: (_draw_numbers(r),),
        reference=lambda numbers: dict(enumerate(sorted(set(numbers), reverse=True))).get(k - 1),
    )


def _make_shift_task(random: Random) -> CodeTask:
    by = random.randint(1, 25)
    table = str.maketrans({chr(97 + i): chr(97 + (i + by) % 26) for i in range(26)})
    return CodeTask(
        text=f"a text whose small letters a to z are moved {by} places on in the alphabet (z is followed by a)",
        arguments="text",
        solution=f"return ''.join(chr((ord(c) - 97 + {by}) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)",
        case=lambda r: (_draw_text(r),),
        reference=lambda text: text.translate(table),
    )


def _make_runs_task(random: Random) -> CodeTask:
    minimum = random.randint(1, 3)
    solution = (
        "import itertools; runs = [(c, len(list(g))) for c, g in itertools.groupby(text)]; "
        f"return [[c, n] for c, n in runs if n >= {minimum}]"
    )

    def compute_reference(text: str) -> list[list[Any]]:
        found: list[list[Any]] = []
        for char in text:
            if found and found[-1][0] == char:
                found[-1][1] += 1
            else:
                found.append([char, 1])
        return [run for run in found if run[1] >= minimum]

    return CodeTask(
        text=f"a list of [character, length] of each run of one character in a text, if {minimum} or longer",
        arguments="text",
        solution=solution,
        case=lambda r: ("".join(r.choices("ab", k=r.randint(0, 20))),),
        reference=compute_reference,
    )


def _make_window_task(random: Random) -> CodeTask:
    width = random.randint(2, 4)
    return CodeTask(
        text=f"the largest sum of {width} neighbouring numbers of a list; 0 if it has fewer than {width}",
        arguments="numbers",
        solution=f"return max((sum(numbers[i:i + {width}]) for i in range(len(numbers) - {width - 1})), default=0)",
        case=lambda r: (_draw_numbers(r),),
        reference=lambda n: max((sum(n[i : i + width]) for i in range(len(n) - width + 1)), default=0),
    )


def _make_words_task(random: Random) -> CodeTask:
    minimum = random.randint(2, 4)
    return CodeTask(
        text=f"the words of a text (between spaces) with {minimum} letters or more, sorted and each once, as a list",
        arguments="text",
        solution=f"return sorted({{w for w in text.split() if len(w) >= {minimum}}})",
        case=lambda r: (_draw_text(r),),
        reference=lambda text: sorted({w for w in text.split() if len(w) >= minimum}),
    )


def _make_digits_task(random: Random) -> CodeTask:
    base = random.randint(2, 9)

    def compute_reference(n: int) -> str:
        digits = ""
        while n:
            digits, n = str(n % base) + digits, n // base
        return digits or "0"

    solution = (
        f"digits = []\n    while n:\n        digits.append(str(n % {base}))\n        n //= {base}\n"
        "    return ''.join(reversed(digits)) or '0'"
    )
    return CodeTask(
        text=f"a whole number that is not negative, written with base {base}, as a text",
        arguments="n",
        solution=solution,
        case=lambda r: (r.randint(0, 5_000),),
        reference=compute_reference,
    )


TASKS: Mapping[str, Callable[[Random], CodeTask]] = {
    "multiples": _make_multiples_task,
    "kth_largest": _make_kth_largest_task,
    "shift": _make_shift_task,
    "runs": _make_runs_task,
    "window": _make_window_task,
    "words": _make_words_task,
    "digits": _make_digits_task,
}


@dataclass(eq=False)
class CodeQuestion(World, SandboxOptions):
    """A programming task. The reward is 1 if `solve` passes all hidden cases, −0.1 if there is no program, and 0
    otherwise.

    Args:
        num_cases: Number of hidden cases.
        tasks: Names from `TASKS`; all by default.
        time_limit_s: Total timeout of all cases.
    """

    num_cases: int = 10
    tasks: Collection[str] | None = None
    time_limit_s: float = 5.0

    def __post_init__(self) -> None:
        self._tasks = check_names("tasks", self.tasks, TASKS)
        if self.num_cases < 1:
            raise ValueError(f"num_cases must be at least 1, got {self.num_cases}")
        self._lease = SandboxLease(self, Limits(wall_s=self.time_limit_s, output_bytes=2**18))

    def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`."""
        self.begin(seed)
        self._task = task = TASKS[self.random.choice(self._tasks)](self.random)
        shown, *self._cases = [task.case(self.random) for _ in range(self.num_cases + 1)]
        example = f"solve({', '.join(map(repr, shown))}) is {task.reference(*shown)!r}"
        text = f"Write a Python function solve({task.arguments}) that returns {task.text}. For example, {example}."
        return f"{text} Answer with the program in a ```python block.", {"state": text}

    async def step(self, action: str) -> StepResult:
        """See `Env`.

        Raises:
            InfraError: The sandbox failed.
        """
        program = extract_program(action)
        info: dict[str, Any] = {"state": "answered", "correct": False}
        if not program:
            return "There is no program.", FORMAT_ERROR_REWARD, True, False, info
        stdin = json.dumps(self._cases).encode()
        manager = await self._lease.acquire()
        try:
            code = PythonCode(source=f"{program}\n{_RUNNER_SOURCE}", stdin=stdin, result=True)
            with sandbox_errors():
                result = await manager.execute(code, spec=self._lease.spec)
            claimed = json.loads(result.result)
        except (ValueError, RecursionError, OversizedUploadError):  # the program's output is malformed or missing
            claimed = None
        info["correct"] = right = claimed == [
            _convert_through_json(self._task.reference(*case)) for case in self._cases
        ]
        return ("All cases are right." if right else "Not all cases are right."), float(right), True, False, info

    def sample_random_action(self) -> str:
        """Return a program that does not solve the task."""
        return f"```python\ndef solve(x):\n    return {self.action_random.randint(0, 9)}\n```"

    def solution(self) -> str:
        """Return an expert's action."""
        return f"```python\ndef solve({self._task.arguments}):\n    {self._task.solution}\n```"

    async def close(self) -> None:
        """Release the sandboxes."""
        await self._lease.release()


def _convert_through_json(value: Any) -> Any:
    """Encode a value as JSON and decode it again; tuples become lists, for example."""
    return json.loads(json.dumps(value))


def extract_program(action: str) -> str:
    """Return the program in an answer: the last fenced block, or the whole text if it defines `solve`, else "".

    Unpaired surrogates are replaced, and a program that is too long is truncated.
    """
    text = action.encode(errors="replace").decode().replace("\0", "")
    end = text.rfind("```")
    start = text.rfind("```", 0, max(end, 0))
    if end > start >= 0:
        text = text[start + 3 : end].removeprefix("python").removeprefix("py")
    elif "def solve(" not in text:
        return ""
    return text.strip()[:_MAX_PROGRAM_LENGTH]
