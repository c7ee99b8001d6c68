"""Rollouts and a worker pool for the tests of verifiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from roll.cluster.pool import LocalWorkerPool
from roll.types import Message, Prompt, Rollout


@pytest.fixture
async def pool() -> AsyncIterator[LocalWorkerPool]:
    pool = LocalWorkerPool(1)
    yield pool
    await pool.close()


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Rollout]:
    def make(text: str, answer: str = "", *, finished: bool = True, metadata: dict[str, Any] | None = None) -> Rollout:
        return Rollout(
            draw_id=0,
            index=0,
            prompt=Prompt(
                uid="d/0",
                domain="d",
                messages=(Message(role="user", content="?"),),
                answer=answer,
                metadata=metadata or {},
            ),
            prompt_token_ids=np.zeros(1, np.int32),
            token_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32),
            finish_reason="stop" if finished else "length",
            text=text,
        )

    return make
