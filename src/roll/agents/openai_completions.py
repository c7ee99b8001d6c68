"""`POST /v1/completions`: a text, or tokens, to be continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from roll.agents.openai_chat import DONE, StreamOptions, finish_reason, usage
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session
from roll.agents.wire import Body, Count, Name, Piece, Reply, Stops, checked, event, pieces_of, stops

__all__ = ["CompletionRequest", "complete"]

Tokens = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class CompletionRequest(Body):
    """A text to be continued. The run's own sampling holds, whatever temperature is asked for."""

    model: Name
    prompt: Annotated[str, Field(min_length=1)] | Tokens | Annotated[list[str], Field(min_length=1, max_length=1)]
    n: Count | None = None
    max_tokens: Count | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


async def complete(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = checked(CompletionRequest, raw)
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise Refusal(400, "unsupported_parameter", f"{name} is not supported here: leave it out.", field=name)
    prompt = request.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        context = session.contexts.of_text(prompt)
    else:
        context = np.asarray(prompt, np.int32)
        if int(context.max()) >= session.renderer.vocabulary:
            raise Refusal(
                400,
                "invalid_value",
                f"token {int(context.max())} is outside the vocabulary of {session.renderer.vocabulary}.",
                field="prompt",
            )
    answers = await session.ask(
        context, n=request.n or 1, max_tokens=request.max_tokens, stop=stops(request.stop), raw=True
    )
    if isinstance(prompt, str):
        for answer in answers:
            said = session.renderer.decode(answer.call.token_ids)
            session.contexts.remember_text(prompt + said, context, answer.call.token_ids)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }
    if request.stream:
        return Reply(stream=_stream(head, request, session, answers), answers=answers)
    choices = [
        {
            "index": index,
            "text": answer.text,
            "finish_reason": finish_reason(answer),
            "logprobs": _logprobs(session, answer) if request.logprobs is not None else None,
        }
        for index, answer in enumerate(answers)
    ]
    return Reply({**head, "choices": choices, "usage": usage(answers)}, answers=answers)


def _stream(
    head: dict[str, Any], request: CompletionRequest, session: Session, answers: Sequence[Answer]
) -> Iterator[Piece]:
    def chunk(index: int, text: str, reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return event({**head, "choices": [choice]})

    for index, answer in enumerate(answers):
        for text, sent in pieces_of(answer):
            yield Piece(chunk(index, text), answer, sent)
        logprobs = _logprobs(session, answer) if request.logprobs is not None else None
        yield Piece(chunk(index, "", finish_reason(answer), logprobs), answer)
    if request.stream_options is not None and request.stream_options.include_usage:
        yield Piece(event({**head, "choices": [], "usage": usage(answers)}))
    yield Piece(DONE)


def _logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    """Of every token that the model wrote; engines say nothing of tokens that it did not write."""
    texts = [session.renderer.spelt(token) for token in answer.call.token_ids[:, None]]
    offsets = np.cumsum([0, *map(len, texts)])[: len(texts)].tolist()
    logprobs = answer.call.logprobs.tolist()
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
