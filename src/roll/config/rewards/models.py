"""Rewards from a model: a judge that is prompted, or a reward model that returns a number."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from roll.config.base import option, path_option
from roll.config.rewards.base import RewardSection

__all__ = ["JudgeReward", "RewardModelReward"]

MOST_VERDICTS = 101
"""Maximum number of verdicts on the scale of the run's own judge; engines restrict sampling to at most this many
tokens.
"""


class JudgeReward(RewardSection):
    """A language model scores the answer, or compares it with a reference: behind an OpenAI-compatible endpoint
    (`url`), or, without one, the run's own judge (section `judge`).

    A judge that cannot be reached, or that never answers in the required format, is an infrastructure error of the
    rollout, not a reward of 0.
    """

    type: Literal["judge"] = option(..., "Kind of reward.")
    url: str | None = option(
        None,
        "Where the endpoint's API begins; requests go to `<url>/chat/completions`. Without it, the run's own judge.",
        examples=["http://host:8000/v1"],
    )
    model: str | None = option(None, "The model's name at the endpoint.", min_length=1, examples=["my-judge"])
    api_key_env: str | None = option(
        None,
        "Environment variable that holds the key; the key itself is never written down.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        examples=["JUDGE_API_KEY"],
    )
    mode: Literal["pointwise", "pairwise"] = option(
        "pointwise",
        "Score the answer on a scale; or compare it with the reference, in both orders, so that a preference for the "
        "first or second place cancels: 1 better, 0.5 alike, 0 worse.",
    )
    rubric: str = option(
        "correctness",
        "What the judge looks at: `correctness` (against the reference), `quality`, or a text of your own; "
        "`{reference}` in it makes the reference part of the request.",
        min_length=1,
    )
    explain: bool = option(True, "Let the judge explain its verdict before it gives it; takes longer.")
    verdict: Literal["expected", "most_likely"] = option(
        "expected",
        "Of the run's own judge. `expected`: mean of all verdicts, weighted by their probabilities (G-Eval). "
        "`most_likely`: the verdict with the highest probability. An endpoint writes its verdict as text.",
    )
    reference_key: str | None = option(
        None, "Column with the reference; by default the source's answer.", examples=["chosen"]
    )
    scale: list[int] = option([1, 10], "Lowest and highest score; they become 0 and 1.", min_length=2, max_length=2)
    solved_at: float | None = option(
        None, "The task counts as solved from this value (0 … 1) on; without it the judge does not decide.", gt=0, le=1
    )
    structured: Literal["json_schema", "json_object", "none"] = option(
        "json_schema", "How an endpoint is asked for JSON: by schema, by kind, or in words alone."
    )
    temperature: float = option(0.0, "Sampling temperature of the judge.", ge=0)
    max_reply_tokens: int = option(1024, "Longest reply of the judge.", unit="tokens", ge=1)
    options: dict[str, Any] = option({}, "Further fields of an endpoint's requests, such as `reasoning_effort`.")
    max_concurrent: int = option(16, "Requests under way at once, to an endpoint.", ge=1)
    time_limit_s: float = option(
        120.0,
        "Longest wait for one reply. After it, an endpoint is asked again; the run's own judge, whose time begins when "
        "an engine starts on the request, counts as unreachable.",
        unit="s",
        gt=0,
    )
    max_attempts: int = option(5, "Requests that may fail in a row before the judge counts as unreachable.", ge=1)
    backoff_s: float = option(
        1.0, "Wait before the second request, at most; doubled for each after it, up to a minute.", unit="s", gt=0
    )
    parse_attempts: int = option(3, "How often a judge is asked in all when its reply cannot be read.", ge=1)
    cache_size: int = option(20_000, "Replies kept in memory, by content; 0 asks again for equal answers.", ge=0)
    cache_dir: str | None = path_option(None, "Directory that keeps replies across runs.", examples=["cache/judge"])
    max_answer_chars: int = option(20_000, "Of longer answers, the judge sees only the last N characters.", ge=1)

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{value}' is not an address: write one such as 'http://host:8000/v1'")
        if parts.username or parts.password:
            raise ValueError("it holds a password: name the variable that holds the key in api_key_env instead")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _complete(self) -> JudgeReward:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale {self.scale}: the first must be below the second")
        if self.url is not None and self.model is None:
            raise ValueError(f"the endpoint at {self.url} needs the name of a model: set `model`")
        if self.url is None:
            for name in ("model", "api_key_env", "structured", "options"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"`{name}` belongs to an endpoint, but there is no `url`: set it, or remove `{name}` (the "
                        "run's own judge is configured in the section `judge`)"
                    )
        verdicts = self.scale[1] - self.scale[0] + 1
        if self.url is None and verdicts > MOST_VERDICTS:
            raise ValueError(
                f"scale {self.scale} has {verdicts:,} verdicts, and the run's own judge weighs at most {MOST_VERDICTS}"
            )
        if self.cache_dir is not None and not self.cache_size:
            raise ValueError("cache_dir is set, but cache_size 0 keeps nothing: remove the one or raise the other")
        return self

    @property
    def asks_own_judge(self) -> bool:
        """Whether the reward uses the run's own judge; its verifier is then built with the judge, not with a worker
        pool.
        """
        return self.url is None

    @property
    def needs_answer(self) -> bool:
        """See the base class."""
        return self.reference_key is None and (
            self.mode == "pairwise" or self.rubric == "correctness" or "{reference}" in self.rubric
        )


class RewardModelReward(RewardSection):
    """A Hugging Face sequence-classification model scores prompt and answer; it runs in separate processes."""

    type: Literal["reward_model"] = option(..., "Kind of reward.")
    path: str = path_option(..., "A directory or a hub id.", min_length=1, examples=["my-reward-model"])
    output: Literal["raw", "sigmoid", "probability"] = option(
        "raw", "The logit; squeezed to 0 … 1; or, of several classes, the probability of `label`."
    )
    label: int = option(0, "Which of the model's outputs counts.", ge=0)
    scale: float = option(1.0, "Factor of the value.")
    shift: float = option(0.0, "Added to the value after `scale`.")
    solved_at: float | None = option(
        None, "The task counts as solved from this value on; without it the model does not decide."
    )
    max_length: int = option(4096, "Of longer texts the model sees the end.", unit="tokens", ge=2)
    batch_size: int = option(16, "Answers in one forward pass, at most.", ge=1)
    num_workers: int = option(1, "Processes, each with its own copy of the model.", ge=1)
    num_threads: int = option(1, "CPU threads of each.", ge=1)
    device: str = option("auto", "`cpu`, a device such as `cuda:1`, or `auto`: an accelerator where there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "Of its weights; by default as saved.")
    time_limit_s: float = option(
        300.0,
        "Longest time for one batch, and for loading the model before the first; beyond it the process is replaced.",
        unit="s",
        gt=0,
    )
    trust_remote_code: bool = option(False, "Run the model's own code.")
