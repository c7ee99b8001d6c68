"""The model's context in an episode: how earlier turns are shown, and how a full context is handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option

if TYPE_CHECKING:
    from roll.types import History

__all__ = ["EpisodesConfig", "HistoryConfig"]


class HistoryConfig(Section):
    """How earlier turns appear in the context. A new training sample begins whenever the context is rewritten."""

    type: Literal["full", "window", "thinking_stripped", "stepwise", "summary"] = option(
        "full",
        "`full`: all turns, as the chat template renders them (some templates drop earlier thinking). `window`: the "
        "last `num_turns` answers with the observations that followed them. `thinking_stripped`: all turns, with the "
        "thinking of earlier answers removed. `stepwise`: only the current observation. `summary`: all turns; when the "
        "context is nearly full, the model replaces the turns by a summary.",
    )
    num_turns: int | None = option(None, "`window`: number of earlier answers in the context.", ge=1)
    keep_task: bool = option(
        True,
        "`window` and `stepwise`: whether the context begins with the prompt; set it to `false` if every observation "
        "is complete by itself.",
    )
    summary_request: str = option(
        "Summarize what was asked, what you did and what you learned, as far as it matters for going on.",
        "`summary`: message that requests a summary from the model.",
        min_length=1,
    )
    summary_tokens: int = option(256, "`summary`: maximum length of a summary.", unit="tokens", ge=1)
    train_summary: bool = option(
        True, "`summary`: whether summaries are trained on like answers, with the episode's reward."
    )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.type == "window" and self.num_turns is None:
            raise ValueError(
                "`type: window` requires num_turns, the number of earlier answers in the context: set num_turns"
            )
        if self.type != "window" and self.num_turns is not None:
            raise ValueError(
                f"num_turns is supported only with `type: window`, got type {self.type}: remove num_turns, or set "
                "type to window"
            )
        return self

    @property
    def settings(self) -> History:
        """The settings for the episode loop."""
        from roll.types import History

        return History(
            kind=self.type,
            turns=self.num_turns or 0,
            keep_task=self.keep_task,
            summary_request=self.summary_request,
            summary_tokens=self.summary_tokens,
            train_summary=self.train_summary,
        )


class EpisodesConfig(Section):
    """The model's context in a conversation with an environment: earlier turns, and the handling of a full context."""

    history: HistoryConfig = option(HistoryConfig(), "How earlier turns appear in the context.")
    observation_tokens: int = option(
        512,
        "Expected number of tokens per observation, from which the engines' context length is computed if "
        "`inference.max_context` is not set. An observation may be longer if the context has room for it.",
        unit="tokens",
        ge=0,
    )
    long_observations: Literal["cut", "end"] = option(
        "cut",
        "How to handle an observation that leaves no room for an answer. `cut`: replace its middle by a note. `end`: "
        "end the episode. In both cases, the episode ends if no part of the observation fits.",
    )
    min_answer_tokens: int = option(
        16,
        "Minimum number of tokens that must remain free in the context for an answer; at most `max_new_tokens`.",
        unit="tokens",
        ge=1,
    )
