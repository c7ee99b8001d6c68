"""The endpoint's OpenAPI 3.1 description, built from the models that validate requests."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from roll.agents.anthropic_messages import CountTokensRequest, MessagesRequest
from roll.agents.openai_chat import ChatRequest
from roll.agents.openai_completions import CompletionRequest
from roll.agents.openai_responses import ResponsesRequest

__all__ = ["build_description"]

_REQUEST_MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
_ERROR_DESCRIPTIONS = {
    "400": "The body is not valid; the message names the field.",
    "401": "The key is missing or not valid, or the session has ended.",
    "403": "The session's budget is used up.",
    "404": "The path or the earlier response does not exist.",
    "413": "The body is too large.",
    "429": "Too many requests of this session are running.",
    "503": "The model is temporarily unavailable.",
}


@functools.cache
def build_description() -> dict[str, Any]:
    """Return the OpenAPI description of all routes."""
    models = sorted(set(_REQUEST_MODELS.values()), key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    rejected = {status: {"description": meaning} for status, meaning in _ERROR_DESCRIPTIONS.items()}
    answered = {"description": "The answer; server-sent events if `stream` is true."}
    paths: dict[str, Any] = {}
    for path, model in _REQUEST_MODELS.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        operation = {
            "operationId": path.strip("/").replace("/", "_"),
            "summary": (model.__doc__ or "").strip().partition("\n")[0],
            "requestBody": {"required": True, "content": body},
            "responses": {"200": answered, **rejected},
        }
        paths[path] = {"post": operation}
    listed = {"200": {"description": "The policy's model."}, "401": rejected["401"]}
    paths["/v1/models"] = {"get": {"operationId": "v1_models", "responses": listed}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{name}"] = {"get": {"operationId": "v1_model", "parameters": [name], "responses": listed}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ROLL's endpoint for agents", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }
