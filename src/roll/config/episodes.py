"""What a model sees of an episode's earlier turns, and what happens when its context is full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from roll.config.base import Section, option

if TYPE_CHECKING:
    from roll.types import History

__all__ = ["EpisodesConfig", "HistoryConfig"]


class HistoryConfig(Section):
    """What the model sees of earlier turns. When its context is rewritten, a new training sample begins."""

    type: Literal["full", "window", "thinking_stripped", "stepwise", "summary"] = option(
        "full",
        "`full`: all turns, as the chat template renders them (some drop earlier thinking). `window`: the last "
        "`num_turns` answers with what the environment said to them. `thinking_stripped`: all turns, earlier answers "
        "without their thinking. `stepwise`: the current observation alone. `summary`: all turns until the context "
        "runs short; then what the model writes of them in their place.",
    )
    num_turns: int | None = option(None, "Earlier answers that a `window` shows.", ge=1)
    keep_task: bool = option(
        True,
        "Whether a `window`, or the current observation of `stepwise`, stands behind the prompt; `false` where every "
        "observation says all that is to be known.",
    )
    summary_request: str = option(
        "Summarize what was asked, what you did and what you learned, as far as it matters for going on.",
        "How the model is asked for a `summary`.",
        min_length=1,
    )
    summary_tokens: int = option(256, "Longest `summary`.", unit="tokens", ge=1)
    train_summary: bool = option(True, "Whether a `summary` is trained like an answer, with the episode's outcome.")

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.type == "window" and self.num_turns is None:
            raise ValueError("type window needs num_turns: the earlier answers that it shows")
        if self.type != "window" and self.num_turns is not None:
            raise ValueError(
                f"num_turns is of type window, but type is {self.type}: remove the one or change the other"
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
    """How conversations with an environment are held."""

    history: HistoryConfig = option(HistoryConfig(), "What the model sees of earlier turns.")
    observation_tokens: int = option(
        512,
        "Room for each observation, for which engines make their contexts large enough where `inference.max_context` "
        "is not given. One observation may take more, as long as the context has room.",
        unit="tokens",
        ge=0,
    )
    long_observations: Literal["cut", "end"] = option(
        "cut",
        "What becomes of an observation that leaves no room for an answer: `cut` leaves out its middle, and says so in "
        "its place; `end` ends the episode. Where not even a part of it fits, the episode ends.",
    )
    min_answer_tokens: int = option(
        16, "Room that must be left for an answer (at most `max_new_tokens`).", unit="tokens", ge=1
    )
