"""`POST /v1/completions` of OpenAI's API, which completes a prompt that is a string or a list of token IDs."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from roll.agents import wire
from roll.agents.openai_chat import build_reply
from roll.agents.replies import AnswerEvent, Reply
from roll.agents.request_errors import RequestError
from roll.agents.session import Answer, Session

__all__ = ["CompletionRequest", "create_completion"]

Tokens = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class CompletionRequest(wire.ChoicesRequest):
    """A request to continue a prompt. The run's sampling settings apply; `temperature` is ignored."""

    prompt: Annotated[str, Field(min_length=1)] | Tokens | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


async def create_completion(session: Session, raw_body: bytes) -> Reply:
    """Generate completions for a request, given its body, and return them in OpenAI's format."""
    request = wire.parse_body(CompletionRequest, raw_body, session.warnings)
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise RequestError(400, "unsupported_parameter", f"{name} is not supported: remove it.", field=name)
    prompt = request.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        context = session.contexts.build_text_context(prompt)
    else:
        context = np.asarray(prompt, np.int32)
        media = session.renderer.media
        if media is not None and np.isin(context, media.inputs.processor.replaced_tokens).any():
            message = "the prompt has image tokens, which /v1/completions does not support: use /v1/chat/completions."
            raise RequestError(400, "invalid_value", message, field="prompt")
        if int(context.max()) >= session.renderer.vocabulary_size:
            raise RequestError(
                400,
                "invalid_value",
                f"token ID {int(context.max())} is out of range for the vocabulary size "
                f"{session.renderer.vocabulary_size}.",
                field="prompt",
            )
    answers = await session.generate_answers(
        context, n=request.n or 1, max_tokens=request.max_tokens, stop=request.stop_strings, raw=True
    )
    if isinstance(prompt, str):
        for answer in answers:
            said = session.renderer.decode(answer.call.token_ids)
            session.contexts.record_text(prompt + said, context, answer.call.token_ids)
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }

    def build_choice(answer: Answer, text: str | None = None) -> dict[str, Any]:
        logprobs = _build_logprobs(session, answer) if request.logprobs is not None else None
        return {"text": answer.text if text is None else text, "logprobs": logprobs}

    def build_chunks(answer: Answer, event: AnswerEvent) -> list[dict[str, Any]]:
        return (
            [build_choice(answer, "")]
            if event.kind == "end"
            else [{"text": event.text}]
            if event.kind == "text"
            else []
        )

    return build_reply(request, head, answers, build_choice, build_chunks)


def _build_logprobs(session: Session, answer: Answer) -> dict[str, Any]:
    """Return the log-probs of the generated tokens; `top_logprobs` is null, because engines do not return them."""
    texts = [session.renderer.decode_raw(token) for token in answer.call.token_ids[:, None]]
    offsets = np.cumsum([0, *map(len, texts)])[: len(texts)].tolist()
    logprobs = answer.call.logprobs.tolist()
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}
