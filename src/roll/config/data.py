"""Prompt sources and their mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Tag, field_validator, model_validator

from roll.config.base import Section, option, path_option
from roll.config.episodes import HistoryConfig
from roll.config.hosting import Hosting
from roll.config.rewards import (
    CodeReward,
    EnvironmentReward,
    RewardConfig,
    RewardList,
    as_reward_list,
    check_pattern,
)
from roll.config.sources import ConversationColumns, FileTable, HuggingFaceTable, PythonTable, Share, SumsTask
from roll.config.tools import ToolCallsConfig, ToolConfig, ToolList, as_tool_list, tool_arguments

if TYPE_CHECKING:
    from roll.types import EnvironmentSettings

__all__ = [
    "ArithmeticData",
    "DataConfig",
    "EnvironmentData",
    "FileData",
    "FunctionsData",
    "GuessNumberData",
    "HuggingFaceData",
    "PythonData",
    "ReasoningGymData",
]


class _Scored(Section):
    reward: RewardList = option(
        ..., "How answers are scored: a reward's type, its settings, or a weighted list.", examples=["math"]
    )
    weight: float = option(1.0, "Share of each step's prompts, relative to the other sources.", gt=0)


class _Source(Share, _Scored):
    @field_validator("reward", mode="before", json_schema_input_type=str | RewardConfig | list[str | RewardConfig])
    @classmethod
    def _reward(cls, value: Any) -> Any:
        return as_reward_list(value)

    @property
    def turns(self) -> int:
        """Maximum number of answers in one rollout."""
        return 1

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """Name and options of the environment that responds between two answers; `None` if a rollout is one answer."""
        return None

    @property
    def opens_itself(self) -> bool:
        """Whether the environment provides the prompt when the episode begins."""
        return False

    @property
    def has_demonstrations(self) -> bool:
        """Whether prompts may have an expert's answer."""
        return False


class _Split(_Source):
    held_out: float = option(
        0.1,
        "Share of the source kept for evaluation alone (unless a separate `split` or file is given).",
        ge=0,
        lt=1,
    )


class ArithmeticData(SumsTask, _Source):
    """Seeded sums such as `3 + 4`; training and held-out operand pairs are disjoint."""


class FunctionsData(_Split):
    """Tiny programming tasks such as `add_3(x)`, each with hidden cases."""

    source: Literal["functions"] = option(..., "Name of the source.")
    reward: RewardList = option([CodeReward(type="code")], "How answers are scored; by running them.")
    num_constants: int = option(20, "Constants that every kind of function comes with, from 2 on.", ge=1, le=1000)
    num_cases: int = option(6, "Hidden cases of each task.", ge=1, le=100)
    held_out: float = option(0.3, "Share of the tasks kept for evaluation.", ge=0, lt=1)


class GuessNumberData(_Source):
    """A game of several turns: guess a number, get `higher` or `lower`, guess again."""

    source: Literal["guess_number"] = option(..., "Name of the source.")
    reward: RewardList = option([EnvironmentReward(type="environment")], "How episodes are scored.")
    max_number: int = option(5, "The number lies between 1 and this.", ge=2)
    num_turns: int = option(2, "Guesses.", ge=1)
    demonstrations: bool = option(
        False, "Every prompt brings the guesses of an expert, which halves the range each time, to be imitated."
    )

    @property
    def turns(self) -> int:
        """See the base class."""
        return self.num_turns

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """See the base class."""
        return "guess_number", {"max_number": self.max_number, "num_turns": self.num_turns}

    @property
    def has_demonstrations(self) -> bool:
        """See the base class."""
        return self.demonstrations


class EnvironmentData(Hosting, _Source):
    """Episodes in an environment: a built-in one by its id, or your own class with GEM's `reset` and `step`.

    The first observation is the prompt. Episode N begins with `reset(seed=N)` for all rollouts of a group; training and
    evaluation have no seed in common.
    """

    source: Literal["environment"] = option("environment", "Name of the source.")
    environment: str = path_option(
        ...,
        "Its id (`roll env list`), or where your class is: `package.module:Class`, or `path/to/file.py:Class`.",
        examples=["game:GuessTheNumber-v0-easy", "mazes.py:Maze"],
        min_length=1,
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the environment.")
    wrappers: list[str | dict[str, dict[str, Any]]] = option(
        [],
        "What stands around it, the first one innermost: a wrapper's name, or its name with its options.",
        examples=[[{"format_penalty": {"penalty": 0.1}}]],
    )
    tools: ToolList = option(
        [],
        "What the model may use while it acts: a tool's name, or its name under `tool` with its options; a function or "
        "class of yours by its place.",
        examples=[["calculator", {"tool": "search", "folder": "notes"}, "tools.py:lookup"]],
    )
    tool_calls: ToolCallsConfig = option(ToolCallsConfig(), "How tools are called.")
    reward: RewardList = option([EnvironmentReward(type="environment")], "How episodes are scored.")
    num_turns: int = option(1, "Answers of one episode, at most; then it ends.", ge=1)
    num_episodes: int = option(1000, "Different episodes to train on.", ge=1)
    num_held_out: int = option(100, "Further episodes, for evaluation alone.", ge=0)
    history: HistoryConfig | None = option(
        None, "What the model sees of earlier turns; by default as `rollout.episodes.history` says."
    )

    @field_validator("tools", mode="before", json_schema_input_type=list[str | ToolConfig])
    @classmethod
    def _tools(cls, value: Any) -> Any:
        return as_tool_list(value)

    @model_validator(mode="after")
    def _turns_for_tools(self) -> Self:
        if self.tools and self.num_turns == 1:
            raise ValueError("num_turns is 1, but a tool's call is a turn of its own: give num_turns of at least 2")
        if not self.tools and "tool_calls" in self.model_fields_set and self.tool_calls != ToolCallsConfig():
            raise ValueError("tool_calls says how tools are called, but there are none: name them under tools")
        return self

    @field_validator("wrappers")
    @classmethod
    def _one_each(cls, value: list[str | dict[str, dict[str, Any]]]) -> list[str | dict[str, dict[str, Any]]]:
        for entry in value:
            if isinstance(entry, dict) and len(entry) != 1:
                raise ValueError(f"a wrapper is a name, or one name with its options, got {entry}")
        return value

    @property
    def turns(self) -> int:
        """See the base class."""
        return self.num_turns

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """See the base class."""
        return self.environment, self.options

    @property
    def opens_itself(self) -> bool:
        """See the base class."""
        return True

    def settings(self, seed: int) -> EnvironmentSettings:
        """Return the settings of an episode with this seed."""
        pairs = [next(iter(entry.items())) if isinstance(entry, dict) else (entry, {}) for entry in self.wrappers]
        from roll.types import EnvironmentSettings

        return EnvironmentSettings(
            name=self.environment,
            options=self.options,
            seed=seed,
            opening=self.prompt_template,
            wrappers=tuple(pairs),
            tools=tool_arguments(self.tools, self.tool_calls),
            history=self.history.settings if self.history else None,
            host=self.host,
            url=self.url or "",
            reset_time_limit_s=self.reset_time_limit_s,
            step_time_limit_s=self.step_time_limit_s,
        )


class _Columns(ConversationColumns, _Split):
    prompt_key: str = option(
        "prompt",
        "Column with the prompt: text, or a list of chat messages; where the last one is the assistant's, the model "
        "continues it.",
    )
    answer_key: str | None = option("answer", "Column with the reference answer; `null` where rewards need none.")
    answer_pattern: str | None = option(
        None,
        "Regular expression whose first group is the reference answer inside that column (GSM8K: `#### (.+)`).",
    )
    expert_key: str | None = option(
        None,
        "Column with a demonstration, an answer as text: where a row has one and it earns a reward, it is imitated "
        "in addition to the policy's own answers (`algorithm.imitation`).",
    )
    limit: int | None = option(None, "Use only the first N rows.", ge=1)

    @property
    def has_demonstrations(self) -> bool:
        """See the base class."""
        return self.expert_key is not None

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @model_validator(mode="after")
    def _answers(self) -> Self:
        comparing = [reward.type for reward in self.reward if reward.needs_answer]
        if self.answer_key is None and comparing:
            raise ValueError(f"the reward '{comparing[0]}' compares with an answer, but answer_key is null: name it")
        return self


class FileData(FileTable, _Columns):
    """A JSONL or Parquet file."""


class HuggingFaceData(HuggingFaceTable, _Columns):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""


class PythonData(PythonTable, _Columns):
    """Rows from Python: your own function or class, or the objects given to `roll.train(config, data=…)`."""


class ReasoningGymData(_Split):
    """A generator of the `reasoning-gym` package, with its own scorer: `source: reasoning_gym:chain_sum`."""

    source: str = option(..., "`reasoning_gym:` and the task's name.", pattern=r"^reasoning_gym:[a-z0-9_]+$")
    size: int = option(1000, "How many tasks to generate.", ge=2)
    options: dict[str, Any] = option({}, "The task's own settings, as reasoning-gym names them.")
    reward: RewardList = option("reasoning_gym", "How answers are scored; by default the task's own scorer.")

    @property
    def task(self) -> str:
        """The generator's name in reasoning-gym."""
        return self.source.partition(":")[2]


def _kind(value: Any) -> str:
    source = value.get("source") if isinstance(value, dict) else getattr(value, "source", None)
    return str(source).partition(":")[0]


DataConfig = Annotated[
    Annotated[ArithmeticData, Tag("arithmetic")]
    | Annotated[EnvironmentData, Tag("environment")]
    | Annotated[FileData, Tag("file")]
    | Annotated[FunctionsData, Tag("functions")]
    | Annotated[GuessNumberData, Tag("guess_number")]
    | Annotated[HuggingFaceData, Tag("huggingface")]
    | Annotated[PythonData, Tag("python")]
    | Annotated[ReasoningGymData, Tag("reasoning_gym")],
    Discriminator(_kind),
]
