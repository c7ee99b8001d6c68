"""Environments made for `verifiers`, with the real library where it is installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from roll.envs.adapters import verifiers as adapter
from roll.envs.registration import make
from roll.errors import ConfigError


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with an environment of several turns."""
    pytest.importorskip("verifiers.clients.client")
    import verifiers as vf
    from datasets import Dataset
    from verifiers.envs.multiturn_env import MultiTurnEnv

    class Guessing(MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": f"not {messages[-1].content}"}]

        @vf.stop
        async def guessed(self, state: Any) -> bool:
            return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    def right(completion: Any, answer: str, **kwargs: Any) -> float:
        return float(completion[-1].content == answer)

    def load_environment(max_turns: int = 3) -> Any:
        rows = [{"prompt": [{"role": "user", "content": f"guess {n}"}], "answer": str(n)} for n in range(4)]
        return Guessing(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=max_turns)

    module = ModuleType("guessing_env")
    module.load_environment = load_environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "guessing_env", module)
    return "verifiers:guessing-env"


async def test_env_verifiers_an_episode_is_the_librarys_own_rollout_step_by_step(guessing: str) -> None:
    env = make(guessing)
    assert (await env.reset(2))[0] == "guess 2"
    assert (await env.step("7"))[:4] == ("not 7", 0.0, False, False)
    _, reward, ended, *_, info = await env.step("2")
    assert (reward, ended, info["metrics"]["right"]) == (1.0, True, 1.0)
    assert (await env.reset(5))[0] == "guess 1"
    for _ in range(3):
        _, reward, ended, *_ = await env.step("\ud800")
    assert (reward, ended) == (0.0, True)
    await env.reset()
    await env.close()
    await env.close()
    with pytest.raises(ConfigError, match="verifiers:missing-env"):
        make("verifiers:missing-env")


def test_env_verifiers_a_library_of_agent_programs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ModuleType("verifiers")
    later.__version__ = "0.4.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", later)
    with pytest.raises(ConfigError, match=r"verifiers 0\.4\.0 has no environments with `step`"):
        adapter.make("anything")
