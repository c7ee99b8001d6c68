"""Observations with the history of the episode: GEM's `concat` and its variants."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar, Literal

from roll.envs.base import EnvWrapper, Started, Stepped, shown
from roll.errors import ConfigError
from roll.types import Content, text_of

__all__ = ["ObservationHistory"]


class ObservationHistory(EnvWrapper):
    """Every observation includes those before it, as GEM's `ObservationWrapper` writes them.

    `info["suffix"]` and `info["prefix"]` are shown with the newest observation only, and removed from `info`;
    `info["parsed_action"]` replaces the action; with `info["use_tool"]`, the observation is a tool's message.

    Args:
        env: The environment.
        actions: Whether to include the actions.
        chat: Whether to apply the model's chat template: `always`, around all turns as messages, or `on_reset`, around
            the first observation only, so that the rest continues the model's own text.
        last: Number of turns to keep before the newest observation.
        tokenizer: The model's tokenizer, for its chat template.

    Raises:
        ConfigError: A chat template without a tokenizer or actions, or `last` below 1.
    """

    not_copied: ClassVar[tuple[str, ...]] = ("_tokenizer",)

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
            raise ConfigError(f"chat is '{chat}': choose never, always or on_reset.")
        if chat != "never" and (tokenizer is None or not actions):
            raise ConfigError(f"chat '{chat}' needs the model's tokenizer, and actions in the history.")
        if last is not None and last < 1:
            raise ConfigError(f"last is {last}: keep at least 1 turn, or None for all.")
        self._actions, self._chat, self._tokenizer = actions, chat, tokenizer
        self._seen: deque[tuple[str, bool]] = deque(maxlen=None if last is None else last + 1)
        self._done: deque[str] = deque(maxlen=last)

    def on_reset(self, observation: Content, info: dict[str, Any]) -> Started:
        self._seen.clear()
        self._done.clear()
        said = text_of(observation)
        if self._chat == "on_reset":
            said = self._rendered([{"role": "user", "content": said}])
        self._seen.append((said, bool(info.get("use_tool"))))
        return shown(self._history(), info), _without_shown(info)

    def on_step(self, action: str, stepped: Stepped) -> Stepped:
        observation, reward, terminated, truncated, info = stepped
        self._done.append(info.get("parsed_action", action))
        self._seen.append((text_of(observation), bool(info.get("use_tool"))))
        return shown(self._history(), info), reward, terminated, truncated, _without_shown(info)

    def _history(self) -> str:
        if self._chat == "always":
            messages = []
            for (observation, of_tool), action in zip(self._seen, [*self._done, None], strict=True):
                messages.append({"role": "tool" if of_tool else "user", "content": observation})
                if action is not None:
                    messages.append({"role": "assistant", "content": action})
            return self._rendered(messages)
        parts = [observation for observation, _ in self._seen]
        if self._actions:
            between = [*self._done, ""]
            parts = [part for turn in zip(parts, between, strict=True) for part in turn]
        return "".join(map(_line, parts))

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _without_shown(info: dict[str, Any]) -> dict[str, Any]:
    """Return the information without the prefix and the suffix, which are part of the observation now."""
    return {key: value for key, value in info.items() if key not in ("prefix", "suffix")}


def _line(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
