"""Awaits calls to Ray actors, and raises the original errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnschedulableError, NodeDiedError, ObjectLostError, RayActorError, RayTaskError

__all__ = ["await_result"]

_DEATHS = (RayActorError, NodeDiedError, ActorUnschedulableError, ObjectLostError)
"""Errors of calls to actors that are gone. `ActorUnschedulableError`: the actor's node has left the cluster.
`ObjectLostError`: the node left before its answer, which was larger than 100 KB, was fetched."""


async def await_result(reference: Any, build_death_error: Callable[[], Exception]) -> Any:
    """Wait for an actor's answer; raise the original error of a failed call.

    Args:
        reference: The object reference of the call.
        build_death_error: A function that returns the error for an actor whose process ended.
    """
    try:
        return await reference
    except _DEATHS as error:
        raise build_death_error() from error
    except RayTaskError as error:
        # Ray wraps the error of a call, but callers distinguish errors by type, as with a trainer in this process.
        cause = error.cause
        if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
            raise cause from error
        raise
