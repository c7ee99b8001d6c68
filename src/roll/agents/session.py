"""A session: the requests of one agent program to the model during one rollout, and their record.

    request ─► context (contexts) ─► within the budget? ─► generate ─► cut at a stop text ─► recorded call ─► answer

Invariants:
    - the record holds exactly the tokens that the agent received;
    - after its end a session answers no request; running requests are aborted;
    - a request that the infrastructure fails makes the whole session fail: none of it is ever scored.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.agents.contexts import Contexts
from roll.agents.notes import Notes
from roll.agents.refusals import Refusal
from roll.agents.tool_calls import ToolCall, ToolFormat, format_of, read_calls
from roll.agents.tree import Call
from roll.data import ChatRenderer
from roll.data.decoding import CONTEXT_SEEN
from roll.data.reasoning import begun_thought, split_reasoning
from roll.rollout.loops import Generate, next_turn
from roll.types import Generation, GenerationRequest, IntArray, Message

if TYPE_CHECKING:
    from roll.config.agents import AgentLimits

__all__ = ["Answer", "Session", "Sessions"]

NUM_ENDED = 10_000
"""Number of ended sessions that are remembered, so that their agents get a clear error."""
MOST_REFUSED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One generation as the agent receives it."""

    call: Call
    text: str
    """The text without the stop text, reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    stopped_by: str | None
    """The stop text that ended the answer."""


class Session:
    """The requests of one agent program, and their record.

    Args:
        session_id: Part of the key, and of request IDs in the engines.
        first: The first request; its sampling settings hold for every call, except that a call may be shorter.
        generate: Sends a request to the engines.
        renderer: Renderer of the policy's tokenizer.
        limits: The session's budget.
        max_context: Longest context of the engines, in tokens.
        tool_format: The model's format of tool calls; `None`: the format in its chat template.
        tells_demands: Whether demands on an answer's format are passed to the model as text, instead of rejected.
        notes: The run's notes on unsupported features.
    """

    def __init__(
        self,
        session_id: str,
        first: GenerationRequest,
        generate: Generate,
        renderer: ChatRenderer,
        *,
        limits: AgentLimits,
        max_context: int,
        tool_format: ToolFormat | None = None,
        tells_demands: bool = False,
        notes: Notes | None = None,
    ) -> None:
        self.session_id = session_id
        self.key = f"{session_id}.{secrets.token_urlsafe(24)}"
        self.tells_demands = tells_demands
        self.notes = notes or Notes()
        self.refused: list[str] = []
        """Distinct refusals that the agent received, in order."""
        self.tool_format = tool_format or format_of(renderer.template)
        self.contexts = Contexts(
            renderer, ends=first.sampling.stop_token_ids, tool_format=self.tool_format, max_context=max_context
        )
        self.calls: list[Call] = []
        """Calls, in the order in which they ended."""
        self.exhausted = ""
        """The exhausted part of the budget, of which the agent was informed; empty if none is."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the infrastructure's failure, if any."""
        self.answers: dict[str, Sequence[Message]] = {}
        """Conversations that an agent may continue, by the ID of their last answer."""
        self.renderer = renderer
        self._first, self._generate, self._limits, self._max_context = first, generate, limits, max_context
        self._num_asked = 0
        self._num_tokens = 0
        self._running: set[asyncio.Task[Generation]] = set()
        self._closed = False
        self._deadline = asyncio.get_running_loop().time() + limits.time_s

    # ---- answers

    async def ask(
        self,
        context: IntArray,
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
    ) -> list[Answer]:
        """Generate answers of the model to one context.

        Args:
            context: Token IDs, shape [C].
            n: Number of answers.
            max_tokens: Longest answer, in tokens; the session's own bounds apply too.
            stop: Texts that end an answer.
            tools: Tools whose calls are parsed in the answers.
            raw: Whether answers are plain texts, without reasoning to separate.

        Raises:
            Refusal: The session is over, its budget is used up, the context is too long, or the infrastructure failed.
        """
        self._check(n)
        sampling = self._first.sampling
        room = min(self._max_context - len(context), sampling.max_new_tokens, self._limits.tokens - self._num_tokens)
        if len(context) >= self._max_context:
            raise Refusal(
                400,
                "context_length_exceeded",
                f"the model's context is {self._max_context} tokens, and these are {len(context)}: send fewer.",
                field="messages",
            )
        wanted = room if max_tokens is None else min(room, max_tokens)
        requests = [self._next_request(context, wanted) for _ in range(n)]
        generations = await self._generated(requests)
        return [self._recorded(context, generation, stop, tools, raw) for generation in generations]

    def _next_request(self, context: IntArray, max_tokens: int) -> GenerationRequest:
        request = next_turn(self._first, context, self._num_asked, max_tokens)
        self._num_asked += 1
        return request

    async def _generated(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        tasks = [asyncio.ensure_future(self._generate(request)) for request in requests]
        self._running.update(tasks)
        try:
            done = await asyncio.gather(*tasks) if len(tasks) > 1 else [await tasks[0]]
        except asyncio.CancelledError:
            if self._closed:
                raise self._over() from None
            raise  # the agent has disconnected
        except Exception as error:
            self.fail(error)
            raise Refusal(
                503, "engine_failure", "the model cannot answer right now; this session has failed.", retry_after_s=1
            ) from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)
        if self._closed:
            raise self._over()
        return done

    def _recorded(
        self,
        context: IntArray,
        generation: Generation,
        stop: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        raw: bool,
    ) -> Answer:
        ids = generation.token_ids
        ends = self._first.sampling.stop_token_ids
        shown = ids[:-1] if len(ids) and int(ids[-1]) in ends else ids
        text = self.renderer.decode(shown)
        place, stopped_by = min(
            ((found, word) for word in stop if (found := text.find(word)) >= 0), default=(len(text), None)
        )
        reason = generation.finish_reason
        if stopped_by is not None:
            num_tokens = self.num_tokens_of(ids, place + len(stopped_by))
            ids, text, reason = ids[:num_tokens], text[:place], "stop"
        call = Call(
            context=context,
            token_ids=ids,
            logprobs=generation.logprobs[: len(ids)],
            policy_versions=generation.policy_versions[: len(ids)],
            finish_reason=reason,
            engine_id=generation.engine_id,
            experts=None if generation.experts is None else generation.experts[: len(context) + len(ids)],
        )
        self.calls.append(call)
        self._num_tokens += len(ids)
        calls: tuple[ToolCall, ...] = ()
        thought = outside = ""
        if tools:
            whole = text if stopped_by is not None else self.renderer.decode_raw(shown)
            behind = whole if self.tool_format == "harmony" else self._apart(whole, context)[1]
            outside, calls = read_calls(behind or "", self.tool_format, tools)
        if not raw:
            thought, answer = self._apart(text, context)
            # An answer that never ends its reasoning is returned whole, so that the agent sees it.
            thought, text = ("", text) if answer is None and not calls else (thought, answer or "")
        text = outside if calls else text
        return Answer(call=call, text=text, reasoning=thought, tool_calls=calls, stopped_by=stopped_by)

    def _apart(self, text: str, context: IntArray) -> tuple[str, str | None]:
        """Return the reasoning in an answer, and the text after it; `None` if the reasoning never ends."""
        form = self.renderer.reasoning
        begun = begun_thought(self.renderer.decode_raw(context[-CONTEXT_SEEN:]), form)
        thought, answer = split_reasoning(text, form, begun=bool(begun))
        return thought, None if answer is None else answer.lstrip("\n") if thought else answer

    def num_tokens_of(self, token_ids: IntArray, num_characters: int) -> int:
        """Return the number of leading tokens that cover so many characters; a partial character does not count."""
        said = self.renderer.decode(token_ids)[:num_characters]
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if self.renderer.decode(token_ids[:middle]).startswith(said):
                high = middle
            else:
                low = middle + 1
        return low

    def refuse(self, path: str, refusal: Refusal) -> None:
        """Record a refusal, for the error message of an agent that fails."""
        said = f"{path}: {refusal.status} {refusal.message}"
        if said not in self.refused and len(self.refused) < MOST_REFUSED:
            self.refused.append(said)

    def received(self, call: Call, num_characters: int) -> None:
        """Truncate a call to the part that was sent, after the agent disconnected before the end of the answer."""
        place = next((place for place, known in enumerate(self.calls) if known is call), None)
        if place is None:
            return
        num_tokens = self.num_tokens_of(call.token_ids, num_characters) if num_characters else 0
        if num_tokens == 0:
            del self.calls[place]
        elif num_tokens < len(call.token_ids):
            self.calls[place] = replace(
                call,
                token_ids=call.token_ids[:num_tokens],
                logprobs=call.logprobs[:num_tokens],
                policy_versions=call.policy_versions[:num_tokens],
                experts=None if call.experts is None else call.experts[: len(call.context) + num_tokens],
                finish_reason="abort",
            )

    # ---- bounds

    @property
    def max_context(self) -> int:
        """Longest context of the engines, in tokens."""
        return self._max_context

    @property
    def deadline(self) -> float:
        """The session's deadline, on the event loop's clock."""
        return self._deadline

    def _check(self, n: int) -> None:
        limits = self._limits
        if self._closed:
            raise self._over()
        if self.failed.done():
            raise Refusal(503, "engine_failure", "this session has failed: it will be tried again from its beginning.")
        if n > limits.choices:
            message = f"n is {n}, but at most {limits.choices} answers are given (rollout.agent.limits.choices)."
            raise Refusal(400, "invalid_value", message, field="n")
        if len(self._running) + n > limits.parallel:
            message = f"{len(self._running)} requests of this session run; {limits.parallel} may at once."
            raise Refusal(429, "rate_limit_exceeded", message, retry_after_s=1)
        if self._num_asked + n > limits.turns:
            self.exhausted = f"{limits.turns} answers"
        elif self._num_tokens >= limits.tokens:
            self.exhausted = f"{limits.tokens} tokens"
        elif asyncio.get_running_loop().time() >= self._deadline:
            self.exhausted = f"{limits.time_s:g} s"
        if self.exhausted:
            raise Refusal(403, "budget_exhausted", f"this session's budget of {self.exhausted} is used up.")

    def _over(self) -> Refusal:
        return Refusal(401, "session_over", "this session is over: its agent ended, or was ended.")

    # ---- its end

    def fail(self, error: Exception) -> None:
        """Record a failure of the infrastructure, which fails the session."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks the exception as retrieved, as there may be no waiter

    def close(self) -> None:
        """End the session and abort its running requests."""
        self._closed = True
        for task in list(self._running):
            task.cancel()


class Sessions:
    """All open sessions, by their keys."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=NUM_ENDED)

    def add(self, session: Session) -> None:
        """Answer the session's requests from now on."""
        self._open[session.session_id] = session

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    def end(self, session: Session) -> None:
        """End the session; its requests are no longer answered."""
        session.close()
        if self._open.pop(session.session_id, None) is not None:
            self._ended.append(session.session_id)

    def find(self, key: str) -> Session:
        """Return the session of a key.

        Raises:
            Refusal: The key is invalid, or its session is over.
        """
        session_id, _, _ = key.rpartition(".")
        session = self._open.get(session_id)
        if session is not None and hmac.compare_digest(session.key.encode(), key.encode(errors="surrogateescape")):
            return session
        if session is None and session_id in self._ended:
            raise Refusal(401, "session_over", "this session is over: its agent ended, or was ended.")
        raise Refusal(401, "invalid_api_key", "the request has no key, or none that opens a session here.")
