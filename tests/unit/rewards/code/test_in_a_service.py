"""Rewards whose programs run in a service: the same as those of this machine's sandboxes, or an error that says why."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox.conftest import missing, roll_sandbox, served
from unit.rewards.code.conftest import rollout
from unit.rewards.code.test_humaneval import DATA

from roll.config.rewards.code import CodeReward
from roll.config.sandbox import SandboxConfig
from roll.errors import ConfigError
from roll.rewards.base import Judgement, Verifier
from roll.rewards.code.sandboxes import CodeSandboxes
from roll.rewards.code.verifier import CodeVerifier
from roll.rewards.compose import Component
from roll_sandbox import (
    SandboxAccessError,
    SandboxSpec,
    SandboxUnavailableError,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

NUM_PROBLEMS = 24
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("print(int(input()) * 2)", {"tests": [{"stdin": "3", "stdout": "6"}, {"stdin": "x", "stdout": "y"}]}),
    ("def f(x): return [x, x + 1]", {"tests": [{"args": [1], "returns": [1, 2]}], "entry_point": "f"}),
    (
        "def f(x): return x",
        {"tests": "def check(f):\n    assert f(1) == 1\n    assert f(2) == 3\n", "entry_point": "f"},
    ),
    ("while True: pass", {"tests": [{"stdin": "", "stdout": ""}]}),
    ("def f(:", {"tests": [{"stdin": "", "stdout": ""}]}),
    ("x = bytearray(2**31)", {"tests": [{"stdin": "", "stdout": ""}]}),
    ("open('/etc/shadow')", {"tests": [{"stdin": "", "stdout": ""}]}),
]
"""Answers, and the tests of their prompts."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str, str]]:
    """Its address, a token, and its database."""
    if reason := missing("service"):
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("service")
    with served(directory, "--warm", "0") as (url, token):
        yield url, token, f"sqlite:///{directory}/sandboxes.db"


async def judgements(config: SandboxConfig) -> list[Judgement]:
    """Of correct and incorrect answers to the same prompts, wherever programs run."""
    async with CodeSandboxes(config) as boxes:
        verifier = CodeVerifier(CodeReward(type="code", min_cpu_s=2.0, max_cpu_s=2.0), boxes)
        work = [
            verifier.judge(rollout(f"```python\n{code}\n```", row, f"t/{i}")) for i, (code, row) in enumerate(TASKS)
        ]
        if DATA.is_file():
            with gzip.open(DATA, "rt") as file:
                rows = [json.loads(next(file)) for _ in range(NUM_PROBLEMS)]
            humaneval = CodeVerifier(CodeReward(type="code", tests_key="test", setup_key="prompt"), boxes)
            bodies = [row["canonical_solution"] if i % 3 else "    return 0\n" for i, row in enumerate(rows)]
            work += [
                humaneval.judge(rollout(f"```python\n{row['prompt']}{body}\n```", row, row["task_id"]))
                for row, body in zip(rows, bodies, strict=True)
            ]
        return list(await asyncio.gather(*work))


async def test_code_reward_service_rewards_are_those_of_this_machine(
    service: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, token, _ = service
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", token)
    here, there = await judgements(SandboxConfig(warm=0)), await judgements(SandboxConfig(url=url, warm=0))
    assert there == here
    assert {judgement.value for judgement in here[: len(TASKS)]} == {0.0, 1.0}


async def test_code_reward_service_without_a_token_or_a_service_the_message_says_what_to_do(
    service: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = service[0]
    monkeypatch.delenv("ROLL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"ROLL_SANDBOX_TOKEN, which must contain the token .* is not set"):
        CodeSandboxes(SandboxConfig(url=url))
    monkeypatch.setenv("ELSEWHERE", "roll_wrong")
    with pytest.raises(SandboxAccessError, match="rejected the token"):
        await CodeSandboxes(SandboxConfig(url=url, token_env="ELSEWHERE")).__aenter__()
    with pytest.raises(SandboxUnavailableError, match="cannot reach a sandbox service"):
        await CodeSandboxes(SandboxConfig(url="http://127.0.0.1:9", token_env="ELSEWHERE")).__aenter__()
    with pytest.raises(ConfigError, match="does not exist"):
        CodeSandboxes(SandboxConfig(url=url, token_env="ELSEWHERE", ca_file=str(tmp_path / "none.pem")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "ftp://x"}, "is not a valid URL"),
        ({"url": "http://u:secret@x"}, "only scheme, host, port and path"),
        ({"url": "http://x", "runtime": "docker"}, "service determines the runtime"),
        ({"ca_file": "x.pem"}, "ca_file is supported only with a service"),
    ],
)
async def test_code_reward_service_what_cannot_be_meant_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SandboxConfig.model_validate(settings)
    assert "secret" not in str(raised.value.errors(include_input=False))


async def test_code_reward_service_a_token_that_is_revoked_in_mid_run_ends_the_run(
    service: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _, database = service
    token = roll_sandbox("token", "create", "brief", "--database", database)
    monkeypatch.setenv("ROLL_SANDBOX_TOKEN", token)
    async with CodeSandboxes(SandboxConfig(url=url, warm=0)) as boxes:
        config = CodeReward(type="code")
        verifier = CodeVerifier(config, boxes)
        component = Component(
            name="code", config=config, verifier=Verifier(judge=verifier.judge, decides_correctness=True)
        )
        code, row = TASKS[0]
        answer = rollout(f"```python\n{code}\n```", row)
        assert (await component.judge(answer)).value == 0.0
        roll_sandbox("token", "revoke", token.split("_")[1], "--database", database)
        running = asyncio.create_task(boxes.run(_sleeping()))
        with pytest.raises(SandboxAccessError, match="expired or revoked"):
            await running
        with pytest.raises(SandboxAccessError, match="expired or revoked"):
            await component.judge(answer)  # no failure of this answer alone: nothing can be judged any more


def _sleeping() -> Any:
    from roll_sandbox import PythonCode

    return PythonCode(source="import time; time.sleep(60)", wall_s=60.0)


async def test_code_reward_service_where_the_quota_is_reached_a_run_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if reason := missing("service"):
        pytest.skip(reason)
    with served(tmp_path, "--warm", "0", "--owner-sandboxes", "1") as (url, token):
        monkeypatch.setenv("ROLL_SANDBOX_TOKEN", token)
        async with CodeSandboxes(SandboxConfig(url=url, warm=0)) as boxes:
            spec = SandboxSpec()
            held = await boxes._manager.create(spec)
            waiting = asyncio.create_task(boxes._manager.create(spec))
            while "Retrying for 60 s." not in caplog.text:
                await asyncio.sleep(0.01)
            await held.close()
            await (await waiting).close()
