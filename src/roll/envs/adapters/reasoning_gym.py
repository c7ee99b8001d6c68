"""Tasks of the package `reasoning-gym`: `rg:leg_counting`. The task scores one answer per question."""

from __future__ import annotations

from typing import Any

from roll.data.reasoning_gym import load_task
from roll.envs.adapters.packages import RandomState, import_package
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, extract_answer
from roll.errors import DataError, InfraError

__all__ = ["ReasoningGymEnv", "make"]

_MAX_ANSWER_LENGTH = 10_000


class ReasoningGymEnv:
    r"""An `Env` for one task of the package `reasoning-gym`.

    The answer is in `\boxed{…}` or `<answer>…</answer>`; without either, the reward is −0.1.

    Args:
        task: The task's name.
        size: Number of distinct questions; `reset(seed)` selects question `seed` modulo this number.
        seed: Seed of the questions.
        options: The task's options.
    """

    def __init__(self, task: str, size: int = 500, seed: int = 42, **options: Any) -> None:
        import_package("reasoning_gym", "reasoning-gym", f"environment 'rg:{task}'")
        if size < 1:
            raise DataError(f"environment 'rg:{task}': size must be at least 1, got {size}")
        self._task_name, self._size, self._seed, self._options = task, size, seed, options
        self._randomness = RandomState()
        self._task = load_task(task, size, seed, options)
        self._entry: dict[str, Any] = {}
        self._next = 0

    @property
    def unwrapped(self) -> ReasoningGymEnv:
        """The environment itself."""
        return self

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Ask the question that `seed` selects; without a seed, the next question."""
        index = (self._next if seed is None else seed) % self._size
        self._next = index + 1
        self._randomness.seed(index)
        try:
            with self._randomness.activate():  # some tasks also draw from the process-wide generators
                self._entry = self._task[index]
        except Exception as error:
            raise InfraError(
                f"environment 'rg:{self._task_name}' failed to create question {index}: {error!r}"
            ) from error
        question = str(self._entry["question"])
        return f"{question}\nPut your final answer into <answer>…</answer>.", {"state": question}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `Env`."""
        answer = extract_answer(action, max_length=_MAX_ANSWER_LENGTH)
        info: dict[str, Any] = {"state": "answered", "correct": False}
        if answer is None:
            return "There is no <answer>…</answer>.", FORMAT_ERROR_REWARD, True, False, info
        try:
            with self._randomness.activate():
                score = float(self._task.score_answer(answer=answer, entry=self._entry))
        except Exception:  # a scorer may raise anything on an answer that it cannot parse
            score = 0.0
        info["correct"] = score >= 1.0
        return ("Right." if info["correct"] else f"Scored {score:.2f}."), score, True, False, info

    def sample_random_action(self) -> str:
        """Return a fixed number as the answer."""
        return "<answer>1</answer>"

    def solution(self) -> str:
        """Return the task's reference answer."""
        return f"<answer>{self._entry['answer']}</answer>"

    def spawn(self, same_state: bool = False, **options: Any) -> ReasoningGymEnv:
        """Return another environment with the same settings, and with the same question if `same_state` is true."""
        settings = {"size": self._size, "seed": self._seed, **self._options, **options}
        other = ReasoningGymEnv(self._task_name, **settings)
        if same_state:
            other._entry, other._next = self._entry, self._next
        return other


def make(name: str, **options: Any) -> ReasoningGymEnv:
    """Build the environment `rg:NAME`.

    Raises:
        ConfigError: The package is missing.
        DataError: The package has no such task, or the task rejects its options.
    """
    return ReasoningGymEnv(name, **options)
