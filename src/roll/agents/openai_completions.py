"""`POST /v1/completions`: a text, or tokens, to be continued."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from roll.agents import wire
from roll.agents.answering import Part, Reply
from roll.agents.openai_chat import choices
from roll.agents.refusals import Refusal
from roll.agents.session import Answer, Session

__all__ = ["CompletionRequest", "complete"]

Tokens = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class CompletionRequest(wire.Choosing):
    """A text to be continued. The run's own sampling holds, whatever temperature is asked for."""

    prompt: Annotated[str, Field(min_length=1)] | Tokens | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


async def complete(session: Session, raw: bytes) -> Reply:
    """Answer a request."""
    request = wire.checked(CompletionRequest, raw, session.notes)
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
    answers = await session.ask(context, n=request.n or 1, max_tokens=request.max_tokens, stop=request.stops, raw=True)
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

    def whole(answer: Answer, text: str | None = None) -> dict[str, Any]:
        logprobs = _logprobs(session, answer) if request.logprobs is not None else None
        return {"text": answer.text if text is None else text, "logprobs": logprobs}

    def chunks(answer: Answer, part: Part) -> list[dict[str, Any]]:
        return [whole(answer, "")] if part.kind == "end" else [{"text": part.text}] if part.kind == "text" else []

    return choices(request, head, answers, whole, chunks)


def _logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    """Return the log-probs of every token that the model wrote; engines return none for other tokens."""
    texts = [session.renderer.decode_raw(token) for token in answer.call.token_ids[:, None]]
    offsets = np.cumsum([0, *map(len, texts)])[: len(texts)].tolist()
    logprobs = answer.call.logprobs.tolist()
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
