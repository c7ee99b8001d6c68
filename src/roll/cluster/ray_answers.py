"""Answers of Ray actors, with the original errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

__all__ = ["answer"]


async def answer(reference: Any, died: Callable[[], Exception]) -> Any:
    """Wait for an actor's answer; raise the original error of a failed call.

    Args:
        reference: The reference of the call.
        died: A function that returns the error for an actor whose process ended.
    """
    try:
        return await reference
    except RayActorError as error:
        raise died() from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
            raise cause from error
        raise
