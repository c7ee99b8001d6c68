"""Scores the references of a run's prompts against themselves, before the run starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from roll.cluster.pool import LocalWorkerPool
from roll.config.data import DataConfig
from roll.errors import DataError
from roll.rewards.own_references import BadReference, bad_references
from roll.types import Prompt

__all__ = ["ReferenceCheck", "check_references", "references_of_sources"]

logger = logging.getLogger(__name__)

MOST_SHOWN = 5
MOST_BAD = 0.1
"""Share of a source's bad references above which the run is rejected, since the reward cannot read the column."""


class ReferenceCheck:
    """The result for the references of one source.

    Args:
        domain: the source.
        num_checked: number of checked prompts.
        bad: prompts whose references are not correct when scored against themselves.
    """

    def __init__(self, domain: str, num_checked: int, bad: Sequence[BadReference]) -> None:
        self.domain, self.num_checked, self.bad = domain, num_checked, bad

    @property
    def is_refused(self) -> bool:
        """Whether too many references are bad for training to make sense."""
        return len(self.bad) > MOST_BAD * self.num_checked

    def __str__(self) -> str:
        shown = "; ".join(f"'{each.uid}': {each.problem}" for each in self.bad[:MOST_SHOWN])
        more = f"; and {len(self.bad) - MOST_SHOWN} more" if len(self.bad) > MOST_SHOWN else ""
        return (
            f"the references of {len(self.bad)} of {self.num_checked} prompts of '{self.domain}' are not right against "
            f"themselves, so every answer to them is wrong: {shown}{more}. Change or leave out these rows, or take the "
            "answer from the column by answer_key and answer_pattern."
        )


async def references_of_sources(
    data: Sequence[DataConfig], prompts: Mapping[str, Iterable[Prompt]]
) -> list[ReferenceCheck]:
    """Return the result for each source that has bad references.

    Args:
        data: the sources.
        prompts: the prompts of each domain to check.
    """
    found: list[ReferenceCheck] = []
    async with AsyncExitStack() as stack:
        pool = LocalWorkerPool(1)
        stack.push_async_callback(pool.close)
        for entry in data:
            domain = entry.domain or entry.source
            asked = [prompt for prompt in prompts.get(domain, ()) if prompt.environment is None]
            bad = await bad_references(pool, [(entry.reward, prompt) for prompt in asked])
            if bad:
                found.append(ReferenceCheck(domain, len(asked), bad))
    return found


async def check_references(data: Sequence[DataConfig], prompts: Mapping[str, Iterable[Prompt]]) -> None:
    """Warn of references that are not correct when scored against themselves.

    Raises:
        DataError: more than a tenth of a source's references are bad.
    """
    found = await references_of_sources(data, prompts)
    for check in found:
        if not check.is_refused:
            logger.warning("%s", check)
    if refused := [str(check) for check in found if check.is_refused]:
        raise DataError(" ".join(refused))
