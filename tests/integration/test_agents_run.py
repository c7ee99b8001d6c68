"""Whole runs whose rollouts are made by agent programs that know nothing of training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chaos.harness import tiny_config
from pyarrow import parquet
from worlds.tiny_model import write_tiny_model

import roll

AGENTS = Path(__file__).parents[2] / "examples" / "agents"

FORKS = """
import asyncio, aiohttp

async def agent(task, base_url, api_key):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        async def ask(*messages):
            async with http.post(base_url + "/chat/completions", json={"model": "m", "messages": messages}) as response:
                return (await response.json())["choices"][0]["message"]

        def user(text):
            return {"role": "user", "content": text}

        begun = [user(task.text), await ask(user(task.text))]
        await asyncio.gather(ask(*begun, user("One?")), ask(*begun, user("Two?")))  # the second of them is a fork
        helped = await ask(user("Help."))
        second = await ask(*begun, user(helped["content"]))
        return (await ask(user("In short: " + second["content"])))["content"]  # in place of all turns so far
"""


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for an agent's contexts, in which every byte is a token."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "roomy", context_length=4096)


def trained(directory: Path, model: Path, agent: dict[str, Any], **rollout: Any) -> list[dict[str, Any]]:
    """The steps of a run of two."""
    config = {
        **tiny_config(model, num_steps=2),
        "output_dir": str(directory),
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 6, "agent": agent, **rollout},
        "inference": {"engine": "hf", "options": {"admission": "continuous"}},
        "evaluation": {"every_num_steps": 0, "num_prompts": 2, "samples_per_prompt": 1},
        "checkpoint": {"at_end": False},
    }
    roll.train(config)
    rows = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


def check(steps: list[dict[str, Any]]) -> None:
    """Every step trained, and the trainer computed the log-probs that the engine had: the contexts were the same."""
    assert [step["step"] for step in steps] == [1, 2]
    stepped = [step for step in steps if step["training/stepped"]]
    assert stepped
    assert max(step["agreement/logprob_mean_abs"] for step in stepped) <= 1e-4


def recorded(directory: Path, column: str) -> list[Any]:
    files = sorted((directory / "run" / "rollouts").glob("*.parquet"))
    return [value for file in files for value in parquet.read_table(file).to_pydict()[column]]


def test_agent_run_an_agent_with_openais_client_trains(tmp_path: Path, roomy_model: Path) -> None:
    pytest.importorskip("openai")
    check(trained(tmp_path, roomy_model, {"function": f"{AGENTS / 'with_openai.py'}:agent"}))


def test_agent_run_forks_sub_agents_and_compacted_histories_are_trained_after_what_the_engine_saw(
    tmp_path: Path, roomy_model: Path
) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    check(trained(tmp_path, roomy_model, {"function": f"{tmp_path / 'forks.py'}:agent", "train": "all"}))
    branches = recorded(tmp_path, "branches")
    assert branches and all(len(each) == 4 for each in branches)  # two forks, the helper, what was compacted


@pytest.mark.slow
def test_agent_run_an_agent_of_a_published_framework_trains(tmp_path: Path, roomy_model: Path) -> None:
    pytest.importorskip("agents", reason="openai-agents is not installed")
    check(trained(tmp_path, roomy_model, {"function": f"{AGENTS / 'with_agents_sdk.py'}:agent"}))


@pytest.mark.slow
def test_agent_run_a_shell_program_in_a_sandbox_trains(tmp_path: Path, roomy_model: Path) -> None:
    if not shutil.which("bwrap"):
        pytest.skip("there is no bubblewrap here")
    agent = {
        "command": ["sh", "ask_twice.sh"],
        "sandbox": True,
        "files": {"ask_twice.sh": str(AGENTS / "ask_twice.sh")},
        "limits": {"time_s": 60.0},
    }
    check(trained(tmp_path, roomy_model, agent))
    assert all(text.startswith('"') for text in recorded(tmp_path, "text"))
