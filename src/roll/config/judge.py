"""The run's judge: a role with a separate model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import model_validator

from roll.config.base import option, path_option
from roll.config.cluster import ClusterConfig
from roll.config.data import DataConfig
from roll.config.engines import ENGINES, EngineRequirement, list_engines_with
from roll.config.inference import EngineOptions
from roll.config.rewards import JudgeReward

__all__ = ["JudgeConfig", "check_judge"]


class JudgeConfig(EngineOptions):
    """Engines for rewards of type `judge` without a `url`. `judge: NAME` is short for `judge: {model: NAME}`.

    Any model can be used, including the policy's initial model; its weights are frozen. On Ray its engines run on
    `cluster.device_mapping.judge`.
    """

    model: str = path_option(
        "smollm2-135m-instruct", "A name from the catalog, a Hugging Face directory, or a hub id.", min_length=1
    )
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "Compute dtype.")
    tensor_parallel: int = option(1, "Number of devices of one engine.", ge=1)
    num_engines: int | None = option(
        None,
        "Number of engines; by default one, or as many as the devices of `cluster.device_mapping.judge` allow.",
        ge=1,
    )
    max_context: int | None = option(
        None,
        "Maximum length of request plus reply; by default the model's context length, but at most 8,192.",
        unit="tokens",
        ge=16,
    )
    trust_remote_code: bool = option(False, "Whether Python code from the model's repository may run.")

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> JudgeConfig:
        width, engine = self.tensor_parallel, self.engine
        if (
            width > 1
            and engine in ENGINES.built_in_names
            and engine not in (able := list_engines_with("tensor_parallel"))
        ):
            raise ValueError(
                f"tensor_parallel is {width}, but the {engine} engine supports only one device: set engine: "
                f"{' or '.join(able)}, or tensor_parallel: 1"
            )
        return self

    @property
    def required_engine_capabilities(self) -> list[EngineRequirement]:
        """Capabilities that judges require from their engines."""
        needs = [
            EngineRequirement(
                capability="restricts_choices", reason="a judge, which restricts its answer to a few tokens,"
            )
        ]
        if self.quantization != "none":
            needs.append(
                EngineRequirement(
                    capability="quantized_compute",
                    reason=f"judge.quantization {self.quantization}",
                    alternative="set judge.quantization to none",
                )
            )
        if self.tensor_parallel > 1:
            reason = f"judge.tensor_parallel {self.tensor_parallel}"
            instead = "set judge.tensor_parallel to 1"
            needs.append(EngineRequirement(capability="tensor_parallel", reason=reason, alternative=instead))
        return needs


def check_judge(judge: JudgeConfig | None, data: Sequence[DataConfig], cluster: ClusterConfig, num_judges: int) -> None:
    """Check that there is a judge if and only if a reward needs it, and that its devices and context suffice.

    Args:
        judge: the run's judge, if it has one.
        data: sources, whose rewards may use the judge.
        cluster: the cluster on whose devices the judge runs.
        num_judges: number of engines of the judge.

    Raises:
        ValueError: a check fails; the message names the keys and the remedy.
    """
    asking = [
        (f"data.{i}.reward.{j}", reward)
        for i, entry in enumerate(data)
        for j, reward in enumerate(entry.reward)
        if isinstance(reward, JudgeReward) and reward.uses_own_judge
    ]
    if judge is None:
        if asking:
            raise ValueError(
                f"{asking[0][0]} uses the run's judge, but no judge is configured: add a section `judge` with a "
                "model (such as `judge: smollm2-135m-instruct`), or set the reward's `url` to an endpoint"
            )
        return
    if not asking:
        raise ValueError(
            f"the judge '{judge.model}' is not used by any reward under data: add a reward of type judge without a "
            "`url` to a source, or remove the section `judge`"
        )
    longest = max(asking, key=lambda entry: entry[1].max_reply_tokens)
    if judge.max_context is not None and judge.max_context <= longest[1].max_reply_tokens:
        raise ValueError(
            f"judge.max_context {judge.max_context} leaves no tokens for questions, because "
            f"{longest[0]}.max_reply_tokens "
            f"is {longest[1].max_reply_tokens}: raise judge.max_context, or lower max_reply_tokens"
        )
    _check_devices(judge, cluster, num_judges)


def _check_devices(judge: JudgeConfig, cluster: ClusterConfig, num_judges: int) -> None:
    mapping, width = cluster.device_mapping, judge.tensor_parallel
    if cluster.type == "local":
        if width > 1:
            raise ValueError(
                f"judge.tensor_parallel is {width}, but cluster.type local has one device: set cluster.type=ray"
            )
        return
    if mapping.judge is not None:
        found = len(mapping.judge)
        if judge.num_engines is not None and judge.num_engines * width != found:
            raise ValueError(
                f"judge.num_engines {judge.num_engines} x judge.tensor_parallel {width} is "
                f"{judge.num_engines * width} devices, but cluster.device_mapping.judge has {found}: remove "
                "judge.num_engines, or map that many devices"
            )
        return
    needed, there = num_judges * width, len(mapping.actor_infer)
    if needed > there:
        raise ValueError(
            f"the judge requires {needed} devices (judge.num_engines {num_judges} x judge.tensor_parallel {width}), "
            f"but actor_infer, whose devices it shares, has only {there}: set cluster.device_mapping.judge"
        )
