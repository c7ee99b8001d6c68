"""Settings of episodes, and the first observation, which becomes part of an episode's prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from roll.envs.base import ResetResult
from roll.errors import DataError
from roll.rollout.history import find_longest_fitting, shorten_messages
from roll.rollout.loops import Renderer
from roll.types import History, Message, PromptDraw, count_characters, fill_placeholder, map_text

__all__ = ["MAX_CHARS_PER_TOKEN", "EpisodePlan", "add_first_observation"]

MAX_CHARS_PER_TOKEN = 16
"""A text with more characters per token of the context than this is truncated before it is tokenized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """Settings of the episodes of a run; see `roll.config.episodes`."""

    max_context: int | None = None
    """Maximum number of tokens of a context plus its answer; `None` for no limit."""
    history: History = field(default_factory=History)
    """Earlier turns in the context, for environments without their own setting."""
    long_observations: Literal["cut", "end"] = "cut"
    """Handling of an observation that does not fit: truncate it, or end the episode."""
    min_answer_tokens: int = 1
    """Minimum number of tokens that must remain in the context for an answer."""


def add_first_observation(draw: PromptDraw, start: ResetResult, renderer: Renderer, plan: EpisodePlan) -> PromptDraw:
    """Return the draw with the environment's first observation added to its prompt.

    If the observation is too long, its middle is removed.

    Args:
        draw: A draw of a prompt with an environment.
        start: First observation and info; if the info has `tools`, the chat template lists them for the model.
        renderer: Renderer of the model.
        plan: Settings of episodes.

    Raises:
        DataError: The prompt does not fit even with a shortened observation, or the template does not support tools.
    """
    assert draw.prompt.environment is not None
    opening = draw.prompt.environment.opening
    # The prompt is rendered only when its episode begins, because the observation comes from the environment instance
    # of this episode. Otherwise the controller would need environments too, or each would be reset twice.
    observation, info = map_text(start[0], renderer.escape_special_tokens), start[1]
    if tools := tuple(info.get("tools") or ()):
        draw = replace(draw, prompt=replace(draw.prompt, tools=tools))
        # A template without tool support silently ignores tools, so the model would not know them.
        if renderer.render_text(draw.prompt.messages, tools) == renderer.render_text(draw.prompt.messages):
            raise DataError(
                "the chat template of this model does not support tools: choose another tool_calls.format, such as xml "
                "or json."
            )

    def build_draw(limit: int) -> PromptDraw:
        (shortened,) = shorten_messages([Message(role="user", content=observation)], limit)
        last = Message(role="user", content=fill_placeholder(opening, "{prompt}", shortened.content))
        messages = (*draw.prompt.messages[:-1], last)
        token_ids, media = renderer.encode(renderer.render_text(messages, draw.prompt.tools))
        return replace(draw, prompt=replace(draw.prompt, messages=messages), token_ids=token_ids, media=media)

    if plan.max_context is None:
        return build_draw(count_characters(observation))
    longest = find_longest_fitting(
        build_draw,
        lambda tried: len(tried.token_ids),
        max_limit=min(count_characters(observation), MAX_CHARS_PER_TOKEN * plan.max_context),
        max_size=plan.max_context - plan.min_answer_tokens,
    )
    if longest is None:
        raise DataError(
            f"the first observation of '{draw.prompt.uid}' leaves no space for an answer in a context of "
            f"{plan.max_context} tokens: raise inference.max_context, or shorten the system prompt."
        )
    return longest
