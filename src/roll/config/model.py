"""The trained language model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import Field, model_validator

from roll.config.base import Section, option, path_option

__all__ = ["LoRAConfig", "ModelConfig", "VisionConfig", "VisionPart"]


class LoRAConfig(Section):
    """Training of low-rank adapters instead of all weights, with `peft`."""

    rank: int = option(16, "Rank of the adapters.", ge=1)
    alpha: float = option(32.0, "Scale of the adapters: the output of an adapter is multiplied by alpha / rank.", gt=0)
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
