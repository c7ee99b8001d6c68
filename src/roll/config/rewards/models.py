"""Rewards from a model: a judge, which is prompted, or a reward model, which returns a number."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from roll.config.base import option, path_option
from roll.config.rewards.base import RewardSection, check_url

__all__ = ["JudgeReward", "RewardModelReward"]

MAX_VERDICTS = 101
"""Maximum number of verdicts on the scale of the run's judge, and of tokens to which sampling is restricted."""


class JudgeReward(RewardSection):
    """A language model scores the answer or compares it with a reference. The model is behind an OpenAI-compatible
    endpoint (`url`); without a `url`, it is the run's judge (section `judge`).

    If the judge cannot be reached, or never replies in the required format, the rollout has an infrastructure error,
    not a reward of 0.
    """

    type: Literal["judge"] = option(..., "Reward type.")
    url: str | None = option(
        None,
        "Base URL of the endpoint; requests go to `<url>/chat/completions`. By default the run's judge is used.",
        examples=["http://host:8000/v1"],
    )
    model: str | None = option(None, "Name of the model at the endpoint.", min_length=1, examples=["my-judge"])
    api_key_env: str | None = option(
        None,
        "Environment variable with the API key, which is never written to a file.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        examples=["JUDGE_API_KEY"],
    )
    mode: Literal["pointwise", "pairwise"] = option(
        "pointwise",
        "`pointwise`: the judge scores the answer on a scale. `pairwise`: the judge compares the answer with the "
        "reference: 1 if it is better, 0.5 if equal, 0 if worse. It compares them in both orders, so position bias "
        "cancels.",
    )
    rubric: str = option(
        "correctness",
        "Criteria of the judge: `correctness` (relative to the reference), `quality`, or a custom text, in which "
        "`{reference}` is replaced by the reference.",
        min_length=1,
    )
    explain: bool = option(
        True, "Whether the judge generates an explanation before the verdict, which takes additional time."
    )
    verdict: Literal["expected", "most_likely"] = option(
        "expected",
        "How the verdict of the run's judge is computed. `expected`: mean of all possible verdicts, weighted by "
        "their probabilities (G-Eval). `most_likely`: the verdict with the highest probability. Endpoints always "
        "return the verdict as text.",
    )
    reference_key: str | None = option(
        None, "Column with the reference; by default the reference answer of the source.", examples=["chosen"]
    )
    scale: list[int] = option(
        [1, 10], "Lowest and highest score, which are mapped to 0 and 1.", min_length=2, max_length=2
    )
    solved_at: float | None = option(
        None,
        "The task is solved if the reward (from 0 to 1) is at least this value. By default, the judge does "
        "not decide correctness.",
        gt=0,
        le=1,
    )
    structured: Literal["json_schema", "json_object", "none"] = option(
        "json_schema",
        "How JSON is requested from an endpoint. `json_schema`: by a JSON Schema. `json_object`: as any JSON object. "
        "`none`: only in the prompt.",
    )
    temperature: float = option(0.0, "Sampling temperature of the judge.", ge=0)
    max_reply_tokens: int = option(1024, "Maximum length of the judge's reply.", unit="tokens", ge=1)
    options: dict[str, Any] = option({}, "Additional fields of an endpoint's requests, such as `reasoning_effort`.")
    max_concurrent: int = option(16, "Maximum number of concurrent requests to an endpoint.", ge=1)
    time_limit_s: float = option(
        120.0,
        "Time limit of one reply. A request to an endpoint that exceeds it is retried. If a request to the run's "
        "own judge exceeds it, measured from when an engine starts the request, the judge is treated as unreachable.",
        unit="s",
        gt=0,
    )
    max_attempts: int = option(
        5, "Number of consecutive failed requests after which the judge is treated as unreachable.", ge=1
    )
    backoff_s: float = option(
        1.0,
        "Maximum wait before the second attempt. It doubles with each further attempt, up to a minute.",
        unit="s",
        gt=0,
    )
    parse_attempts: int = option(3, "Maximum number of requests for one verdict if replies cannot be parsed.", ge=1)
    cache_size: int = option(20_000, "Maximum number of replies that are cached in memory; 0 disables the cache.", ge=0)
    cache_dir: str | None = path_option(
        None, "Directory of a reply cache that several runs can share.", examples=["cache/judge"]
    )
    max_answer_chars: int = option(
        20_000,
        "Maximum number of characters of an answer that are sent to the judge. If an answer is longer, only its end "
        "is sent.",
        ge=1,
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value, "http://host:8000/v1")

    @model_validator(mode="after")
    def _check_combinations(self) -> JudgeReward:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale must be [lowest, highest] with lowest < highest, got {self.scale}")
        if self.url is not None and self.model is None:
            raise ValueError(f"the endpoint at {self.url} requires the name of a model: set `model`")
        if self.url is None:
            for name in ("model", "api_key_env", "structured", "options"):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise ValueError(
                        f"`{name}` is supported only with an endpoint: set `url`, or remove `{name}` (the run's judge "
                        "is configured in the section `judge`)"
                    )
        verdicts = self.scale[1] - self.scale[0] + 1
        if self.url is None and verdicts > MAX_VERDICTS:
            raise ValueError(
                f"scale {self.scale} has {verdicts:,} verdicts, but the run's judge supports at most {MAX_VERDICTS}"
            )
        if self.cache_dir is not None and not self.cache_size:
            raise ValueError("cache_dir requires cache_size > 0, got 0: remove cache_dir, or raise cache_size")
        return self

    @property
    def reads_prompt_text(self) -> bool:
        """True if the verifier reads the prompt, which must then be text."""
        return True

    @property
    def uses_own_judge(self) -> bool:
        """True if the reward uses the run's judge; its verifier is then built with the judge, without a pool."""
        return self.url is None

    @property
    def needs_answer(self) -> bool:
        """True if the judge compares answers with the source's reference answer."""
        return self.reference_key is None and (
            self.mode == "pairwise" or self.rubric == "correctness" or "{reference}" in self.rubric
        )


class RewardModelReward(RewardSection):
    """A Hugging Face sequence-classification model scores prompt and answer; it runs in separate processes."""

    type: Literal["reward_model"] = option(..., "Reward type.")
    path: str = path_option(..., "Directory or hub id of the model.", min_length=1, examples=["my-reward-model"])
    output: Literal["raw", "sigmoid", "probability"] = option(
        "raw",
        "`raw`: the logit. `sigmoid`: the sigmoid of the logit. `probability`: for a model with several classes, the "
        "probability of `label`.",
    )
    label: int = option(0, "Index of the model output that is used.", ge=0)
    scale: float = option(1.0, "Scale factor for the model's output.")
    shift: float = option(0.0, "Constant that is added after scaling.")
    solved_at: float | None = option(
        None,
        "The task is solved if the reward is at least this value. By default, the model does not decide correctness.",
    )
    max_length: int = option(
        4096, "Maximum length of the model's input; a longer input is truncated at the beginning.", unit="tokens", ge=2
    )
    batch_size: int = option(16, "Maximum number of answers in one forward pass.", ge=1)
    num_workers: int = option(1, "Number of processes, each with a separate copy of the model.", ge=1)
    num_threads: int = option(1, "Number of CPU threads of each process.", ge=1)
    device: str = option(
        "auto",
        "Device of the model: `cpu`, a device such as `cuda:1`, or `auto`, which uses an accelerator if there is one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Dtype of the weights; `auto` keeps the dtype of the checkpoint."
    )
    time_limit_s: float = option(
        300.0,
        "Time limit of one batch, and of loading the model before the first batch. A process that exceeds it is "
        "replaced.",
        unit="s",
        gt=0,
    )
    trust_remote_code: bool = option(False, "Whether Python code from the model's repository may run.")

    @property
    def reads_prompt_text(self) -> bool:
        """True if the verifier reads the prompt, which must then be text."""
        return True
