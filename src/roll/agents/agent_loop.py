"""Rollouts of an agent program, which runs unchanged against an OpenAI- or Anthropic-compatible endpoint of the policy.

    prompt ─► session opened ─► agent runs ··· requests ··· ─► agent ends ─► session closed ─► rollout of its calls

Invariants:
    - however the agent ends, its session is closed and its program ended before the rollout is returned;
    - a program that crashes or hangs is an infrastructure error and is retried; its reward is never set to 0. The
      rollout is scored instead if its session's budget was used up, if its last answer was truncated, or if
      `on_failure` is `score`.
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

from roll.agents.failure_messages import add_request_errors
from roll.agents.programs import AgentTask, Program, open_program
from roll.agents.session import Session
from roll.agents.tree import ModelCall, build_rollout, find_main_chain
from roll.data import ChatRenderer
from roll.envs.image_storage import ImageStorage
from roll.errors import InfraError, RollError
from roll.process_environment import find_socket_directory
from roll.rollout.loops import Generate, Renderer
from roll.types import GenerationRequest, PromptDraw, Rollout, iter_texts

if TYPE_CHECKING:
    from roll.agents.server import AgentServer
    from roll.config.agents import AgentConfig
    from roll.config.sandbox import SandboxConfig

__all__ = ["AgentLoop", "open_agent_loop"]

logger = logging.getLogger(__name__)

CLEANUP_TIMEOUT_S = 5.0
"""Seconds that ROLL waits for the clean-up of a canceled agent."""


class AgentLoop:
    """A `RolloutLoop` that runs an agent program once per rollout.

    Args:
        server: The server that answers the agent's requests.
        program: The agent program.
        config: The agent's limits and error handling.
        max_context: Maximum context length of the engines, in tokens.
        images: Stores the images of requests; `None` if the policy reads only text.
    """

    def __init__(
        self,
        server: AgentServer,
        program: Program,
        config: AgentConfig,
        *,
        max_context: int,
        images: ImageStorage | None = None,
    ) -> None:
        self._server, self._program, self._config, self._max_context = server, program, config, max_context
        self._images = images

    async def __call__(
        self, draw: PromptDraw, index: int, first_request: GenerationRequest, generate: Generate, renderer: Renderer
    ) -> Rollout:
        """Run the agent once, and return its requests as one rollout, without a reward.

        Raises:
            InfraError: The infrastructure or the agent failed.
        """
        config = self._config
        session = Session(
            first_request.request_id,
            first_request,
            generate,
            cast(ChatRenderer, renderer),
            limits=config.limits,
            max_context=self._max_context,
            tool_format=None if config.tool_format == "auto" else config.tool_format,
            constraints_as_text=config.format_constraints == "prompt",
            warnings=self._server.warnings,
            images=self._images,
        )
        users = ["".join(iter_texts(message.content)) for message in draw.prompt.messages if message.role == "user"]
        task = AgentTask(
            text=users[-1] if users else "",
            messages=draw.prompt.messages,
            metadata=draw.prompt.metadata,
            rollout=first_request.request_id,
            seed=first_request.sampling.seed,
            time_s=config.limits.time_s,
        )
        answer, problem = await self._run(session, task)
        if session.failed.done():
            await session.failed  # raises the failure
        calls = self._select_calls(session.calls)
        # If the budget or the context was used up, the failure is the policy's: the rollout is scored, not retried.
        cut_off = bool(calls) and session.calls[-1].finish_reason == "length"  # some frameworks raise an error
        scored = bool(session.exhausted) or cut_off or config.on_failure == "score"
        if problem is not None and not scored:
            if isinstance(problem, RollError):
                raise problem
            raise InfraError(f"the agent failed: {add_request_errors(str(problem), session.rejected_requests)}")
        if not calls:
            said = add_request_errors(str(problem or "the agent ended without an error"), session.rejected_requests)
            raise InfraError(f"the agent ended before it received a response from the model: {said}")
        cut_off = bool(session.exhausted or problem)
        if answer is not None:
            return build_rollout(draw, index, calls, text=answer, cut_off=cut_off)
        last = calls[-1]
        found = build_rollout(draw, index, calls, text=renderer.decode(last.token_ids), cut_off=cut_off)
        return replace(found, final_text=renderer.decode_final_text(last.token_ids, last.context))

    def _select_calls(self, calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
        """Return the calls to train on: all of them, or with `train: main_chain` only those of the longest chain.

        A warning reports the calls that are left out.
        """
        if self._config.train == "all" or not calls:
            return calls
        chain = [calls[place] for place in find_main_chain(calls)]
        if len(chain) < len(calls):
            kept, written = (sum(len(call.token_ids) for call in each) for each in (chain, calls))
            said = (
                f"an agent sent {len(calls) - len(chain)} requests that are not part of its longest conversation of "
                f"{len(chain)} answers (titles, summaries, sub-agents, or a rewritten history): their answers are not "
                "trained on"
            )
            if 2 * kept < written:
                self._server.warnings.warn_once(
                    "most are left out",
                    f"{said}, although they contain most of the generated tokens. Set rollout.agent.train to `all` if "
                    "they belong to the task.",
                )
            else:
                self._server.warnings.warn_once("some are left out", f"{said} (rollout.agent.train: main_chain).")
        return chain

    async def _run(self, session: Session, task: AgentTask) -> tuple[str | None, Exception | None]:
        """Run the agent, then end its session.

        Returns:
            The agent's answer and `None`, or `None` and the agent's error or timeout.
        """
        self._server.sessions.add(session)
        work = asyncio.ensure_future(self._program(task, self._server.base_url, session.key))
        work.add_done_callback(lambda work: work.cancelled() or work.exception())  # marks the exception as retrieved
        try:
            await asyncio.wait({work, session.failed}, timeout=task.time_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None, TimeoutError(f"the agent did not end within {task.time_s:g} s")
            error = work.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            return (work.result(), None) if error is None else (None, error)
        finally:
            # Ends the session first, so that a program that ignores its end cannot send further requests.
            self._server.sessions.end(session)
            await _cancel_task(work)


async def _cancel_task(task: asyncio.Future[str | None]) -> None:
    """Cancel an agent that is still running, and wait a few seconds for it to end."""
    if task.done():
        return
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)
    if not done:
        logger.warning("a canceled agent did not stop in time: its session is closed, but the agent is still running")


@asynccontextmanager
async def open_agent_loop(
    config: AgentConfig, sandbox: SandboxConfig, *, max_context: int, images: ImageStorage | None = None
) -> AsyncIterator[AgentLoop]:
    """Yield an agent loop, and close its endpoint and program at the end.

    Args:
        config: The agent's settings.
        sandbox: The run's sandbox settings, for an agent in a sandbox.
        max_context: Maximum context length of the engines, in tokens.
        images: Stores the images of requests; `None` if the policy reads only text.

    Raises:
        UserError: The agent cannot be run on this machine.
    """
    from roll.agents.server import AgentServer  # imports the HTTP library, which is needed only for agents

    async with AsyncExitStack() as stack:
        socket = None
        if config.sandbox:
            place = find_socket_directory(relative_length=40)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roll-agents-", dir=place)))
            directory.chmod(0o755)
            socket = directory / "endpoint"
        server = await stack.enter_async_context(AgentServer(socket=socket, reads_images=images is not None))
        program = await stack.enter_async_context(open_program(config, sandbox, socket))
        yield AgentLoop(server, program, config, max_context=max_context, images=images)
