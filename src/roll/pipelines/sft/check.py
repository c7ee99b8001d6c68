"""What `roll check` says of supervised fine-tuning."""

from functools import partial

from roll.pipelines.supervised.check import inspect as look

__all__ = ["inspect"]

inspect = partial(look, kind="supervised", method="likelihood", loss="roll.pipelines.sft.pipeline:LOSS")
