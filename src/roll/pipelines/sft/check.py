"""Checks of supervised fine-tuning before it starts, for `roll check`."""

from functools import partial

from roll.pipelines.supervised.check import inspect as inspect_examples

__all__ = ["inspect"]

inspect = partial(inspect_examples, kind="supervised", method="likelihood", loss="roll.pipelines.sft.pipeline:LOSS")
