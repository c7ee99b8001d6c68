"""Shell tasks in a sandbox per episode, scored by hidden checks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any, Self

from roll.envs.base import ResetResult, StepResult
from roll.envs.tools.base import ToolError
from roll.envs.tools.python import format_output
from roll.envs.tools.sandboxes import SandboxOptions
from roll.envs.tools.toolbox import truncate
from roll.envs.tools.workspace import Workspace
from roll.envs.worlds.terminal_tasks import FAMILIES, Check
from roll.envs.worlds.world import FORMAT_ERROR_REWARD, World, check_names
from roll.errors import UnsupportedError
from roll.sandbox_errors import sandbox_errors
from roll_sandbox import Command, SandboxPathError

__all__ = ["SUBMIT", "Terminal", "extract_command"]

SUBMIT = "submit"
_MAX_COMMAND_LENGTH = 20_000
_FENCES = ("```bash\n", "```sh\n", "```\n")


@dataclass(eq=False)
class Terminal(World, SandboxOptions):
    """Each action is bash code, optionally in a fenced block; `submit` ends the episode.

    The reward is 1 if all checks pass, otherwise 0. An episode that reaches the maximum number of turns is scored in
    its last state. An empty action gives −0.1.

    Args:
        families: Families of tasks, from `FAMILIES`; all by default.
        max_turns: Number of turns after which the episode is truncated.
        max_output_chars: Maximum length of an output; longer outputs are truncated in the middle.
        time_limit_s: Timeout of one command, which is then interrupted.
    """

    families: Collection[str] | None = None
    max_turns: int = 15
    max_output_chars: int = 4_000
    time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        self._families = check_names("families", self.families, FAMILIES)
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")
        self._workspace = Workspace(self.time_limit_s, **self.arguments)

    async def reset(self, seed: int | None = None) -> ResetResult:
        """See `Env`.

        Raises:
            InfraError: No sandbox could be started.
        """
        self.begin(seed)
        self._family = self.random.choice(self._families)
        self._task = FAMILIES[self._family](Random(self.random.getrandbits(32)))
        self._turn, self._commands = 0, []
        await self._workspace.begin()
        for path, content in self._task.files.items():
            data = content if isinstance(content, bytes) else content.encode()
            with sandbox_errors():
                await self._workspace.sandbox.write_file(path, data)
        rules = (
            f"Answer with bash commands, in a ```bash block or alone. When you are done, answer with {SUBMIT} alone."
        )
        return f"{self._task.text}\n{rules}", self._build_info()

    async def step(self, action: str) -> StepResult:
        """See `Env`.

        Raises:
            InfraError: The sandbox failed.
        """
        self._turn += 1
        command = extract_command(action)
        last = self._turn >= self.max_turns
        if command == SUBMIT:
            return await self._judge("Submitted.", submitted=True)
        self._commands.append(command)
        reward, observation = 0.0, ""
        if not command:
            reward, observation = FORMAT_ERROR_REWARD, "There is no command."
        else:
            try:
                result = await self._workspace.run(command)
                observation = truncate(format_output(result), self.max_output_chars) or "(It printed nothing.)"
            except ToolError as error:
                reward, observation = FORMAT_ERROR_REWARD, str(error)
        if last:
            return await self._judge(observation, submitted=False)
        return observation, reward, False, False, self._build_info()

    async def _judge(self, observation: str, *, submitted: bool) -> StepResult:
        solved = True
        for check in self._task.checks:
            solved = solved and await self._passes_check(check)
        return observation, float(solved), submitted, not submitted, {**self._build_info(), "correct": solved}

    async def _passes_check(self, check: Check) -> bool:
        with sandbox_errors():
            return await self._compare_output(check)

    async def _compare_output(self, check: Check) -> bool:
        sandbox = self._workspace.sandbox
        if check.path:
            try:
                output = await sandbox.read_file(check.path, max_bytes=2**20)
            except SandboxPathError:
                return False
        else:
            program = Command(argv=("/bin/bash", "-c", check.command), stdin=check.stdin.encode(), cwd=sandbox.home)
            output = (await sandbox.execute(program)).stdout
        return output.decode(errors="replace").strip() == check.expected.strip()

    def _build_info(self) -> dict[str, Any]:
        return {"state": repr((self._task.text, self._commands)), "family": self._family}

    def spawn(self, same_state: bool = False, **options: Any) -> Self:
        """Return another environment with the same settings.

        Raises:
            UnsupportedError: `same_state` is set: a sandbox cannot be copied with its running processes.
        """
        if same_state:
            raise UnsupportedError("a terminal cannot be spawned in the same state: use the same seed and commands.")
        return super().spawn(**options)

    def sample_random_action(self) -> str:
        """Return a harmless command."""
        return self.action_random.choice(
            ["ls -R", "pwd", "cat *", "echo hello > answer.txt", "python3 --version", SUBMIT]
        )

    def solution(self) -> list[str]:
        """Return an expert's actions."""
        return [self._task.solution, SUBMIT]

    async def close(self) -> None:
        """Close the sandbox."""
        await self._workspace.close()


def extract_command(action: str) -> str:
    """Return the bash code in an action: a fenced block, or the whole text if there is none.

    Unpaired surrogates are replaced, and code that is too long is truncated.
    """
    text = action.encode(errors="replace").decode()
    for fence in _FENCES:
        start = text.find(fence)
        if start >= 0:
            start += len(fence)
            end = text.find("```", start)
            text = text[start : end if end >= 0 else len(text)]
            break
    return text.strip()[:_MAX_COMMAND_LENGTH]
