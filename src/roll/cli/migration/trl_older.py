"""Keys of older versions of TRL and transformers that its configurations and scripts still have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roll.cli.migration.rules import LibraryValues, Rule, UnsupportedValueError, conversion_rule, unsupported_key_rule

__all__ = ["OLDER_KEY_RULES", "RENAMED_KEYS"]

RENAMED_KEYS: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
"""Older names of keys, with the equivalent names of TRL 1.16."""


def _convert_warmup(values: LibraryValues) -> Mapping[str, Any]:
    """Return the warm-up in steps of ROLL; like transformers, ignore `warmup_ratio` if `warmup_steps` is set."""
    share = values.warmup_ratio
    if not share or values.warmup_steps:
        return {}
    if not 0 <= float(share) <= 1:
        raise ValueError("it is a fraction of all steps and must be between 0 and 1")
    total = values.total_steps(values)
    if total is None:
        raise UnsupportedValueError(
            "a fraction of all steps requires the number of rows: set --rows or training.warmup_steps"
        )
    return {"training.warmup_steps": math.ceil(float(share) * total)}


_PROMPTS = (
    "prompts are never truncated: TRL kept the last tokens of a longer prompt, ROLL trains on the whole prompt. "
    "Remove longer prompts from the file; inference.max_context limits the total length of prompt and answer"
)
OLDER_KEY_RULES: list[Rule] = [
    conversion_rule(
        "warmup_ratio", None, ["training.warmup_steps"], _convert_warmup, "times all steps, if warmup_steps is not set"
    ),
    unsupported_key_rule("max_prompt_length", None, _PROMPTS),
]
"""Rules of keys that TRL 1.16 no longer has, for every trainer."""
