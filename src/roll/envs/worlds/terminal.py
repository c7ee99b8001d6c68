"""Tasks in a shell, in a sandbox of the episode's own, judged by hidden checks."""

from __future__ import annotations

from random import Random
from typing import Any

from roll.envs.tools.base import ToolError
from roll.envs.tools.python import said
from roll.envs.tools.sandboxes import Runtime
from roll.envs.tools.toolbox import cut
from roll.envs.tools.workspace import Workspace
from roll.envs.worlds.terminal_tasks import FAMILIES, Check, Task
from roll.envs.worlds.world import FORMAT_ERROR, Begun, Stepped, World
from roll.sandbox import Command, SandboxPathError

__all__ = ["SUBMIT", "Terminal", "command_in"]

SUBMIT = "submit"
_LONGEST_COMMAND = 20_000
_FENCES = ("```bash\n", "```sh\n", "```\n")


class Terminal(World):
    """Each action is bash text, in a fenced block or bare; `submit` ends the episode. Reward 1 where all checks hold.

    An episode that runs out of turns is judged as it stands. An empty action costs −0.1.

    Args:
        families: of tasks, from `FAMILIES`; all without.
        max_turns: after which the episode is cut off.
        max_output_chars: a longer output loses its middle.
        time_limit_s: of one command; a longer one is interrupted.
        runtime: what isolates: see `SandboxLease`.
        trust_programs: see `SandboxLease`.
        image: of the runtime `docker`.
    """

    def __init__(
        self,
        families: tuple[str, ...] | list[str] | None = None,
        max_turns: int = 15,
        max_output_chars: int = 4_000,
        time_limit_s: float = 10.0,
        runtime: Runtime = "bubblewrap",
        trust_programs: bool = False,
        image: str | None = None,
    ) -> None:
        sandbox = {"runtime": runtime, "trust_programs": trust_programs, "image": image}
        limits = {"max_turns": max_turns, "max_output_chars": max_output_chars, "time_limit_s": time_limit_s}
        super().__init__(families=families, **limits, **sandbox)
        self._families = tuple(families or FAMILIES)
        if unknown := set(self._families) - set(FAMILIES):
            raise ValueError(f"families {sorted(unknown)} are unknown: there are {list(FAMILIES)}")
        if max_turns < 1:
            raise ValueError(f"max_turns is at least 1, got {max_turns}")
        self._max_turns, self._max_chars, self._turn = max_turns, max_output_chars, 0
        self._workspace = Workspace(time_limit_s, runtime, trust_programs, image)
        self._family = ""
        self._commands: list[str] = []
        self._task: Task

    async def reset(self, seed: int | None = None) -> Begun:
        """See `Env`.

        Raises:
            InfraError: no sandbox could be started.
        """
        self.begin(seed)
        self._family = self.random.choice(self._families)
        self._task = FAMILIES[self._family](Random(self.random.getrandbits(32)))
        self._turn, self._commands = 0, []
        await self._workspace.begin()
        for path, content in self._task.files.items():
            data = content if isinstance(content, bytes) else content.encode()
            await self._workspace.sandbox.write_file(path, data)
        rules = (
            f"Answer with bash commands, in a ```bash block or alone. When you are done, answer with {SUBMIT} alone."
        )
        return f"{self._task.text}\n{rules}", self._info()

    async def step(self, action: str) -> Stepped:
        """See `Env`.

        Raises:
            InfraError: the sandbox broke.
        """
        self._turn += 1
        command = command_in(action)
        last = self._turn >= self._max_turns
        if command == SUBMIT:
            return await self._judged("Submitted.", submitted=True)
        self._commands.append(command)
        reward, observation = 0.0, ""
        if not command:
            reward, observation = FORMAT_ERROR, "There is no command."
        else:
            try:
                result = await self._workspace.run(command)
                observation = cut(said(result), self._max_chars) or "(It printed nothing.)"
            except ToolError as error:
                reward, observation = FORMAT_ERROR, str(error)
        if last:
            return await self._judged(observation, submitted=False)
        return observation, reward, False, False, self._info()

    async def _judged(self, observation: str, *, submitted: bool) -> Stepped:
        solved = True
        for check in self._task.checks:
            solved = solved and await self._holds(check)
        return observation, float(solved), submitted, not submitted, {**self._info(), "correct": solved}

    async def _holds(self, check: Check) -> bool:
        sandbox = self._workspace.sandbox
        if check.path:
            try:
                found = await sandbox.read_file(check.path, max_bytes=2**20)
            except SandboxPathError:
                return False
        else:
            program = Command(argv=("/bin/bash", "-c", check.command), stdin=check.stdin.encode(), cwd=sandbox.home)
            found = (await sandbox.execute(program)).stdout
        return found.decode(errors="replace").strip() == check.expected.strip()

    def _info(self) -> dict[str, Any]:
        return {"state": repr((self._task.text, self._commands)), "family": self._family}

    def sample_random_action(self) -> str:
        """Some harmless command."""
        return self.random.choice(["ls -R", "pwd", "cat *", "echo hello > answer.txt", "python3 --version", SUBMIT])

    def solution(self) -> list[str]:
        """The actions of one who knows how."""
        return [self._task.solution, SUBMIT]

    async def close(self) -> None:
        """Let go of the sandbox."""
        await self._workspace.close()


def command_in(action: str) -> str:
    """The first fenced block, or else all of the text; bounded, and plain Unicode."""
    text = action.encode(errors="replace").decode()
    for fence in _FENCES:
        start = text.find(fence)
        if start >= 0:
            start += len(fence)
            end = text.find("```", start)
            text = text[start : end if end >= 0 else len(text)]
            break
    return text.strip()[:_LONGEST_COMMAND]
