"""Rollouts of an agent program: it gets an address and a key, runs unchanged, and its requests are trained on.

    prompt ─► session opened ─► agent runs ··· requests ··· ─► agent ends ─► session closed ─► rollout of its calls

Invariants:
    - however the agent ends, its session is closed and its program ended before the rollout is returned;
    - a program that crashes or hangs is an infrastructure failure, which is retried, unless its session's budget was
      used up, its last answer was cut off, or the configuration says otherwise: its reward is never set to 0.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from roll.agents.complaints import with_refusals
from roll.agents.programs import AgentTask, Program, open_program
from roll.agents.session import Session
from roll.agents.tree import Call, as_rollout, main_chain
from roll.data import ChatRenderer
from roll.errors import InfraError, RollError
from roll.process_environment import socket_directory
from roll.rollout.loops import Generate, Renderer
from roll.types import GenerationRequest, PromptDraw, Rollout

if TYPE_CHECKING:
    from roll.agents.server import AgentServer
    from roll.config.agents import AgentConfig
    from roll.config.sandbox import SandboxConfig

__all__ = ["AgentLoop", "open_agents"]

logger = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""Time for an agent's own clean-up after it was canceled; then the agent is abandoned."""


class AgentLoop:
    """A `RolloutLoop`.

    Args:
        server: The server for the agent's requests.
        program: The agent program.
        config: The agent's limits, and the handling of its failures.
        max_context: Longest context of the engines, in tokens.
    """

    def __init__(self, server: AgentServer, program: Program, config: AgentConfig, *, max_context: int) -> None:
        self._server, self._program, self._config, self._max_context = server, program, config, max_context

    async def __call__(
        self, draw: PromptDraw, index: int, first: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """See `RolloutLoop`.

        Raises:
            InfraError: The infrastructure or the agent failed.
        """
        config = self._config
        session = Session(
            first.request_id,
            first,
            generate,
            cast(ChatRenderer, renderer),
            limits=config.limits,
            max_context=self._max_context,
            tool_format=None if config.tool_format == "auto" else config.tool_format,
            tells_demands=config.format_constraints == "prompt",
            notes=self._server.notes,
        )
        users = [message.text for message in draw.prompt.messages if message.role == "user"]
        task = AgentTask(
            text=users[-1] if users else "",
            messages=draw.prompt.messages,
            metadata=draw.prompt.metadata,
            rollout=first.request_id,
            seed=first.sampling.seed,
            time_s=config.limits.time_s,
        )
        answer, problem = await self._run(session, task)
        if session.failed.done():
            await session.failed  # raises the failure
        calls = self._trained(session.calls)
        cut_off = bool(calls) and session.calls[-1].finish_reason == "length"  # some frameworks raise at that
        scored = bool(session.exhausted) or cut_off or config.on_failure == "score"
        if problem is not None and not scored:
            if isinstance(problem, RollError):
                raise problem
            raise InfraError(f"the agent failed: {with_refusals(str(problem), session.refused)}")
        if not calls:
            said = with_refusals(str(problem or "it ended without an error"), session.refused)
            raise InfraError(f"the agent ended without one answer of the model: {said}")
        cut_off = bool(session.exhausted or problem)
        if answer is not None:
            return as_rollout(draw, index, calls, text=answer, cut_off=cut_off)
        last = calls[-1]
        found = as_rollout(draw, index, calls, text=renderer.decode(last.token_ids), cut_off=cut_off)
        return replace(found, final_text=renderer.final_text(last.token_ids, last.context))

    def _trained(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the calls to train on; add a note if some are left out."""
        if self._config.train == "all" or not calls:
            return calls
        chain = [calls[place] for place in main_chain(calls)]
        if len(chain) < len(calls):
            kept, written = (sum(len(call.token_ids) for call in each) for each in (chain, calls))
            said = (
                f"an agent sent {len(calls) - len(chain)} requests outside its longest conversation of {len(chain)} "
                "answers (titles, summaries, sub-agents, or a history that it wrote anew): those answers are not "
                "trained"
            )
            if 2 * kept < written:
                self._server.notes.add(
                    "most are left out",
                    f"{said}, which is most of what the model wrote. Set rollout.agent.train to `all` if they belong "
                    "to the task.",
                )
            else:
                self._server.notes.add("some are left out", f"{said} (rollout.agent.train: main_chain).")
        return chain

    async def _run(self, session: Session, task: AgentTask) -> tuple[str | None, Exception | None]:
        """Run the agent; return its answer, and its error, if any."""
        self._server.sessions.add(session)
        work = asyncio.ensure_future(self._program(task, self._server.base_url, session.key))
        work.add_done_callback(lambda work: work.cancelled() or work.exception())  # marks the exception as retrieved
        try:
            await asyncio.wait({work, session.failed}, timeout=task.time_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None, TimeoutError(f"it did not end within {task.time_s:g} s")
            error = work.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            return (work.result(), None) if error is None else (None, error)
        finally:
            self._server.sessions.end(session)
            await _ended(work)


async def _ended(work: asyncio.Future[str | None]) -> None:
    """Cancel an agent that is still running."""
    if work.done():
        return
    work.cancel()
    done, _ = await asyncio.wait({work}, timeout=LAST_WORDS_S)
    if not done:
        logger.warning("an agent goes on although it was cancelled: its session is closed, and it is left behind")


@asynccontextmanager
async def open_agents(config: AgentConfig, sandbox: SandboxConfig, *, max_context: int) -> AsyncIterator[AgentLoop]:
    """Run the body with an agent loop, whose endpoint and program are closed at the end.

    Args:
        config: The agent's settings.
        sandbox: The run's sandbox settings, for an agent in a sandbox.
        max_context: Longest context of the engines, in tokens.

    Raises:
        UserError: The agent cannot be run on this machine.
    """
    from roll.agents.server import AgentServer  # imports the HTTP library, only if there is an agent

    async with AsyncExitStack() as stack:
        socket = None
        if config.sandbox:
            place = socket_directory(room=40)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-agents-", dir=place)))
            directory.chmod(0o755)
            socket = directory / "endpoint"
        server = await stack.enter_async_context(AgentServer(socket=socket))
        program = await stack.enter_async_context(open_program(config, sandbox, socket))
        yield AgentLoop(server, program, config, max_context=max_context)
