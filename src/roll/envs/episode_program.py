"""A program that serves an environment over a pipe with one JSON object per line. It runs in a sandbox.

    {"call": "start", "name": …, "options": …, "wrappers": …}
    {"call": "reset", "seed": …}
    {"call": "step", "action": …}

Each call is answered by one line: `{"value": …}`, or `{"error": the exception}`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from roll.envs.base import encode_json
from roll.envs.images import encode_images

__all__ = ["serve"]


class _Episode:
    def __init__(self) -> None:
        self._env: Any = None
        self._loop = asyncio.new_event_loop()

    def start(self, name: str, options: dict[str, Any], wrappers: list[tuple[str, dict[str, Any]]]) -> None:
        from roll.envs.hosting import build
        from roll.types import EnvironmentSettings

        self._env = build(EnvironmentSettings(name=name, options=options, wrappers=tuple(map(tuple, wrappers))))  # type: ignore[arg-type]

    def reset(self, seed: int | None) -> Any:
        return self._encode(self._await_result(self._env.reset(seed)))

    def step(self, action: str) -> Any:
        return self._encode(self._await_result(self._env.step(action)))

    def _encode(self, result: Any) -> Any:
        return (encode_images(result[0]), *result[1:]) if isinstance(result, tuple) and result else result

    def _await_result(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def serve(lines: Iterable[str], write: Callable[[str], object]) -> None:
    """Run the JSON calls in `lines`, and pass each result or error to `write` as JSON."""
    episode = _Episode()
    for line in lines:
        given = json.loads(line)
        try:
            found = {"value": getattr(episode, given.pop("call"))(**given)}
            reply = encode_json(found)
        except Exception as error:
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        write(reply)


def main() -> None:
    """Read calls from standard input; write results to file descriptor 3, so that printed text cannot corrupt them."""
    with os.fdopen(3, "w", encoding="utf-8") as replies:
        serve(sys.stdin, lambda line: print(line, file=replies, flush=True))
