"""Sandboxes and answers for the tests of code rewards."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.rewards.base import Judgement
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier
from roll.types import Prompt, Rollout
from roll_sandbox import SandboxUnavailableError


def rollout(text: str, metadata: dict[str, Any], uid: str = "d/0") -> Rollout:
    nothing = np.zeros(0, np.int32)
    return Rollout(
        draw_id=0,
        index=0,
        prompt=Prompt(uid=uid, domain="d", messages=(), metadata=metadata),
        prompt_token_ids=nothing,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        policy_versions=nothing,
        finish_reason="stop",
        text=text,
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def boxes() -> AsyncIterator[CodeSandboxes]:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed (scripts/setup.sh says how)")
    async with AsyncExitStack() as stack:
        try:
            boxes = await stack.enter_async_context(CodeSandboxes(SandboxConfig()))
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
        yield boxes


@pytest.fixture(scope="session")
def judge(boxes: CodeSandboxes) -> Callable[..., Any]:
    """Score the code of an answer on tests."""

    async def score(
        code: str, tests: Any, *, entry: str | None = None, setup: str = "", language: str = "python", **settings: Any
    ) -> Judgement:
        verifier = CodeVerifier(CodeReward(type="code", **settings), boxes)
        metadata = {"tests": tests, "entry_point": entry, "setup": setup, "language": language}
        return await verifier.judge(rollout(f"```{language}\n{code}\n```", metadata))

    return score
