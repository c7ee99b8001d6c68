"""Published agents with default options, at the endpoint before a scripted model: each edits a file and finishes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
from worlds.agents import Speaker, draw_of, request_of, samples, seen
from worlds.extras import extra_directory
from worlds.published_templates import published_tokenizer

from roll.agents.agent_loop import open_agent_loop
from roll.config.agents import AgentConfig
from roll.config.sandbox import SandboxConfig
from roll.data import ChatRenderer

pytestmark = pytest.mark.extras

HERE = Path(__file__).parent / "agents"
MAX_CONTEXT = 32768
Sample: TypeAlias = tuple[list[int], list[int], list[float]]
"""A context, tokens of the model, and their log-probs."""
ASIDE = "A title"
"""What the model says where it is asked beside the task."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A published agent.

    Attributes:
        extra: the environment that has it.
        command: how its users start it: a line for the shell, in which `{extra}` and `{here}` are directories.
        says: what the model answers, one turn after the other; `{work}` is where it works.
        hears: what the engine is given between two of these answers, in a part of its words.
        variables: of its environment.
        files: in its directory.
        stop: text at which its answers are cut.
        train: what is trained of its rollout.
        num_branches: of what is trained; each has a context of its own.
        num_asides: requests beside the task, which are not trained.
        has_tools: whether the template is given tools.
    """

    extra: str
    command: str
    says: list[str]
    hears: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    stop: str = ""
    train: Literal["main_chain", "all"] = "main_chain"
    num_branches: int = 1
    num_asides: int = 0
    has_tools: bool = True


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


NPM = "{extra}/node_modules/.bin"
TASK = "Change two to three in notes.txt."
DONE = "Done: two is three now."
CODEX = " ".join(
    [
        f"{NPM}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox",
        "-c model_provider=roll -c model_providers.roll.name=roll -c model_providers.roll.wire_api=responses",
        "-c model_providers.roll.base_url=$OPENAI_BASE_URL -c model_providers.roll.env_key=OPENAI_API_KEY -",
    ]
)
OPENCODE = {
    "model": "roll/policy",
    "provider": {
        "roll": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {"name": "policy"}},
        }
    },
}
RISK = {"security_risk": "LOW", "summary": "work"}
HANDS_SAY = [
    call("terminal", command="cat notes.txt", **RISK),
    call("file_editor", command="str_replace", path="{work}/notes.txt", old_str="two", new_str="three", **RISK),
    call("finish", message=DONE),
]
HANDS_HEAR = ["one\ntwo\n", "has been edited"]
AGENTS = {
    "claude-code": Agent(
        extra="coding-agents",
        command=f"{NPM}/claude -p --dangerously-skip-permissions",
        variables={"IS_SANDBOX": "1"},  # without it, root may not skip the questions
        says=[
            call("Bash", command="ls", description="List the files"),
            call("Read", file_path="{work}/notes.txt"),
            call("Edit", file_path="{work}/notes.txt", old_string="two", new_string="three"),
            DONE,
        ],
        hears=["marigold.txt", "two\n", "updated successfully"],
    ),
    "codex": Agent(
        extra="coding-agents",
        command=CODEX,
        says=[
            call("exec", input='text(await tools.exec_command({cmd: "cat notes.txt"}));'),
            call("exec", input='text(await tools.exec_command({cmd: "sed -i s/two/three/ notes.txt"}));'),
            DONE,
        ],
        hears=['"output":"one\\ntwo', '"output":""'],
    ),
    "qwen-code": Agent(
        extra="coding-agents",
        command=f"{NPM}/qwen --yolo --auth-type openai",
        variables={"OPENAI_MODEL": "policy"},
        says=[
            call("run_shell_command", command="ls", description="List", is_background=False),
            call("read_file", file_path="{work}/notes.txt"),
            call("edit", file_path="{work}/notes.txt", old_string="two", new_string="three"),
            DONE,
        ],
        hears=["marigold.txt", "one\ntwo\n", "has been updated"],
    ),
    "opencode": Agent(
        extra="coding-agents",
        command=f"{NPM}/opencode run -m roll/policy",
        files={"opencode.json": json.dumps(OPENCODE)},
        says=[
            call("bash", command="ls", description="List the files"),
            call("read", filePath="{work}/notes.txt"),
            call("edit", filePath="{work}/notes.txt", oldString="two", newString="three"),
            DONE,
        ],
        hears=["marigold.txt", "2: two\n", "Edit applied successfully"],
        num_asides=1,  # the title
    ),
    "mini-swe-agent": Agent(
        extra="mini-swe-agent",
        command='{extra}/bin/mini -y --exit-immediately -m openai/policy -t "$ROLL_TASK"',
        variables={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
        says=[
            "I look. " + call("bash", command="cat notes.txt"),
            "I edit. " + call("bash", command="sed -i s/two/three/ notes.txt"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        hears=["one\\ntwo", '"output": ""'],
    ),
    "smolagents-code": Agent(
        extra="smolagents",
        command="{extra}/bin/python {here}/with_smolagents.py code",
        says=[
            "Thought: edit it.\n<code>\nprint(edit('two', 'three'))\n</code>",
            "Thought: done.\n<code>\nfinal_answer('done')\n</code>",
        ],
        hears=["edited"],
        stop="</code>",
        has_tools=False,
    ),
    "smolagents-tools": Agent(
        extra="smolagents",
        command="{extra}/bin/python {here}/with_smolagents.py tools",
        says=[call("edit", old="two", new="three"), call("final_answer", answer="done")],
        hears=["Observation:\nedited"],
        train="all",  # it writes its calls anew, as text
        num_branches=2,
    ),
    "openhands-chat": Agent(
        extra="openhands",
        command="{extra}/bin/python {here}/with_openhands.py openai",
        says=HANDS_SAY,
        hears=HANDS_HEAR,
    ),
    "openhands-messages": Agent(
        extra="openhands",
        command="{extra}/bin/python {here}/with_openhands.py anthropic",
        says=HANDS_SAY,
        hears=HANDS_HEAR,
    ),
}


def script(agent: Agent, work: Path) -> Callable[[str], str]:
    """What the model says to a context: the next of the agent's turns, or a title where it is asked for one."""
    left = [said.replace("{work}", str(work)) for said in agent.says]

    def say(context: str) -> str:
        aside = agent.has_tools and "# Tools" not in context
        return ASIDE if aside or not left else left.pop(0)

    return say


def _texts(speaker: Speaker) -> list[tuple[str, str]]:
    """What the engine was given, and what it said, by request."""
    pairs = zip(speaker.requests, speaker.generations, strict=True)
    return [(speaker.renderer.decode_raw(r.token_ids), speaker.renderer.decode(g.token_ids)) for r, g in pairs]


def _until(stop: str, sample: Sample, speaker: Speaker) -> Sample:
    """What is recorded of a sample: all of it, or nothing after the tokens that say the stop text."""
    context, said, logprobs = sample
    lengths = range(1, len(said) + 1)
    texts = (speaker.renderer.decode(np.asarray(said[:length], np.int32)) for length in lengths)
    length = next((length for length, text in zip(lengths, texts, strict=True) if stop and stop in text), len(said))
    return context, said[:length], logprobs[:length]


@pytest.mark.parametrize("name", sorted(AGENTS))
async def test_extras_agent_edit_a_file_and_their_chains_are_what_the_engine_saw(
    name: str, default_model: Path, tmp_path: Path
) -> None:
    agent = AGENTS[name]
    extra = extra_directory(agent.extra)
    work, home = tmp_path / "work", tmp_path / "home"
    for directory in (work, home):
        directory.mkdir()
    for file, text in {"notes.txt": "one\ntwo\n", "marigold.txt": "", **agent.files}.items():
        (work / file).write_text(text)
    tokenizer = published_tokenizer(default_model, "qwen3")
    end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    speaker = Speaker(ChatRenderer(tokenizer), script(agent, work), end=end, by_letter=True)
    line = agent.command.format(extra=extra, here=HERE)
    config = AgentConfig(
        command=["sh", "-c", f"cd {work} && {line}"],
        environment={"HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True", **agent.variables},
        limits={"time_s": 500.0},
        train=agent.train,
    )
    draw = draw_of(speaker.renderer, TASK)
    async with open_agent_loop(config, SandboxConfig(warm=0), max_context=MAX_CONTEXT) as loop:
        request = request_of(draw.token_ids, end=end, max_new_tokens=4096)
        rollout = await loop(draw, 0, request, speaker.generate, speaker.renderer)
    assert (work / "notes.txt").read_text() == "one\nthree\n"
    assert rollout.finish_reason == "stop"
    texts = _texts(speaker)
    turns = [turn for turn in texts if turn[1] != ASIDE]
    assert [said for _, said in turns] == [text.replace("{work}", str(work)) for text in agent.says]
    assert turns[0][0].count(TASK) == 1
    for (before, said), (after, _), heard in zip(turns, turns[1:], agent.hears, strict=False):
        assert after.count(heard) > (before + said).count(heard), f"the engine is not given {heard!r}"
    assert (len(turns) - 1, len(texts) - len(turns)) == (len(agent.hears), agent.num_asides)
    of_task = [sample for sample, (_, said) in zip(seen(speaker), texts, strict=True) if said != ASIDE]
    assert sorted(samples(rollout)) == sorted(_until(agent.stop, sample, speaker) for sample in of_task)
    assert len(rollout.branches) == agent.num_branches
