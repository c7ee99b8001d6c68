"""Scores the reference answers of a run's prompts before the run starts.

If the reference answer of a prompt is scored as incorrect, no answer to the prompt can be correct.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig
from roll.errors import DataError
from roll.rewards.reference_checks import InvalidReference, find_invalid_references
from roll.types import Prompt

__all__ = ["ReferenceCheck", "check_references", "find_bad_references"]

logger = logging.getLogger(__name__)

MAX_LISTED = 5
MAX_BAD_FRACTION = 0.1
"""Fraction of references scored as incorrect above which the run is rejected, because the column probably has another
format."""


class ReferenceCheck:
    """The result of checking the reference answers of one data source.

    Args:
        domain: domain of the source.
        num_checked: number of checked prompts.
        invalid: the prompts whose reference answer is scored as incorrect.
    """

    def __init__(self, domain: str, num_checked: int, invalid: Sequence[InvalidReference]) -> None:
        self.domain, self.num_checked, self.invalid = domain, num_checked, invalid

    @property
    def is_rejected(self) -> bool:
        """True if the fraction of invalid references is so high that the run is rejected."""
        return len(self.invalid) > MAX_BAD_FRACTION * self.num_checked

    def __str__(self) -> str:
        examples = "; ".join(f"'{each.uid}': {each.problem}" for each in self.invalid[:MAX_LISTED])
        more = f"; and {len(self.invalid) - MAX_LISTED} more" if len(self.invalid) > MAX_LISTED else ""
        return (
            f"the reference answers of {len(self.invalid)} of {self.num_checked} prompts of '{self.domain}' are scored "
            f"as wrong, so no answer to these prompts can be correct: {examples}{more}. Correct or "
            "remove these rows, or extract the answer from the column with answer_key and answer_pattern."
        )


async def find_bad_references(
    data: Sequence[DataConfig], prompts: Mapping[str, Iterable[Prompt]]
) -> list[ReferenceCheck]:
    """Score the reference answers of prompts, and return the sources with references that are scored as incorrect.

    Args:
        data: the data sources.
        prompts: for each domain, the prompts to check.
    """
    found: list[ReferenceCheck] = []
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(1)
        stack.push_async_callback(pool.close)
        for entry in data:
            domain = entry.domain or entry.source
            checked = [prompt for prompt in prompts.get(domain, ()) if prompt.environment is None]
            invalid = await find_invalid_references(pool, [(entry.reward, prompt) for prompt in checked])
            if invalid:
                found.append(ReferenceCheck(domain, len(checked), invalid))
    return found


async def check_references(data: Sequence[DataConfig], prompts: Mapping[str, Iterable[Prompt]]) -> None:
    """Log a warning about reference answers that are scored as incorrect.

    Raises:
        DataError: more than a tenth of a source's checked references are scored as incorrect.
    """
    found = await find_bad_references(data, prompts)
    for check in found:
        if not check.is_rejected:
            logger.warning("%s", check)
    if rejected := [str(check) for check in found if check.is_rejected]:
        raise DataError(" ".join(rejected))
