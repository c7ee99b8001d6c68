"""Recorded batches, which replace the controller, the scheduler and the engines.

    recording ─ step N ─► prompts drawn again from the data, compared ─► Batch ─► train ─► complete_step (boundary)

Invariants:
    - a batch has the prompts, prompt tokens and order of the recorded run; otherwise, the replay stops and reports a
      prompt;
    - at every step's boundary the prompt stream, the ledger's draws and the draws in flight are as recorded, so a
      replay can be interrupted and resumed like any run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from roll.data import PromptData
from roll.errors import CheckpointError, DataError
from roll.pipelines.learning.state import LearningState
from roll.pipelines.recording.files import Recording
from roll.pipelines.recording.records import RecordedStep
from roll.records import validate_record
from roll.rollout import Batch, DataLedger, SelectionBias
from roll.types import Group, Prompt, PromptDraw, Rollout, RolloutId

__all__ = ["RecordedBatches", "build_draw_without_prompt", "restore_prompts"]


@dataclass(eq=False)
class RecordedBatches:
    """Returns recorded batches; implements `BatchSource`."""

    recording: Recording
    """Recording of the run that is replayed."""
    data: PromptData
    """The prompts; the recording contains only prompt UIDs."""
    state: LearningState
    """State of the run, at a step's boundary."""
    ledger: DataLedger
    """Ledger in which the recorded draws are opened."""
    demonstrations: tuple[Rollout, ...] = field(init=False, default=())
    """Expert rollouts of the last batch's prompts."""
    _current: RecordedStep | None = field(init=False, default=None)

    async def next_batch(self) -> Batch:
        """Return the recorded batch of step `state.step + 1`.

        Raises:
            DataError: The step is not recorded, the recording is corrupted, or the data's prompts have changed.
        """
        recorded = await asyncio.to_thread(self.recording.read, self.state.step + 1)
        for drawn in recorded.draws:
            if drawn.draw_id == len(self.ledger):
                self.ledger.record_draws([build_draw_without_prompt(drawn.draw_id, uid=drawn.uid)], drawn.step)
        self._current = recorded
        groups = restore_prompts(self.data, recorded.groups)
        prompts = {group.draw.draw_id: group.draw.prompt for group in groups}
        self.demonstrations = tuple(replace(r, prompt=prompts[r.draw_id]) for r in recorded.demonstrations)
        return Batch(
            groups=groups,
            companions={purpose: restore_prompts(self.data, found) for purpose, found in recorded.companions.items()},
            rejection_reasons=dict(recorded.left_out),
            expired=dict(recorded.expired),
            expired_lengths=list(recorded.expired_lengths),
            num_refills=recorded.num_refills,
            kind=recorded.kind,
            staleness=list(recorded.staleness),
            selection_bias=validate_record(SelectionBias, recorded.selection_bias, f"recording of step {recorded.step}")
            if recorded.selection_bias
            else None,
        )

    async def complete_step(self, version: int, trained: Collection[RolloutId]) -> None:
        """Complete the step: set the prompt stream to the position that was recorded after this step."""
        assert self._current is not None, "a step has a batch"
        self.data.train.restore(dict(self._current.stream))

    def list_in_flight(self) -> list[PromptDraw]:
        """Return the recorded draws in flight at the last boundary."""
        pending = () if self._current is None else self._current.pending
        return [
            build_draw_without_prompt(draw_id, domain=domain, position=position)
            for draw_id, domain, position in pending
        ]

    def get_counts(self) -> dict[str, int]:
        """Return the recorded counts of engines and requests at the last boundary."""
        assert self._current is not None, "a step has a batch"
        return {"hung": 0, **self._current.counters}  # older recordings count hung engines only as replaced


def build_draw_without_prompt(draw_id: int, *, uid: str = "", domain: str = "", position: int = 0) -> PromptDraw:
    """Build a draw whose prompt has no text, because ledger and checkpoints store only the UID and the domain."""
    prompt = Prompt(uid=uid, domain=domain, messages=())
    return PromptDraw(draw_id=draw_id, prompt=prompt, token_ids=np.zeros(0, np.int32), position=position)


def restore_prompts(data: PromptData, groups: Iterable[Group]) -> list[Group]:
    """Return recorded groups with complete prompts, which are read from the data again.

    Raises:
        DataError: A prompt or its tokens have changed.
    """
    found = []
    for group in groups:
        recorded = group.draw
        try:
            draw = data.train.redraw(recorded.draw_id, recorded.prompt.domain, recorded.position)
        except CheckpointError as error:
            raise DataError(f"draw {recorded.draw_id} of the recording cannot be reproduced: {error}") from None
        if draw.prompt.uid != recorded.prompt.uid:
            raise DataError(
                f"draw {recorded.draw_id} was recorded with prompt '{recorded.prompt.uid}', but the data now "
                f"contain '{draw.prompt.uid}' at this position: replay with the original data."
            )
        if draw.media != recorded.media:
            raise DataError(
                f"prompt '{draw.prompt.uid}' was recorded with images, audio or video that differ from the data: "
                "replay with the original data."
            )
        if not np.array_equal(draw.token_ids, recorded.token_ids):
            raise DataError(
                f"prompt '{draw.prompt.uid}' was recorded with {len(recorded.token_ids)} tokens, but the chat "
                f"template now renders {len(draw.token_ids)} different tokens: replay with the original template."
            )
        rollouts = tuple(replace(rollout, prompt=draw.prompt) for rollout in group.rollouts)
        found.append(Group(draw=draw, rollouts=rollouts))
    return found
