"""The files of a new run: a configuration with comments, and rows, a reward or an environment to start from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from roll.errors import UserError

__all__ = ["OWN_CODE", "PIPELINES", "REWARDS", "SAMPLE_DATA", "NewRun", "build_files", "read_column_names"]

OWN_CODE = "own"
"""Choice of a user-defined reward or environment: a file with a stub is written."""
SAMPLE_DATA = "sample"
"""Choice of sample rows: a file with sample rows is written."""
PIPELINES: Mapping[str, str] = {
    "rlvr": "reinforcement learning with rewards for sampled answers (GRPO, PPO, …)",
    "agentic": "multi-turn reinforcement learning in an environment",
    "sft": "supervised fine-tuning on conversations",
    "preference": "DPO and related losses on pairs of answers",
    "reward_model": "a reward model from pairs of answers",
    "distill": "on-policy distillation from a teacher",
    "distill_offline": "offline distillation from a teacher on existing conversations",
    "preference_online": "online DPO on pairs of sampled answers",
    "rejection_sampling": "rejection sampling: fine-tuning on the best sampled answers",
}
REWARDS: Mapping[str, str] = {
    "math": "mathematical equivalence to the reference answer",
    "exact": "exact string match with the reference answer",
    "choice": "multiple choice: match with the letter of the reference answer",
    "short_answer": "word-level F1 score against the reference answer",
    OWN_CODE: "custom function: writes a file reward.py",
}
_CONVERSATION_PIPELINES = ("sft", "distill_offline")
_PAIR_PIPELINES = ("preference", "reward_model")
_TEACHER_PIPELINES = ("distill", "distill_offline")
_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
_ANSWER_COLUMNS = ("answer", "solution", "target", "label", "output", "response")


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """The choices for a new run.

    Attributes:
        pipeline: a key of `PIPELINES`.
        name: name of the run, and of its directory below `runs/`.
        model: a directory, a Hub ID, or a name from the catalog.
        data: path of a JSONL or Parquet file, relative to the configuration's directory, or `SAMPLE_DATA`.
        columns: names of the columns of `data`; empty for `SAMPLE_DATA`.
        reward: a key of `REWARDS`, or `FILE.py:FUNCTION`, with the path relative to the configuration's directory.
        teacher: a directory, a Hub ID or a run, for pipelines that distill.
        environment: id or import path of an environment, or `OWN_CODE`, for the pipeline `agentic`.
    """

    pipeline: str
    name: str
    model: str
    data: str = SAMPLE_DATA
    columns: Sequence[str] = ()
    reward: str = "math"
    teacher: str | None = None
    environment: str = OWN_CODE

    @property
    def needs_data(self) -> bool:
        """True if the pipeline reads rows of data; agentic runs get episodes from an environment instead."""
        return self.pipeline != "agentic"

    @property
    def needs_reward(self) -> bool:
        """True if the pipeline scores the model's answers with a configured reward."""
        return self.pipeline in ("rlvr", "preference_online", "rejection_sampling")

    @property
    def needs_teacher(self) -> bool:
        """True if the pipeline distills from a teacher."""
        return self.pipeline in _TEACHER_PIPELINES


def read_column_names(path: Path) -> list[str]:
    """Return the column names of a JSONL or Parquet file; for JSONL, the keys of the first row.

    Raises:
        UserError: the file cannot be read, has no rows, or is not JSONL or Parquet.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return list(pyarrow.parquet.read_schema(path).names)
        if path.suffix not in (".jsonl", ".json"):
            raise UserError(f"--data must be a .jsonl or .parquet file, got '{path}'.")
        with path.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), "")
        row = json.loads(first) if first else None
    except (OSError, ValueError) as error:
        raise UserError(f"--data '{path}' cannot be read: {error}. Expected a JSONL or Parquet file.") from None
    if not isinstance(row, dict):
        raise UserError(f"--data '{path}' must have one JSON object per line; the first line is {first[:40]!r}.")
    return list(row)


def build_files(run: NewRun) -> dict[str, str]:
    """Return the content of each file to write, by file name.

    Raises:
        UserError: no column has one of the names that ROLL knows for prompts.
    """
    files = {"config.yaml": _format_configuration(run)}
    if run.needs_data and run.data == SAMPLE_DATA:
        files["data.jsonl"] = "".join(json.dumps(row) + "\n" for row in _build_sample_rows(run.pipeline))
    if run.needs_reward and run.reward == OWN_CODE:
        files["reward.py"] = _REWARD_FILE
    if run.pipeline == "agentic" and run.environment == OWN_CODE:
        files["environment.py"] = _ENVIRONMENT_FILE
    return files


def _format_configuration(run: NewRun) -> str:
    """Return the text of config.yaml, with a comment for each key that a user is likely to change."""
    lines = [
        f"# Written by `roll init`: {PIPELINES[run.pipeline]}.",
        "# `roll check config.yaml` checks it; `roll train config.yaml` trains; `roll config explain KEY` explains it.",
        f"pipeline: {run.pipeline}",
        f"name: {_quote(run.name)}  # the run's directory is runs/{run.name}",
        f"model: {_quote(run.model)}  # a directory, a Hub ID, or a name from the catalog",
    ]
    if run.teacher:
        lines.append(f"teacher: {_quote(run.teacher)}  # a run, a directory or a Hub ID; it must share the tokenizer")
    lines += ["", *(_format_environment(run) if run.pipeline == "agentic" else _format_data(run)), ""]
    lines += _format_sections(run.pipeline)
    return "\n".join(lines) + "\n"


def _format_data(run: NewRun) -> list[str]:
    path = "data.jsonl" if run.data == SAMPLE_DATA else run.data
    lines = ["data:", "  - source: file", f"    path: {_quote(path)}  # JSONL or Parquet"]
    if run.pipeline in _CONVERSATION_PIPELINES + _PAIR_PIPELINES:
        return [*lines, "    held_out: 0.1  # fraction of the rows that is kept for evaluation"]
    prompt = _choose_column(run, _PROMPT_COLUMNS)
    if prompt is None:
        raise UserError(
            f"cannot determine the prompt column of --data '{run.data}' (columns: {', '.join(run.columns)}): rename "
            f"it to 'prompt', or use --data {SAMPLE_DATA} and set data.0.path and data.0.prompt_key."
        )
    answer = _choose_column(run, _ANSWER_COLUMNS)
    lines += [
        f"    prompt_key: {_quote(prompt)}  # column with the prompt: text, or a list of chat messages",
        f"    answer_key: {_quote(answer) if answer else 'null'}  # column with the reference answer; null for none",
        "    held_out: 0.1  # fraction of the rows that is kept for evaluation",
    ]
    if not run.needs_reward:
        return [*lines, "    reward: math  # only for the evaluation: the loss comes from the teacher"]
    if run.reward == OWN_CODE or run.reward not in REWARDS:
        function = "reward.py:score" if run.reward == OWN_CODE else run.reward
        reward = f"{{type: python, function: {json.dumps(function)}, require_finished: true}}"
        return [*lines, f"    reward: {reward}  # a truncated answer scores 0"]
    return [
        *lines,
        f"    reward: {run.reward}  # docs/rewards.md lists other rewards, weights, and your own functions",
    ]


def _format_environment(run: NewRun) -> list[str]:
    place = "environment.py:Environment" if run.environment == OWN_CODE else run.environment
    return [
        "environments:",
        f"  - environment: {_quote(place)}  # `roll env list` shows the shipped ones",
        "    num_turns: 4  # maximum number of turns of an episode",
    ]


def _format_sections(pipeline: str) -> list[str]:
    """Return the lines of the sections after `data`: the pipeline's sections, `rollout`, `training` and
    `evaluation`."""
    own = {
        "rlvr": ["algorithm: {type: grpo}  # `roll config explain algorithm.type` lists the others"],
        "agentic": ["algorithm: {type: grpo}  # `roll config explain algorithm.type` lists the others"],
        "preference": ["preference: {type: dpo, beta: 0.1}"],
        "preference_online": ["preference: {type: dpo, beta: 0.1}"],
        "distill": ["distillation: {divergence: reverse}"],
        "rejection_sampling": ["rejection: {keep: 2, min_reward: 1.0}  # number of answers of each prompt to train on"],
    }.get(pipeline, [])
    if pipeline in _CONVERSATION_PIPELINES + _PAIR_PIPELINES:
        return [
            *own,
            "training: {num_epochs: 1, examples_per_step: 8, learning_rate: 1.0e-5}",
            "evaluation: {every_num_steps: 10}",
        ]
    return [
        *own,
        "rollout:",
        "  prompts_per_step: 8",
        "  group_size: 8  # answers to each prompt",
        "  max_new_tokens: 128  # maximum number of tokens of an answer",
        "training: {num_steps: 20, learning_rate: 1.0e-5}",
        "evaluation: {every_num_steps: 10, num_prompts: 32}",
    ]


def _choose_column(run: NewRun, known: Sequence[str]) -> str | None:
    if not run.columns:
        return known[0]
    return next((name for name in known if name in run.columns), None)


def _quote(text: str) -> str:
    """Return the text as a YAML scalar, quoted if necessary; a JSON string is valid YAML."""
    # PyYAML reads YAML 1.1, in which yes, no, on and off are booleans, and digits alone a number.
    plain = text.replace("-", "").replace("_", "").replace("/", "").replace(".", "")
    is_plain = plain.isascii() and plain.isalnum() and not plain.isdigit() and text[0].isalpha()
    return (
        text
        if is_plain and text.lower() not in ("true", "false", "null", "yes", "no", "on", "off")
        else json.dumps(text)
    )


def _build_sample_rows(pipeline: str) -> list[dict[str, object]]:
    """Return twenty sample rows with the columns that the pipeline reads."""
    sums = [(a, b) for a in range(2, 6) for b in range(3, 8)]
    if pipeline in _PAIR_PIPELINES:
        return [
            {"prompt": f"What is {a} + {b}?", "chosen": f"{a + b}", "rejected": f"It is {a + b + 1}, I believe."}
            for a, b in sums
        ]
    if pipeline in _CONVERSATION_PIPELINES:
        return [
            {
                "messages": [
                    {"role": "user", "content": f"What is {a} + {b}?"},
                    {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
                ]
            }
            for a, b in sums
        ]
    return [{"prompt": f"What is {a} + {b}? Answer with a number.", "answer": str(a + b)} for a, b in sums]


_REWARD_FILE = dedent('''\
    """The reward of this run. It can be tested without a model: `score("4", "4", {})`."""

    from collections.abc import Mapping
    from typing import Any


    def score(text: str, answer: str, metadata: Mapping[str, Any]) -> float:
        """Return the reward of an answer.

        Args:
            text: the model's answer.
            answer: the reference answer of the row.
            metadata: the other columns of the row.
        """
        return 1.0 if answer and answer in text else 0.0
    ''')
_ENVIRONMENT_FILE = dedent('''\
    """The environment of this run: find a number. Try it: `roll env play environment.py:Environment`."""

    from random import Random


    class Environment:
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
            """Return the first observation, which is the prompt; rollouts of a group get the same seed."""
            random = Random(seed)
            first = random.randint(1, 50)
            self.number, self.turns_left = random.randint(first, first + 7), 4
            return f"Guess a number between {first} and {first + 7}. Answer with the number alone.", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
            """Return the next observation, the reward, `terminated`, `truncated`, and info."""
            self.turns_left -= 1
            guess = action.strip().rstrip(".")
            if guess == str(self.number):
                return "Right.", 1.0, True, False, {}
            is_low = guess.isascii() and guess.isdecimal() and float(guess) < self.number
            return f"Try a {'higher' if is_low else 'lower'} number.", 0.0, self.turns_left == 0, False, {}
    ''')
