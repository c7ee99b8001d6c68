"""The trained language model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import Field, model_validator

from roll.config.base import Section, option, path_option

__all__ = ["LoRAConfig", "ModelConfig", "VisionConfig", "VisionPart"]

T = TypeVar("T")


class LoRAConfig(Section):
    """Training of low-rank adapters instead of all weights, with `peft`."""

    rank: int = option(16, "Rank of the adapters.", ge=1)
    alpha: float = option(32.0, "Scale of the adapters: the output of an adapter is multiplied by alpha / rank.", gt=0)
    use_rslora: bool = option(
        False,
        "Whether the output of an adapter is multiplied by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732).",
    )
    use_dora: bool = option(
        False,
        "Whether to also train the norm of each row of an adapted weight (DoRA, arXiv 2402.09353). A pass is slower, "
        "because it computes the norms of all adapted weights.",
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = option(
        {},
        "Rank of some layers, by name. A name may be the end of a layer's path or, as in `peft`, a regular expression "
        "for it; the first match applies.",
        examples=[{"down_proj": 32}],
    )
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = option(
        {},
        "`alpha` of some layers, by name as in `rank_pattern`.",
        examples=[{"down_proj": 64.0}],
    )
    loraplus_lr_ratio: float = option(
        1.0,
        "Learning rate of the adapters' matrices B, as a multiple of `training.learning_rate` (LoRA+, arXiv "
        "2402.12354). With `use_dora` it also applies to the row norms.",
        gt=0,
    )
    base: Literal["as_is", "nf4"] = option(
        "as_is",
        "Storage format of the frozen weights during training. `as_is`: not quantized. `nf4`: 4.1 bits per weight "
        "(QLoRA, arXiv 2305.14314), with a small overhead for dequantization. Engines and exports receive the "
        "dequantized weights, merged with the adapters.",
    )
    dropout: float = option(0.0, "Dropout inside the adapters during training.", ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = option(
        "all-linear",
        "Names of the linear layers that get an adapter, such as `q_proj`; `all-linear` selects all linear layers.",
    )

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"{key} has the name '{pattern}', which is not a regular expression ({error}): use the end "
                        "of a layer's path, such as down_proj"
                    ) from error
        return self

    @property
    def max_rank(self) -> int:
        """The largest rank of any layer's adapter."""
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank

    def get_rank(self, layer: str) -> int:
        """Return the rank of a layer's adapter."""
        return _find_by_pattern(self.rank_pattern, layer, self.rank)

    def compute_scale(self, layer: str) -> float:
        """Return the number by which the output of a layer's adapter is multiplied."""
        rank = self.get_rank(layer)
        return _find_by_pattern(self.alpha_pattern, layer, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _find_by_pattern(patterns: Mapping[str, T], layer: str, default: T) -> T:
    """Return the value of the first pattern that matches a layer's path, by the rules of peft."""
    return next((value for name, value in patterns.items() if re.match(rf"(.*\.)?({name})$", layer)), default)


VisionPart: TypeAlias = Literal["tower", "projector", "language_model"]


class VisionConfig(Section):
    """Trained parts of a vision-language model, and their learning rates.

    The parts are the vision `tower`, the `projector` between tower and decoder, and the `language_model`.
    """

    freeze: list[VisionPart] = option(
        [],
        "Parts to freeze: `tower`, `projector`, `language_model`. With `model.lora`, frozen parts get no adapters.",
        examples=[["tower"]],
    )
    learning_rate_factors: dict[VisionPart, Annotated[float, Field(gt=0)]] = option(
        {},
        "Learning rate multiplier of each part, such as `{tower: 0.1}`; the default is 1.",
        examples=[{"tower": 0.1}],
    )

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if set(self.freeze) == set(get_args(VisionPart)):
            raise ValueError("freeze contains all three parts, so no part would be trained: remove one of them")
        if both := sorted(set(self.freeze) & set(self.learning_rate_factors)):
            raise ValueError(f"'{both[0]}' is frozen, but has a learning rate factor: remove one of the two")
        return self


class ModelConfig(Section):
    """The trained model. `model: NAME` is shorthand for `model: {path: NAME}`."""

    path: str = path_option(
        ...,
        "A name from the catalog (`smollm2-135m-instruct`), a Hugging Face directory, or a hub id.",
        min_length=1,
    )
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16",
        "Compute dtype of the trainer and the engines. Master weights are always float32.",
    )
    lora: LoRAConfig | None = option(None, "Adapters to train; `null` trains all weights.")
    vision: VisionConfig = option(VisionConfig(), "Trained parts of a vision-language model, and their learning rates.")
    trust_remote_code: bool = option(False, "Whether Python code from the model's repository may run.")

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value
