"""Requests and results as bytes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from roll.serving.failures import RequestFailure

__all__ = ["Result", "Submission", "to_json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of a request."""

    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A request as it was received."""

    path: str
    body: bytes
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_restored: bool = False
    """True if the journal has the request, because an earlier server accepted it."""
    outcome: Result | RequestFailure | None = None
    """The outcome from an earlier server."""

    @property
    def digest(self) -> bytes:
        """The hash by which a repeated request is recognized.

        The path is part of it, because two paths accept equal bodies, for example those that save weights.
        """
        return sha256(self.path.encode() + b"\n" + self.body).digest()


def to_json(content: Mapping[str, Any]) -> Result:
    """Return a result in JSON."""
    return Result(body=json.dumps(content).encode())
