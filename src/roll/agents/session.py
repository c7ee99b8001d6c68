"""A session: the requests of one agent program to the model during one rollout, and their record.

    request ─► context (contexts) ─► within the budget? ─► generate ─► truncate at a stop string ─► record ─► answer

Invariants:
    - the record contains exactly the tokens that the agent received;
    - a session that has ended answers no request, and its running requests are aborted;
    - if the infrastructure fails during a request, the whole session fails, and its rollout is not scored.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll.agents.admission import RequestLimit
from roll.agents.contexts import ContextBuilder, Conversation
from roll.agents.request_errors import RequestError, build_session_over_error
from roll.agents.session_images import SessionImages
from roll.agents.tool_calls import ToolCall, ToolFormat, detect_tool_format, parse_tool_calls
from roll.agents.tree import ModelCall
from roll.agents.warning_log import WarningLog
from roll.data import ChatRenderer
from roll.data.decoding import NUM_CONTEXT_TOKENS
from roll.data.reasoning import find_reasoning_start, split_reasoning
from roll.envs.image_storage import ImageStorage
from roll.errors import InfraError
from roll.rollout.loops import Generate, build_next_request
from roll.types import Generation, GenerationRequest, IntArray, MediaSpan, Message

if TYPE_CHECKING:
    from roll.config.agents import AgentLimitsConfig

__all__ = ["Answer", "Session", "Sessions"]

MAX_ENDED_SESSIONS = 10_000
"""Number of ended sessions whose keys are remembered, so that their agents get a clear error."""
MAX_RECORDED_ERRORS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One generation as the agent receives it."""

    call: ModelCall
    text: str
    """The text without the stop string, reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    stopped_by: str | None
    """The stop string that ended the answer; `None` if no stop string did."""


class Session:
    """Answers and records the requests of one agent program.

    Args:
        session_id: Part of the API key and of the engines' request IDs.
        first_request: The first request; its sampling settings apply to every call, but a call may request fewer
            tokens.
        generate: Sends a request to the engines.
        renderer: Renderer of the policy's tokenizer.
        limits: The session's budget.
        max_context: Maximum context length of the engines, in tokens.
        tool_format: The model's format of tool calls; with `None`, it is detected from the chat template.
        constraints_as_text: Whether constraints on an answer's format are passed to the model as text. Otherwise
            requests with constraints are rejected.
        warnings: Logs warnings about unsupported features; its `reads_images` must be true if `images` is given.
        images: Stores the images of requests; `None` if the policy reads only text.
    """

    def __init__(
        self,
        session_id: str,
        first_request: GenerationRequest,
        generate: Generate,
        renderer: ChatRenderer,
        *,
        limits: AgentLimitsConfig,
        max_context: int,
        tool_format: ToolFormat | None = None,
        constraints_as_text: bool = False,
        warnings: WarningLog | None = None,
        images: ImageStorage | None = None,
    ) -> None:
        self.session_id = session_id
        self.key = f"{session_id}.{secrets.token_urlsafe(24)}"
        self.constraints_as_text = constraints_as_text
        self.warnings = warnings or WarningLog(reads_images=images is not None)
        self._images = None if images is None else SessionImages(images, max_context)
        self.rejected_requests: list[str] = []
        """The distinct errors of rejected requests, in order."""
        self.tool_format = tool_format or detect_tool_format(renderer.template)
        self.contexts = ContextBuilder(
            renderer,
            end_token_ids=first_request.sampling.stop_token_ids,
            tool_format=self.tool_format,
            max_context=max_context,
        )
        self.calls: list[ModelCall] = []
        """Calls, in the order in which they ended."""
        self.exhausted = ""
        """The exhausted limit of the budget, such as `50 answers`; empty until a request was rejected because of it."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future whose exception is the infrastructure error, if there was one."""
        self.answers: dict[str, Sequence[Message]] = {}
        """The messages up to and including each answer of the Responses API, by the ID of the response."""
        self.admission = RequestLimit(limits.parallel)
        self.renderer = renderer
        self._first, self._generate, self._limits, self._max_context = first_request, generate, limits, max_context
        self._num_asked = 0
        self._num_tokens = 0
        self._running: set[asyncio.Task[Generation]] = set()
        self._closed = False
        self._deadline = asyncio.get_running_loop().time() + limits.time_s

    # ---- images

    async def store_images(self, conversation: Conversation) -> Conversation:
        """Move the images of a conversation to the run's media store; return the conversation with references to them.

        Raises:
            RequestError: The session is over, there are too many images, an image cannot be decoded, or the
                infrastructure failed.
        """
        if self._images is None or not any(message.media for message in conversation.messages):
            return conversation
        if self._closed:
            raise build_session_over_error()
        self._check_deadline()
        try:
            return replace(conversation, messages=await self._images.store(conversation.messages))
        except InfraError as error:  # for example because the disk is full: the policy is not to blame
            self.fail(error)
            raise self._build_failure_error("an image cannot be stored") from error

    # ---- answers

    async def generate_answers(
        self,
        context: IntArray,
        *,
        media: tuple[MediaSpan, ...] = (),
        n: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        raw: bool = False,
    ) -> list[Answer]:
        """Generate answers to one context, and record them.

        Args:
            context: Token IDs, shape [C].
            media: Spans of the images in the context.
            n: Number of answers.
            max_tokens: Maximum number of tokens in each answer; the session's limits apply too.
            stop: Strings that end an answer.
            tools: Tools whose calls are parsed from the answers.
            raw: Whether to return the text unchanged, without separating the reasoning.

        Raises:
            RequestError: The session is over, its budget is used up, the context is too long, or the infrastructure
                failed.
        """
        self._check_limits(n)
        sampling = self._first.sampling
        room = min(self._max_context - len(context), sampling.max_new_tokens, self._limits.tokens - self._num_tokens)
        if len(context) >= self._max_context:
            raise RequestError(
                400,
                "context_length_exceeded",
                f"the request has {len(context)} tokens, but the model's context length is {self._max_context}: "
                "shorten the conversation.",
                field="messages",
            )
        wanted = room if max_tokens is None else min(room, max_tokens)
        requests = [self._build_next_request(context, media, wanted) for _ in range(n)]
        pairs = zip(requests, await self._generate_all(requests), strict=True)
        return [self._record_answer(request, generation, stop, tools, raw) for request, generation in pairs]

    def _build_next_request(
        self, context: IntArray, media: tuple[MediaSpan, ...], max_tokens: int
    ) -> GenerationRequest:
        request = build_next_request(self._first, context, self._num_asked, max_tokens, media)
        self._num_asked += 1
        return request

    async def _generate_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        tasks = [asyncio.ensure_future(self._generate(request)) for request in requests]
        self._running.update(tasks)
        try:
            done = await asyncio.gather(*tasks) if len(tasks) > 1 else [await tasks[0]]
        except asyncio.CancelledError:
            if self._closed:
                raise build_session_over_error() from None
            raise  # the agent has disconnected
        except Exception as error:
            self.fail(error)
            raise self._build_failure_error("the model is unavailable") from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)
        if self._closed:
            raise build_session_over_error()
        return done

    def _record_answer(
        self,
        request: GenerationRequest,
        generation: Generation,
        stop: Sequence[str],
        tools: Sequence[Mapping[str, Any]],
        raw: bool,
    ) -> Answer:
        context, ids = request.token_ids, generation.token_ids
        ends = self._first.sampling.stop_token_ids
        visible = ids[:-1] if len(ids) and int(ids[-1]) in ends else ids
        text = self.renderer.decode(visible)
        place, stopped_by = min(
            ((found, word) for word in stop if (found := text.find(word)) >= 0), default=(len(text), None)
        )
        reason = generation.finish_reason
        if stopped_by is not None:
            num_tokens = self.count_tokens(ids, place + len(stopped_by))
            ids, text, reason = ids[:num_tokens], text[:place], "stop"
        call = ModelCall(
            context=context,
            media=request.media,
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
            whole = text if stopped_by is not None else self.renderer.decode_raw(visible)
            behind = whole if self.tool_format == "harmony" else self._split_reasoning(whole, context)[1]
            outside, calls = parse_tool_calls(behind or "", self.tool_format, tools)
        if not raw:
            thought, answer = self._split_reasoning(text, context)
            # If the reasoning never ends, it is returned as the text, so that the agent sees it.
            thought, text = ("", text) if answer is None and not calls else (thought, answer or "")
        text = outside if calls else text
        return Answer(call=call, text=text, reasoning=thought, tool_calls=calls, stopped_by=stopped_by)

    def _split_reasoning(self, text: str, context: IntArray) -> tuple[str, str | None]:
        """Split an answer into its reasoning and the text after it; the text is `None` if the reasoning never ends."""
        reasoning_format = self.renderer.reasoning
        begun = find_reasoning_start(self.renderer.decode_raw(context[-NUM_CONTEXT_TOKENS:]), reasoning_format)
        thought, answer = split_reasoning(text, reasoning_format, begun=bool(begun))
        return thought, None if answer is None else answer.lstrip("\n") if thought else answer

    def count_tokens(self, token_ids: IntArray, num_characters: int) -> int:
        """Return the smallest number of leading tokens whose text includes the first `num_characters` characters."""
        said = self.renderer.decode(token_ids)[:num_characters]
        # Bisection. The text of a sequence is not the concatenation of its tokens' texts, so prefixes are decoded.
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            if self.renderer.decode(token_ids[:middle]).startswith(said):
                high = middle
            else:
                low = middle + 1
        return low

    def record_error(self, path: str, error: RequestError) -> None:
        """Record a rejected request, for the error message if the agent fails."""
        said = f"{path}: {error.status} {error.message}"
        if said not in self.rejected_requests and len(self.rejected_requests) < MAX_RECORDED_ERRORS:
            self.rejected_requests.append(said)

    def truncate_call(self, call: ModelCall, num_characters: int) -> None:
        """Truncate the record of a call to the first `num_characters` characters, after the agent has disconnected."""
        place = next((place for place, known in enumerate(self.calls) if known is call), None)
        if place is None:
            return
        num_tokens = self.count_tokens(call.token_ids, num_characters) if num_characters else 0
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

    # ---- limits

    @property
    def max_context(self) -> int:
        """Maximum context length of the engines, in tokens."""
        return self._max_context

    @property
    def deadline(self) -> float:
        """The session's deadline, on the event loop's clock."""
        return self._deadline

    def _check_limits(self, n: int) -> None:
        limits = self._limits
        if self._closed:
            raise build_session_over_error()
        if self.failed.done():
            raise RequestError(
                503, "engine_failure", "this session has failed: the rollout will be retried from the start."
            )
        if n > limits.choices:
            message = f"n must be at most {limits.choices} (rollout.agent.limits.choices), got {n}."
            raise RequestError(400, "invalid_value", message, field="n")
        self.admission.check(len(self._running), n)
        if self._num_asked + n > limits.turns:
            self.exhausted = f"{limits.turns} answers"
        elif self._num_tokens >= limits.tokens:
            self.exhausted = f"{limits.tokens} tokens"
        if self.exhausted:
            raise self._build_budget_error()
        self._check_deadline()

    def _check_deadline(self) -> None:
        if asyncio.get_running_loop().time() >= self._deadline:
            self.exhausted = f"{self._limits.time_s:g} s"
            raise self._build_budget_error()

    def _build_budget_error(self) -> RequestError:
        return RequestError(403, "budget_exhausted", f"this session's budget of {self.exhausted} is used up.")

    def _build_failure_error(self, problem: str) -> RequestError:
        return RequestError(503, "engine_failure", f"{problem}; this session has failed.", retry_after_s=1)

    # ---- end of the session

    def fail(self, error: Exception) -> None:
        """Fail the session because of an infrastructure error."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # marks the exception as retrieved, as there may be no waiter

    def close(self) -> None:
        """End the session, and abort its requests that are being read or are running."""
        self._closed = True
        self.admission.close()
        for task in list(self._running):
            task.cancel()


class Sessions:
    """All open sessions, by key."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=MAX_ENDED_SESSIONS)

    def add(self, session: Session) -> None:
        """Add a session; its requests are answered from now on."""
        self._open[session.session_id] = session

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    def end(self, session: Session) -> None:
        """End and remove the session; its requests are no longer answered."""
        session.close()
        if self._open.pop(session.session_id, None) is not None:
            self._ended.append(session.session_id)

    def find(self, key: str) -> Session:
        """Return the session with this key.

        Raises:
            RequestError: The key is invalid, or its session is over.
        """
        session_id, _, _ = key.rpartition(".")
        session = self._open.get(session_id)
        if session is not None and hmac.compare_digest(session.key.encode(), key.encode(errors="surrogateescape")):
            return session
        if session is None and session_id in self._ended:
            raise build_session_over_error()
        raise RequestError(401, "invalid_api_key", "the request has no API key, or the key is not valid.")
