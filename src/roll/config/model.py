"""The trained language model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from roll.config.base import Section, option, path_option

__all__ = ["LoRAConfig", "ModelConfig"]


class LoRAConfig(Section):
    """Train low-rank adapters instead of all weights (through `peft`)."""

    rank: int = option(16, "Rank of the adapters.", ge=1)
    alpha: float = option(32.0, "Scale of the adapters: their output is multiplied by alpha / rank.", gt=0)
    base: Literal["as_is", "nf4"] = option(
        "as_is",
        "Number format of the frozen weights under adapters while training: `nf4` takes 4.1 bits each (QLoRA, arXiv "
        "2305.14314), and each use of them a little time. Engines and exports get them as they are read back, with the "
        "adapters added.",
    )
    dropout: float = option(0.0, "Dropout inside the adapters while training.", ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = option(
        "all-linear", "Names of the linear layers that get an adapter, such as `q_proj`, or `all-linear`."
    )


class ModelConfig(Section):
    """`model: NAME` is short for `model: {path: NAME}`."""

    path: str = path_option(
        ...,
        "A name from the catalogue (`smollm2-135m-instruct`), a Hugging Face directory, or a hub id.",
        min_length=1,
    )
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16",
        "Number format of the computation, in trainer and engines; master weights are always float32.",
    )
    lora: LoRAConfig | None = option(None, "Adapters to train; `null` trains all weights.")
    trust_remote_code: bool = option(False, "Let the model's repository run its own Python code.")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value
