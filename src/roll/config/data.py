"""Prompt sources, and their weights in the data mix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Tag, field_validator, model_validator

from roll.config.base import Section, option, path_option
from roll.config.environment_host import HostingConfig
from roll.config.episodes import HistoryConfig
from roll.config.rewards import (
    CodeReward,
    EnvironmentReward,
    RewardConfig,
    RewardList,
    check_pattern,
    expand_rewards,
)
from roll.config.sources import ConversationColumns, DataEntryBase, FileTable, HuggingFaceTable, PythonTable, SumsTask
from roll.config.tools import ToolCallsConfig, ToolConfig, ToolList, build_tool_arguments, expand_tools

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


class _ScoredDataConfig(Section):
    reward: RewardList = option(
        ...,
        "Rewards that score the answers: a reward type, a section, or a list of reward types and sections. The total "
        "reward is their weighted sum.",
        examples=["math"],
    )
    weight: float = option(1.0, "Sampling weight of the source, relative to the other sources.", gt=0)


class _Source(DataEntryBase, _ScoredDataConfig):
    device_class: str | None = option(
        None,
        "Class in `cluster.device_classes` whose engines generate the answers of this source; engines of other classes "
        "are used only if all engines of the class are full. `prefill_heavy`: the class with the most FLOP/s for its "
        "price, for long prompts and short answers. `decode_heavy`: the class with the most memory bandwidth for its "
        "price, for long answers. `measured`: the class with the lowest measured price per token. By default, all "
        "engines are used equally.",
        examples=["decode_heavy"],
    )

    @field_validator("reward", mode="before", json_schema_input_type=str | RewardConfig | list[str | RewardConfig])
    @classmethod
    def _expand_reward(cls, value: Any) -> Any:
        return expand_rewards(value)

    @property
    def turns(self) -> int:
        """Maximum number of answers in one rollout."""
        return 1

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """Name and options of the environment that responds between two answers; `None` if a rollout has one answer."""
        return None

    @property
    def environment_provides_prompt(self) -> bool:
        """True if the environment provides the prompt when the episode begins."""
        return False

    @property
    def has_demonstrations(self) -> bool:
        """True if prompts may have an expert's answer."""
        return False


class _SplitSource(_Source):
    held_out: float = option(
        0.1,
        "Fraction of the source that is reserved for evaluation. It is ignored if the source has a separate split or "
        "file for evaluation.",
        ge=0,
        lt=1,
    )


class ArithmeticData(SumsTask, _Source):
    """Seeded sums such as `3 + 4`; training and held-out operand pairs are disjoint."""


class FunctionsData(_SplitSource):
    """Small programming tasks such as `add_3(x)`, each with hidden test cases."""

    source: Literal["functions"] = option(..., "Name of the source.")
    reward: RewardList = option(
        [CodeReward(type="code")], "Rewards that score the answers; by default, the answers are run on the test cases."
    )
    num_constants: int = option(
        20, "Number of constants for each type of function, starting at 2: `add_2`, `add_3`, and so on.", ge=1, le=1000
    )
    num_cases: int = option(6, "Number of hidden test cases of each task.", ge=1, le=100)
    held_out: float = option(0.3, "Fraction of the tasks that is reserved for evaluation.", ge=0, lt=1)


class GuessNumberData(_Source):
    """A game of several turns: the model guesses a number, gets `higher` or `lower`, and guesses again."""

    source: Literal["guess_number"] = option(..., "Name of the source.")
    reward: RewardList = option([EnvironmentReward(type="environment")], "Rewards that score the episodes.")
    max_number: int = option(5, "Largest number; the smallest is 1.", ge=2)
    num_turns: int = option(2, "Maximum number of guesses.", ge=1)
    demonstrations: bool = option(
        False, "Whether every prompt has a demonstration by an expert that uses binary search."
    )

    @property
    def turns(self) -> int:
        """Maximum number of guesses in one rollout."""
        return self.num_turns

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """Name and options of the game."""
        return "guess_number", {"max_number": self.max_number, "num_turns": self.num_turns}

    @property
    def has_demonstrations(self) -> bool:
        """True if every prompt has an expert's guesses."""
        return self.demonstrations


class EnvironmentData(HostingConfig, _Source):
    """Episodes in an environment: a built-in environment, or your own class with GEM's `reset` and `step`.

    The first observation is the prompt. Episode N begins with `reset(seed=N)` for all rollouts of a group; training and
    evaluation have no seed in common.
    """

    source: Literal["environment"] = option("environment", "Name of the source.")
    environment: str = path_option(
        ...,
        "Id of a built-in environment (`roll env list`), or import path of your own class: `package.module:Class` or "
        "`path/to/file.py:Class`.",
        examples=["game:GuessTheNumber-v0-easy", "mazes.py:Maze"],
        min_length=1,
    )
    options: dict[str, Any] = option({}, "Keyword arguments of the environment.")
    wrappers: list[str | dict[str, dict[str, Any]]] = option(
        [],
        "Wrappers of the environment; the first one is the innermost. Each entry is a wrapper's name, or its name "
        "with options.",
        examples=[[{"format_penalty": {"penalty": 0.1}}]],
    )
    tools: ToolList = option(
        [],
        "Tools that the model may call. Each entry is a tool's name, a section with the name (key `tool`) and its "
        "options, or the import path of your own function or class.",
        examples=[["calculator", {"tool": "search", "folder": "notes"}, "tools.py:lookup"]],
    )
    tool_calls: ToolCallsConfig = option(ToolCallsConfig(), "Format and limits of tool calls.")
    reward: RewardList = option([EnvironmentReward(type="environment")], "Rewards that score the episodes.")
    num_turns: int = option(1, "Maximum number of answers in one episode; the episode ends after the last one.", ge=1)
    num_episodes: int = option(1000, "Number of different episodes to train on.", ge=1)
    num_held_out: int = option(100, "Number of additional episodes that are reserved for evaluation.", ge=0)
    history: HistoryConfig | None = option(
        None, "How earlier turns appear in the context; by default `rollout.episodes.history`."
    )

    @field_validator("tools", mode="before", json_schema_input_type=list[str | ToolConfig])
    @classmethod
    def _expand_tools(cls, value: Any) -> Any:
        return expand_tools(value)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tools and self.num_turns == 1:
            raise ValueError("num_turns must be >= 2 with tools, because a tool call is a separate turn, got 1")
        if not self.tools and "tool_calls" in self.model_fields_set and self.tool_calls != ToolCallsConfig():
            raise ValueError("tool_calls requires tools: list them under `tools`, or remove tool_calls")
        return self

    @field_validator("wrappers")
    @classmethod
    def _check_wrappers(cls, value: list[str | dict[str, dict[str, Any]]]) -> list[str | dict[str, dict[str, Any]]]:
        for entry in value:
            if isinstance(entry, dict) and len(entry) != 1:
                raise ValueError(f"a wrapper must be a name, or one name with options, got {entry}")
        return value

    @property
    def turns(self) -> int:
        """Maximum number of answers in one episode."""
        return self.num_turns

    @property
    def environment_call(self) -> tuple[str, dict[str, Any]] | None:
        """Name and options of the environment."""
        return self.environment, self.options

    @property
    def environment_provides_prompt(self) -> bool:
        """Always true: the first observation is the prompt."""
        return True

    def build_settings(self, seed: int) -> EnvironmentSettings:
        """Build the environment settings of the episode with a given seed."""
        pairs = [next(iter(entry.items())) if isinstance(entry, dict) else (entry, {}) for entry in self.wrappers]
        from roll.types import EnvironmentSettings

        return EnvironmentSettings(
            name=self.environment,
            options=self.options,
            seed=seed,
            opening=self.prompt_template,
            wrappers=tuple(pairs),
            tools=build_tool_arguments(self.tools, self.tool_calls),
            history=self.history.settings if self.history else None,
            host=self.host,
            url=self.url or "",
            reset_time_limit_s=self.reset_time_limit_s,
            step_time_limit_s=self.step_time_limit_s,
        )


class _ColumnSource(ConversationColumns, _SplitSource):
    prompt_key: str = option(
        "prompt",
        "Column with the prompt: text, or a list of chat messages. If the last message is from the assistant, the "
        "model continues it.",
    )
    answer_key: str | None = option("answer", "Column with the reference answer; `null` if no reward needs one.")
    answer_pattern: str | None = option(
        None,
        "Regular expression that extracts the reference answer from the column `answer_key`: its first group is the "
        "answer (GSM8K: `#### (.+)`).",
    )
    expert_key: str | None = option(
        None,
        "Column with a demonstration: the text of an expert's answer. The policy is trained on "
        "demonstrations with a positive reward in addition to its own answers (`algorithm.imitation`).",
    )
    limit: int | None = option(None, "Use only the first N rows.", ge=1)

    @property
    def has_demonstrations(self) -> bool:
        """True if rows may have a demonstration."""
        return self.expert_key is not None

    @field_validator("answer_pattern")
    @classmethod
    def _check_answer_pattern(cls, value: str | None) -> str | None:
        return None if value is None else check_pattern(value)

    @model_validator(mode="after")
    def _check_answer_key(self) -> Self:
        comparing = [reward.type for reward in self.reward if reward.needs_answer]
        if self.answer_key is None and comparing:
            raise ValueError(
                f"the reward '{comparing[0]}' requires a reference answer, but answer_key is null: set answer_key"
            )
        return self


class FileData(FileTable, _ColumnSource):
    """A JSONL or Parquet file."""


class HuggingFaceData(HuggingFaceTable, _ColumnSource):
    """A Hugging Face dataset: a directory or a hub id, through `datasets`."""


class PythonData(PythonTable, _ColumnSource):
    """Rows from Python: your own function or class, or the objects passed to `roll.train(config, data=…)`."""


class ReasoningGymData(_SplitSource):
    """A generator of the `reasoning-gym` package, with its scorer: `source: reasoning_gym:chain_sum`."""

    source: str = option(
        ..., "`reasoning_gym:` followed by the name of the generator.", pattern=r"^reasoning_gym:[a-z0-9_]+$"
    )
    size: int = option(1000, "Number of tasks to generate.", ge=2)
    options: dict[str, Any] = option({}, "Settings of the generator, by their names in reasoning-gym.")
    reward: RewardList = option("reasoning_gym", "Rewards that score the answers; by default the generator's scorer.")

    @property
    def task(self) -> str:
        """The generator's name in reasoning-gym."""
        return self.source.partition(":")[2]


def _get_source_type(value: Any) -> str:
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
    Discriminator(_get_source_type),
]
