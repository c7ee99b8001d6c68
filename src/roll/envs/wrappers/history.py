"""Observations with the history of the episode: GEM's `concat` and its variants."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, Literal

from roll.envs.base import EnvWrapper, ResetResult, StepResult, format_observation
from roll.errors import ConfigError
from roll.types import Content, get_text

__all__ = ["ObservationHistory"]


class ObservationHistory(EnvWrapper):
    """Includes the previous observations in every observation, in the format of GEM's `ObservationWrapper`.

    `info["suffix"]` and `info["prefix"]` are shown with the newest observation only, and removed from `info`. If `info`
    has `parsed_action`, it is shown instead of the action. With `chat` set to `always`, an observation has the role
    `tool` if `info["use_tool"]` is true.

    Args:
        env: The environment.
        actions: Whether to include the actions.
        chat: When to apply the model's chat template: `always` to all turns as messages, or `on_reset` only to the
            first observation, so that later observations continue the model's text.
        last: Number of turns to keep before the newest observation.
        tokenizer: The model's tokenizer, for its chat template.

    Raises:
        ConfigError: `chat` is set without a tokenizer or actions, or `last` is below 1.
    """

    shared_attributes: ClassVar[tuple[str, ...]] = ("_tokenizer",)

    def __init__(
        self,
        env: Any,
        actions: bool = True,
        chat: Literal["never", "always", "on_reset"] = "never",
        last: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(env)
        if chat not in ("never", "always", "on_reset"):
            raise ConfigError(f"chat must be never, always or on_reset, got '{chat}'.")
        if chat != "never" and (tokenizer is None or not actions):
            raise ConfigError(f"chat '{chat}' requires the model's tokenizer and `actions: true`.")
        if last is not None and last < 1:
            raise ConfigError(f"last must be at least 1, or None for all turns, got {last}.")
        self._actions, self._chat, self._tokenizer = actions, chat, tokenizer
        self._seen: deque[tuple[str, bool]] = deque(maxlen=None if last is None else last + 1)
        self._done: deque[str] = deque(maxlen=last)

    def on_reset(self, observation: Content, info: dict[str, Any]) -> ResetResult:
        self._seen.clear()
        self._done.clear()
        text = get_text(observation)
        if self._chat == "on_reset":
            text = self._apply_template([{"role": "user", "content": text}])
        self._seen.append((text, bool(info.get("use_tool"))))
        return format_observation(self._render_history(), info), _remove_affixes(info)

    def on_step(self, action: str, result: StepResult) -> StepResult:
        observation, reward, terminated, truncated, info = result
        self._done.append(info.get("parsed_action", action))
        self._seen.append((get_text(observation), bool(info.get("use_tool"))))
        return format_observation(self._render_history(), info), reward, terminated, truncated, _remove_affixes(info)

    def _render_history(self) -> str:
        if self._chat == "always":
            messages = []
            for (observation, of_tool), action in zip(self._seen, [*self._done, None], strict=True):
                messages.append({"role": "tool" if of_tool else "user", "content": observation})
                if action is not None:
                    messages.append({"role": "assistant", "content": action})
            return self._apply_template(messages)
        parts = [observation for observation, _ in self._seen]
        if self._actions:
            between = [*self._done, ""]
            parts = [part for turn in zip(parts, between, strict=True) for part in turn]
        return "".join(map(_end_line, parts))

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _remove_affixes(info: dict[str, Any]) -> dict[str, Any]:
    """Return `info` without the prefix and the suffix, which are now part of the observation."""
    return {key: value for key, value in info.items() if key not in ("prefix", "suffix")}


def _end_line(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
