"""The base class of the settings of rewards."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from pydantic import field_validator

from roll.config.base import Section, option

__all__ = [
    "AUTO_REASONING",
    "KEEP_REASONING",
    "RewardSection",
    "build_auto_reasoning_option",
    "check_pattern",
    "check_url",
]

AUTO_REASONING, KEEP_REASONING = "auto", "keep"


class RewardSection(Section):
    """Settings that every component of a reward has."""

    name: str = option("", "Name of the component in metrics; by default its type.")
    weight: float = option(
        1.0,
        "Weight of the component in the sum. A component with weight 0 is only recorded in metrics, and its verdicts "
        "are excluded from the accuracy.",
    )
    gate: float | None = option(
        None,
        "Minimum value of the component. If the value is lower, the total reward is 0. `true` is shorthand for 1. "
        "Components with a gate are computed first; the other components are computed only if all gates pass.",
        examples=[1.0],
    )
    time_limit_s: float = option(
        5.0, "Time limit for one answer; an answer that exceeds it is treated as incorrect.", unit="s", gt=0
    )
    require_finished: bool = option(True, "Whether truncated answers get a reward of 0.")
    reasoning: str = option(
        KEEP_REASONING,
        "Part of an answer that is scored. `auto`: the text after the model's reasoning, in the format of its chat "
        "template; an answer with unfinished reasoning gets 0. `keep`: the whole answer. Any other value is a closing "
        "tag: the text after its last occurrence is scored.",
        examples=["auto", "keep", "</reasoning>"],
    )

    @field_validator("gate", mode="before", json_schema_input_type=float | bool | None)
    @classmethod
    def _convert_gate(cls, value: Any) -> Any:
        return {True: 1.0, False: None}[value] if isinstance(value, bool) else value

    @field_validator("reasoning")
    @classmethod
    def _check_reasoning(cls, value: str) -> str:
        if value not in (AUTO_REASONING, KEEP_REASONING) and (not value.strip() or value.strip().isalnum()):
            raise ValueError(f"expected auto, keep or a closing tag such as </reasoning>, got '{value}'")
        return value

    @property
    def scores_reasoning(self) -> bool:
        """True if the verifier receives the whole answer, including the reasoning, which it may remove itself."""
        return self.reasoning == KEEP_REASONING

    @property
    def reads_prompt_text(self) -> bool:
        """True if the verifier reads the prompt, which must then be text."""
        return False

    @property
    def needs_answer(self) -> bool:
        """True if the reward needs the prompt's reference answer, which must then not be empty."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """True if the reward runs programs; its verifier is then built with `CodeSandboxes`, not with a worker pool."""
        return False

    @property
    def uses_own_judge(self) -> bool:
        """True if the reward uses the run's judge; its verifier is then built with the judge, without a pool."""
        return False


def build_auto_reasoning_option() -> Any:
    """Build the option `reasoning` for rewards that score the text after the reasoning by default."""
    inherited = RewardSection.model_fields["reasoning"]
    return option(AUTO_REASONING, inherited.description or "", examples=inherited.examples)


def check_pattern(pattern: str) -> str:
    """Check that a pattern is a regular expression, and return it.

    Raises:
        ValueError: the pattern is not a regular expression.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
    return pattern


def check_url(url: str, example: str) -> str:
    """Check the base URL of a service, and return it without a slash at its end.

    Raises:
        ValueError: The URL's scheme is neither http nor https, the host is missing, the port is invalid, or the URL has
            a password, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # an invalid port, or an unclosed bracket
        raise ValueError(f"'{url}' is not a valid URL ({error}): expected, for example, '{example}'") from None
    if parts.scheme not in ("http", "https") or not has_host or any(c.isspace() or ord(c) < 32 for c in url):
        raise ValueError(f"'{url}' is not a valid URL: expected, for example, '{example}'")
    if parts.username or parts.password:
        raise ValueError(
            "the URL must not contain a password: set api_key_env to the environment variable with the key instead"
        )
    if parts.query or parts.fragment:
        raise ValueError(f"'{url}' must be a base URL without query and fragment, such as '{example}'")
    return url.rstrip("/")
